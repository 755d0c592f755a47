"""Lightning's automatic optimization with the mixin equals the plain loop."""

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from framework_helpers import (
    difference,
    gap,
    net,
    new_scaler,
    plain_loop,
    run_script,
    samples,
    scaled_loop,
    split_into_steps,
    train_plain,
    wsam_over_adamw,
    wsam_over_sgd,
)
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning_helpers import Net, fit, trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import wsam
from wsam.integrations.metrics import metrics_unchanged
from wsam.schedule import Every

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _no_lightning_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


@pytest.mark.parametrize("name", sorted(wsam.METHODS))
def test_works_training(name: str) -> None:
    def make(params: Any) -> wsam.SharpnessAware:
        return wsam.create(name, torch.optim.AdamW(params, lr=0.02))

    module = Net(make)
    fit(module)
    model, _, _ = train_plain(make)
    assert difference(module.body, model) == 0


def test_works_accumulation() -> None:
    """Three micro-batches a step, and two in the last one of an epoch."""
    module = Net()
    runner = fit(module, samples(32), accumulate_grad_batches=3)
    model, _, _ = train_plain(count=32, accumulate=3)
    assert difference(module.body, model) == 0
    assert runner.global_step == 6
    assert module.calls == 32


def esam(params: Any) -> wsam.SharpnessAware:
    return wsam.ESAM(torch.optim.SGD(params, lr=0.1), gamma=0.5)


def test_works_accumulation_with_selected_samples() -> None:
    module = Net(esam)
    fit(module, accumulate_grad_batches=3)
    assert difference(module.body, train_plain(esam, accumulate=3)[0]) == 0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_works_clipping_by_norm(accumulate: int) -> None:
    """The Trainer's clipping becomes the optimizer's max_norm: one factor for both terms."""
    module = Net()
    fit(module, gradient_clip_val=0.3, accumulate_grad_batches=accumulate)
    clipped = train_plain(
        lambda params: wsam_over_sgd(params, max_norm=0.3), accumulate=accumulate
    )[0]
    assert difference(module.body, clipped) == 0
    assert difference(module.body, train_plain(accumulate=accumulate)[0]) > 1e-3


def test_works_bf16() -> None:
    module = Net()
    fit(module, precision="bf16-mixed", accumulate_grad_batches=2)
    model, _, _ = train_plain(accumulate=2, autocast=torch.bfloat16)
    assert difference(module.body, model) == 0
    assert difference(module.body, train_plain(accumulate=2)[0]) > 0


@pytest.mark.parametrize("clip", [None, 0.3])
def test_works_fp16_scaler(clip: float | None) -> None:
    """Uses a plugin, because on a CPU Lightning turns `precision="16-mixed"` into bfloat16."""
    scaler = new_scaler()
    module = Net()
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    fit(module, plugins=[plugin], accumulate_grad_batches=2, gradient_clip_val=clip)
    model = net()
    optimizer = wsam_over_sgd(model.parameters(), max_norm=clip)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    steps = split_into_steps(samples(), 4, accumulate=2, epochs=2)
    scaled_loop(model, optimizer, steps, new_scaler(), accumulate=2, after_step=scheduler.step)
    assert difference(module.body, model) == 0
    assert scaler.get_scale() == 1024.0


def test_works_fp16_overflow() -> None:
    """An overflow leaves the weights unchanged, and the scale is halved once per step."""
    scaler = new_scaler(2.0**40)
    module = Net()
    runner = fit(module, plugins=[MixedPrecision("16-mixed", "cpu", scaler)], max_epochs=1)
    assert difference(module.body, net()) == 0
    assert scaler.get_scale() == 2.0**34
    assert runner.optimizers[0].skipped == 6


class Counter(Callback):
    """Counts the calls of hooks and records their losses."""

    def __init__(self) -> None:
        self.before_step = 0
        self.outputs: list[float] = []

    def on_before_optimizer_step(self, runner: Any, module: Any, optimizer: Any) -> None:
        self.before_step += 1
        assert all(p.grad is not None for p in module.parameters())

    def on_train_batch_end(self, runner: Any, module: Any, outputs: Any, *rest: Any) -> None:
        self.outputs.append(float(outputs["loss"]))


