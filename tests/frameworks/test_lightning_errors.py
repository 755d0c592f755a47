"""What Lightning cannot do with a sharpness-aware optimizer is refused; nothing has changed then."""

import warnings
from typing import Any

import lightning
import pytest
from framework_helpers import (
    difference,
    net,
    plain_loop,
    pretend_ddp,
    samples,
    windows,
    wsam_over_sgd,
)
from lightning_helpers import Net, fit
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wsam.integrations import lightning as mixin
from wsam.integrations.lightning import SharpnessAwareMixin


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


def test_refuses_clipping_by_value() -> None:
    with pytest.raises(ValueError, match="max_norm"):
        fit(Net(), gradient_clip_val=0.3, gradient_clip_algorithm="value")


def test_refuses_two_clipping_norms() -> None:
    with pytest.raises(ValueError, match="give one of them"):
        fit(Net(lambda params: wsam_over_sgd(params, max_norm=0.2)), gradient_clip_val=0.3)


def test_refuses_clipping_with_lean() -> None:
    with pytest.raises(ValueError, match="lean"):
        fit(Net(lambda params: wsam_over_sgd(params, lean=True)), gradient_clip_val=0.3)


class OwnClipping(Net):
    def configure_gradient_clipping(self, optimizer: Any, *rest: Any, **named: Any) -> None:
        self.clip_gradients(optimizer, 0.1, "norm")


def test_refuses_own_clipping_hook() -> None:
    with pytest.raises(TypeError, match="max_norm"):
        fit(OwnClipping())


class OwnHook(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass


def test_refuses_lost_batches() -> None:
    module = OwnHook()
    with pytest.raises(RuntimeError, match="super"):
        fit(module, accumulate_grad_batches=2)
    assert difference(module.body, net()) == 0


def test_refuses_mixin_listed_last() -> None:
    with pytest.raises(TypeError, match="list the mixin first"):
        type("Wrong", (lightning.LightningModule, SharpnessAwareMixin), {})


def test_refuses_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP and DeepSpeed cannot run here; what is refused is any strategy that is not listed."""
    for name in ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy", "XLAStrategy"):
        assert not mixin.is_supported(getattr(lightning.pytorch.strategies, name))
    assert mixin.is_supported(lightning.pytorch.strategies.DDPStrategy)
    monkeypatch.setattr(mixin, "STRATEGIES", ("DDPStrategy",))
    module = Net()
    with pytest.raises(ValueError, match="SingleDeviceStrategy is not supported"):
        fit(module)
    assert difference(module.body, net()) == 0


def test_refuses_local_perturbation() -> None:
    model = pretend_ddp(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="this framework does not make"):
        fit(Net(lambda params: wsam_over_sgd(params, local=True, model=model)))


class Bare(lightning.LightningModule):
    """A module that gives Lightning the optimizer and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.body(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return wsam_over_sgd(self.parameters())


class BareClipping(Bare):
    def configure_gradient_clipping(self, optimizer: Any, *rest: Any, **named: Any) -> None:
        self.clip_gradients(optimizer, 0.1, "norm")


def test_works_plainest_case_without_the_mixin() -> None:
    module, twin = Bare(), net()
    fit(module, max_epochs=1)
    plain_loop(twin, wsam_over_sgd(twin.parameters()), windows(samples(), 4))
    assert difference(module.body, twin) == 0


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Bare, {"accumulate_grad_batches": 2}),
        (Bare, {"gradient_clip_val": 0.1}),
        (BareClipping, {}),
    ],
)
def test_refuses_more_without_the_mixin(kind: type[Bare], options: dict[str, Any]) -> None:
    module = kind()
    with pytest.raises(RuntimeError, match="SharpnessAwareMixin"):
        fit(module, **options)
    assert difference(module.body, net()) == 0


class Bypassing(Net):
    def optimizer_step(self, epoch: Any, index: Any, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure=closure)


def test_refuses_accumulation_past_the_mixin() -> None:
    """An optimizer_step of one's own must call super(): else it is as if the mixin were not there."""
    with pytest.raises(RuntimeError, match="SharpnessAwareMixin"):
        fit(Bypassing(), accumulate_grad_batches=2)
