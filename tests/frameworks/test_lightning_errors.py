"""Settings of Lightning that are not supported raise, and leave the weights unchanged."""

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
    split_into_steps,
    wsam_over_sgd,
)
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning_helpers import Net, fit
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wsam.integrations import lightning as mixin
from wsam.integrations.lightning import SharpnessAwareMixin

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _no_lightning_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


def test_refuses_clipping_by_value() -> None:
    with pytest.raises(ValueError, match="max_norm"):
        fit(Net(), gradient_clip_val=0.3, gradient_clip_algorithm="value")


def test_refuses_two_clipping_norms() -> None:
    with pytest.raises(ValueError, match="set only one of them"):
        fit(Net(lambda params: wsam_over_sgd(params, max_norm=0.2)), gradient_clip_val=0.3)


def test_refuses_clipping_with_lean() -> None:
    with pytest.raises(ValueError, match="lean"):
        fit(Net(lambda params: wsam_over_sgd(params, lean=True)), gradient_clip_val=0.3)


class OverriddenClipping(Net):
    def configure_gradient_clipping(self, optimizer: Any, *rest: Any, **named: Any) -> None:
        self.clip_gradients(optimizer, 0.1, "norm")


def test_refuses_overridden_clipping_hook() -> None:
    with pytest.raises(TypeError, match="max_norm"):
        fit(OverriddenClipping())


class OwnHook(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass


def test_refuses_batch_hook_without_super() -> None:
    module = OwnHook()
    with pytest.raises(RuntimeError, match="super"):
        fit(module, accumulate_grad_batches=2)
    assert difference(module.body, net()) == 0


class HalfHook(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 2:
            return super().on_train_batch_start(batch, batch_idx)
        return None


def test_batch_hook_that_calls_super_at_times_raises() -> None:
    module = HalfHook()
    with pytest.raises(RuntimeError, match="the step has 2 batches, but 1 were recorded"):
        fit(module, accumulate_grad_batches=2)
    assert difference(module.body, net()) == 0


class NoOptimizer(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.body(batch[0]).mean()

    def configure_optimizers(self) -> None:
        return None


def test_module_without_optimizers_runs() -> None:
    fit(module := NoOptimizer())
    assert difference(module.body, net()) == 0


class FailsOnce(Net):
    failed = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.failed:
            self.failed = True
            raise KeyError("first run")
        return super().training_step(batch, batch_idx)


def test_run_after_an_error_forgets_the_recorded_batches() -> None:
    module = FailsOnce()
    with pytest.raises(KeyError, match="first run"):
        fit(module, accumulate_grad_batches=2)
    assert difference(module.body, net()) == 0
    fit(module, accumulate_grad_batches=2)
    assert difference(module.body, net()) > 0


def test_refuses_mixin_listed_last() -> None:
    with pytest.raises(TypeError, match="list the mixin first"):
        type("Wrong", (lightning.LightningModule, SharpnessAwareMixin), {})
    helper = type("Helper", (), {})  # without an optimizer_step, it hides nothing
    type("Right", (helper, SharpnessAwareMixin, lightning.LightningModule), {})
    type("OwnStep", (Net,), {"optimizer_step": Net.optimizer_step})  # may call super()


def test_refuses_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every strategy that is not listed is refused. Most of them cannot run on a CPU."""
    for name in ("FSDPStrategy", "DeepSpeedStrategy", "XLAStrategy"):
        assert not mixin.is_supported(getattr(lightning.pytorch.strategies, name))
    for name in ("DDPStrategy", "ModelParallelStrategy"):
        assert mixin.is_supported(getattr(lightning.pytorch.strategies, name))
    monkeypatch.setattr(mixin, "STRATEGIES", ("DDPStrategy",))
    module = Net()
    with pytest.raises(ValueError, match="SingleDeviceStrategy is not supported"):
        fit(module)
    assert difference(module.body, net()) == 0


def error_with(name: str) -> str:
    """Return the error that a strategy raises, before the first batch: a stub with its name."""
    stub = type(name, (SingleDeviceStrategy,), {})
    module = Net()
    with pytest.raises(ValueError, match="is not supported") as raised:
        fit(module, strategy=stub("cpu"))
    assert module.calls == 0
    return str(raised.value)


def test_refuses_fsdp1() -> None:
    message = error_with("FSDPStrategy")
    assert "flat shards" in message
    assert "ModelParallelStrategy" in message


def test_refuses_deepspeed() -> None:
    message = error_with("DeepSpeedStrategy")
    assert "its engine calls the optimizer itself" in message
    assert "ModelParallelStrategy" in message


def test_refuses_local_perturbation() -> None:
    model = pretend_ddp(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="local=True"):
        fit(Net(lambda params: wsam_over_sgd(params, local=True, model=model)))


class ManualWithoutClosure(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(cross_entropy(self.body(batch[0]), batch[1]))
        self.optimizers().step()


def test_refuses_manual_step_without_closure() -> None:
    module = ManualWithoutClosure()
    with pytest.raises(
        RuntimeError, match=r"pass a closure: self\.optimizers\(\)\.step\(closure\)"
    ):
        fit(module)
    assert difference(module.body, net()) == 0


class WithoutMixin(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.body(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return wsam_over_sgd(self.parameters())


class WithoutMixinClipping(WithoutMixin):
    def configure_gradient_clipping(self, optimizer: Any, *rest: Any, **named: Any) -> None:
        self.clip_gradients(optimizer, 0.1, "norm")


def test_works_without_the_mixin() -> None:
    module, twin = WithoutMixin(), net()
    fit(module, max_epochs=1)
    plain_loop(twin, wsam_over_sgd(twin.parameters()), split_into_steps(samples(), 4))
    assert difference(module.body, twin) == 0


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (WithoutMixin, {"accumulate_grad_batches": 2}),
        (WithoutMixin, {"gradient_clip_val": 0.1}),
        (WithoutMixinClipping, {}),
    ],
)
def test_refuses_accumulation_and_clipping_without_the_mixin(
    kind: type[WithoutMixin], options: dict[str, Any]
) -> None:
    module = kind()
    with pytest.raises(RuntimeError, match="SharpnessAwareMixin"):
        fit(module, **options)
    assert difference(module.body, net()) == 0


class StepWithoutSuper(Net):
    def optimizer_step(self, epoch: Any, index: Any, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure=closure)


def test_refuses_accumulation_in_step_without_super() -> None:
    """An overridden optimizer_step that does not call super() disables the mixin."""
    with pytest.raises(RuntimeError, match="SharpnessAwareMixin"):
        fit(StepWithoutSuper(), accumulate_grad_batches=2)