class Recorder(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, metrics["loss"]))


def test_works_one_step_per_step() -> None:
    """Counters, schedulers, callbacks and loggers see one step per step, and the loss at w."""
    module, counter, recorder = Net(), Counter(), Recorder()
    runner = fit(module, callbacks=[counter], logger=recorder, log_every_n_steps=1)
    _, optimizer, losses = train_plain()
    assert runner.global_step == counter.before_step == 12
    assert runner.optimizers[0].param_groups[0]["sam_step"] == 12
    assert runner.optimizers[0].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert runner.lr_scheduler_configs[0].scheduler._step_count == 13
    assert counter.outputs == pytest.approx(losses)
    assert [step for step, _ in recorder.rows] == list(range(12))
    assert [loss for _, loss in recorder.rows] == pytest.approx(losses)


class Metered(Net):
    """Has metrics with sums, with growing lists, and in a collection that shares states."""

    def __init__(self, make: Any) -> None:
        super().__init__(make)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.auroc = torchmetrics.AUROC("multiclass", num_classes=3)
        self.samples = torchmetrics.SumMetric()
        metrics = [torchmetrics.Recall, torchmetrics.Precision]
        self.collection = torchmetrics.MetricCollection(
            [metric("multiclass", num_classes=3) for metric in metrics]
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, y = self.body(batch[0]), batch[1]
        loss = cross_entropy(logits, y)
        self.samples.update(len(y))
        self.auroc.update(logits, y)
        self.accuracy(logits, y)
        self.collection(logits, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("auroc", self.auroc, on_step=False, on_epoch=True)
        self.log("samples", self.samples, on_step=False, on_epoch=True)
        self.log_dict(self.collection, on_step=False, on_epoch=True)
        self.log_dict({"mean": loss.detach()}, on_epoch=True)
        return loss


class Rows(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, metrics))


class AnyArguments(Net):
    def training_step(self, *arguments: Any) -> Tensor:
        assert len(arguments) == 2
        return super().training_step(*arguments)


class ReplacedStep(Net):
    """Counts the steps by a replaced `optimizer.step`, as profilers do."""

    steps = 0

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        step = optimizer.step

        def counted(*args: Any) -> Any:
            self.steps += 1
            return step(*args)

        optimizer.step = counted
        return optimizer


def test_training_step_with_variable_arguments() -> None:
    fit(expected := Net())
    fit(module := AnyArguments())
    assert difference(module.body, expected.body) == 0


def test_replaced_step_stays_in_place() -> None:
    fit(module := ReplacedStep())
    assert module.steps == 12


def test_metrics_keep_no_attribute_of_the_second_pass() -> None:
    class Last(torchmetrics.SumMetric):
        def update(self, value: float) -> None:
            self.last = value
            super().update(value)

    metric = Last()
    with metrics_unchanged([metric]):
        metric.update(1.0)
        assert metric.last == metric.compute() == 1.0
    assert not hasattr(metric, "last")
    assert metric.sum_value == 0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_works_metrics(accumulate: int) -> None:
    """Metrics and logs have the values that a plain optimizer gives: each sample counts once."""
    found = []
    for method in (lambda base: base, wsam.SAM):
        module = Metered(lambda params, method=method: method(torch.optim.SGD(params, lr=0.0)))
        rows = Rows()
        options = {"logger": rows, "log_every_n_steps": 1, "accumulate_grad_batches": accumulate}
        fit(module, **options)
        found.append(rows.rows)
    assert found[0] == found[1]
    assert [row["samples"] for _, row in found[1] if "samples" in row] == [24, 24]


@pytest.mark.parametrize("make", [wsam_over_sgd, esam])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_works_sharpness_readout(accumulate: int, make: Any) -> None:
    runner = fit(Net(make), accumulate_grad_batches=accumulate)
    optimizer = train_plain(make, accumulate=accumulate)[1]
    found = runner.optimizers[0].sharpness
    assert float(found) == pytest.approx(float(optimizer.sharpness), rel=1e-4)


class Noisy(Dataset[Any]):
    """A data set that draws random numbers when it is read, as augmentation does."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(5), index % 3


class Masks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first: list[Tensor] = []
        self.second: list[Tensor] = []
        self.dropout = nn.Dropout()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (self.second if self.in_second_pass else self.first).append(self.dropout(torch.ones(64)))
        return super().training_step(batch, batch_idx)


def test_works_same_dropout_masks() -> None:
    module = Masks()
    fit(module, Noisy(), size=2, accumulate_grad_batches=2, max_epochs=1)
    assert len(module.first) == 4
    assert all(torch.equal(u, v) for u, v in zip(module.first, module.second, strict=True))
    assert not any(torch.equal(module.first[0], mask) for mask in module.first[1:])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_works_resume(accumulate: int, tmp_path: Path) -> None:
    """Training resumed from a checkpoint after an epoch ends bit for bit the same."""
    common = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    whole, halfway, resumed = Net(), Net(), Net()
    fit(whole, **common)
    keep = ModelCheckpoint(tmp_path, filename="epoch")
    fit(halfway, callbacks=[keep], enable_checkpointing=True, max_epochs=1, **common)
    runner = trainer(**common)
    runner.fit(resumed, DataLoader(samples(), 4), ckpt_path=tmp_path / "epoch.ckpt")
    assert resumed.calls == halfway.calls == whole.calls // 2
    assert difference(resumed, whole) == 0
    assert difference(resumed, halfway) > 0
    assert runner.global_step == 12 // accumulate
    assert runner.optimizers[0].param_groups[0]["sam_step"] == 12 // accumulate


def test_works_interval() -> None:
    """Steps that are not sharpness-aware have no second pass."""
    make = lambda params: wsam_over_sgd(params, when=Every(3))  # noqa: E731
    module = Net(make)
    fit(module)
    assert module.calls == 12 + 4
    assert difference(module.body, train_plain(make)[0]) == 0


class Failing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3 and self.in_second_pass:
            raise KeyError("second pass")
        return super().training_step(batch, batch_idx)


def test_works_error_in_second_pass() -> None:
    """The weights return to w, and the optimizer remains usable."""
    module = Failing()
    runner = trainer()
    with pytest.raises(KeyError, match="second pass"):
        runner.fit(module, DataLoader(samples(), 4))
    model = net()
    optimizer = wsam_over_sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    plain_loop(model, optimizer, split_into_steps(samples(), 4)[:3], after_step=scheduler.step)
    assert difference(module.body, model) == 0
    runner.optimizers[0].state_dict()


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    run_script("ddp_lightning.py", str(folder))
    return folder


def check_ddp(folder: Path, accumulate: int, clip: float | None) -> None:
    """Two processes with half of each batch equal one process, up to rounding."""
    steps, weights = torch.load(folder / f"{accumulate}.pt")
    module = Net(dtype=torch.float64)
    data = samples(dtype=torch.float64)
    fit(module, data, accumulate_grad_batches=accumulate, gradient_clip_val=clip)
    assert steps == 12 // accumulate
    assert gap(weights, module) < 1e-13


def test_works_ddp(two_processes: Path) -> None:
    check_ddp(two_processes, 1, None)


def test_works_ddp_with_accumulation_and_clipping(two_processes: Path) -> None:
    check_ddp(two_processes, 2, 0.3)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two processes with FSDP2 found; see fsdp2_lightning.py."""
    folder = tmp_path_factory.mktemp("fsdp2")
    run_script("fsdp2_lightning.py", str(folder))
    return torch.load(folder / "two.pt")


def test_works_fsdp2_with_accumulation_and_clipping(sharded: Any) -> None:
    """Two processes with half of each batch and of the model equal one process, up to rounding."""
    module = Net(dtype=torch.float64)
    data = samples(dtype=torch.float64)
    fit(module, data, accumulate_grad_batches=2, gradient_clip_val=0.3)
    assert gap(sharded["sgd"], module) < 1e-13


def test_works_fsdp2_over_adamw(sharded: Any) -> None:
    module = Net(wsam_over_adamw, dtype=torch.float64)
    fit(module, samples(dtype=torch.float64))
    assert gap(sharded["adamw"], module) < 1e-13


def test_works_fsdp2_resume(sharded: Any) -> None:
    assert sharded["resumed"]


class LeavesOutBatches(Net):
    """Returns None for some batches, as Lightning allows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in {1, 4} else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("plugins", [[], [MixedPrecision("16-mixed", "cpu", new_scaler())]])
def test_works_training_step_returning_none(plugins: list[Any]) -> None:
    module = LeavesOutBatches()
    module.configure_optimizers = lambda: wsam_over_sgd(module.parameters())  # type: ignore[method-assign]
    runner = fit(module, max_epochs=1, plugins=plugins)
    model = net()
    optimizer = wsam_over_sgd(model.parameters())
    steps = [step for i, step in enumerate(split_into_steps(samples(), 4)) if i not in {1, 4}]
    loop = functools.partial(scaled_loop, scaler=new_scaler()) if plugins else plain_loop
    loop(model, optimizer, steps)
    assert difference(module.body, model) == 0
    assert runner.optimizers[0].param_groups[0]["sam_step"] == 4


class ReadsOptimizer(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        self.rates.append(optimizer.param_groups[0]["lr"])
        assert "WSAM" in repr(optimizer)
        return super().training_step(batch, batch_idx)


def test_works_wrapped_optimizer() -> None:
    """The wrapper returned by `self.optimizers()` forwards attributes, but not the phases."""
    module = ReadsOptimizer()
    runner = fit(module, max_epochs=1)
    assert module.rates[::2] == [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
    wrapped = runner.strategy._lightning_optimizers[0]
    with pytest.raises(TypeError, match=r"\.optimizer"):
        wrapped.ascend()


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        x, y = batch

        def closure() -> Tensor:
            loss = cross_entropy(self.body(x), y)
            self.log("loss", loss)
            self.manual_backward(loss)
            return loss

        self.optimizers().step(closure)
        self.lr_schedulers().step()


def test_works_manual_optimization() -> None:
    module, recorder = Manual(), Recorder()
    runner = fit(module, logger=recorder, log_every_n_steps=1)
    model, _, losses = train_plain()
    assert difference(module.body, model) == 0
    assert runner.global_step == 12
    assert [loss for _, loss in recorder.rows] == pytest.approx(losses)


class InnerOptimizer(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        def closure() -> Tensor:
            loss = cross_entropy(self.body(batch[0]), batch[1])
            self.manual_backward(loss)
            return loss

        self.optimizers().optimizer.step(closure)


def test_steps_of_the_inner_optimizer_are_not_counted() -> None:
    module = InnerOptimizer()
    runner = fit(module)
    assert runner.global_step == 0
    assert runner.optimizers[0].param_groups[0]["sam_step"] == 12


class TwoOptimizers(Manual):
    """One optimizer for each layer."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        x, y = batch

        def closure() -> Tensor:
            loss = cross_entropy(self.body(x), y)
            self.manual_backward(loss)
            return loss

        for optimizer in self.optimizers():
            optimizer.step(closure)

    def configure_optimizers(self) -> Any:
        return [self.make(self.body[i].parameters()) for i in (0, 2)]


def test_works_two_optimizers() -> None:
    module = TwoOptimizers()
    runner = fit(module, max_epochs=1)
    model = net()
    optimizers = [wsam_over_sgd(model[i].parameters()) for i in (0, 2)]
    for step in split_into_steps(samples(), 4):
        for optimizer in optimizers:
            plain_loop(model, optimizer, [step])
    assert difference(module.body, model) == 0
    assert runner.global_step == 12  # of both


class Plain(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.body(batch[0]), batch[1])


def test_works_plain_optimizer_with_the_mixin() -> None:
    """The mixin leaves a plain optimizer to Lightning."""
    module = Plain(lambda params: torch.optim.SGD(params, lr=0.1))
    fit(module, gradient_clip_val=0.1, max_epochs=1)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for ((x, y),) in split_into_steps(samples(), 4):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
    assert difference(module.body, model) == 0


@pytest.mark.parametrize("name", ["sam", "wsam"])
def test_works_second_pass_returning_none(name: str) -> None:
    """If training_step returns None only in the second pass, the step is skipped."""

    class LeavesOutSecondPass(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if self.calls == 4 else loss

    module = LeavesOutSecondPass(lambda params: wsam.create(name, torch.optim.SGD(params, lr=0.1)))
    runner = fit(module, samples(12))
    assert module.calls > 4
    assert runner.optimizers[0].skipped == 1
