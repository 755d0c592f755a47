"""Accelerate with `TwoPasses` equals the plain loop; unsupported settings raise."""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from accelerate import Accelerator, DistributedType, ParallelismConfig
from accelerate_helpers import Run
from framework_helpers import (
    difference,
    gap,
    net,
    new_scaler,
    plain_loop,
    pretend_ddp,
    reset_accelerate,
    run_script,
    samples,
    scaled_loop,
    split_into_steps,
    train_plain,
    wsam_over_adamw,
    wsam_over_sgd,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import wsam
from wsam.integrations.accelerate import TwoPasses
from wsam.schedule import Every

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    reset_accelerate()
    yield
    reset_accelerate()


@pytest.mark.parametrize("name", sorted(wsam.METHODS))
def test_works_training(name: str) -> None:
    def make(params: Any) -> wsam.SharpnessAware:
        return wsam.create(name, torch.optim.AdamW(params, lr=0.02))

    assert difference(Run(make).epochs(2).body, train_plain(make)[0]) == 0


def test_works_accumulation() -> None:
    """Three micro-batches a step, and two in the last one of an epoch."""
    run = Run(accumulate=3, count=32).epochs(2)
    model, optimizer, _ = train_plain(accumulate=3, count=32)
    assert difference(run.body, model) == 0
    assert run.optimizer.param_groups[0]["sam_step"] == optimizer.param_groups[0]["sam_step"] == 6
    assert run.calls == 2 * 2 * 8


@pytest.mark.parametrize("accumulate", [1, 2])
def test_works_clipping_by_norm(accumulate: int) -> None:
    make = lambda params: wsam_over_sgd(params, max_norm=0.3)  # noqa: E731
    run = Run(make, accumulate=accumulate).epochs(2)
    clipped = train_plain(make, accumulate=accumulate)[0]
    assert difference(run.body, clipped) == 0
    assert difference(clipped, train_plain(accumulate=accumulate)[0]) > 1e-3


def test_works_bf16() -> None:
    run = Run(accumulate=2, mixed_precision="bf16").epochs(2)
    assert difference(run.body, train_plain(accumulate=2, autocast=torch.bfloat16)[0]) < 1e-6
    assert difference(run.body, train_plain(accumulate=2)[0]) > 1e-5


def test_works_fp16_scaler() -> None:
    run = Run(accumulate=2, scaler=new_scaler()).epochs(2)
    model = net()
    optimizer = wsam_over_sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    steps = split_into_steps(samples(), 4, 2, epochs=2)
    after = scheduler.step
    scaled_loop(
        model, optimizer, steps, new_scaler(), accumulate=2, after_step=after, autocast=None
    )
    assert difference(run.body, model) == 0


def test_works_fp16_overflow() -> None:
    """An infinite loss leaves the weights unchanged, and the scale is halved once per step."""
    scaler = new_scaler()
    run = Run(scaler=scaler)
    with torch.no_grad():
        run.body[2].bias[0] = torch.inf
    before = [p.detach().clone() for p in run.body.parameters()]
    run.epochs()
    assert all(torch.equal(p, q) for p, q in zip(run.body.parameters(), before, strict=True))
    assert scaler.get_scale() == 1024.0 / 2**6
    assert run.passes.optimizer.skipped == 6


def test_works_resume(tmp_path: Path) -> None:
    """Loading a state saved after an epoch continues bit for bit."""
    whole = Run(accumulate=2).epochs()
    whole.accelerator.save_state(str(tmp_path))
    whole.epochs()
    rate = whole.optimizer.param_groups[0]["lr"]
    resumed = Run(accumulate=2)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.epochs()
    assert difference(resumed.body, whole.body) == 0
    assert difference(resumed.body, train_plain(accumulate=2)[0]) == 0
    assert resumed.optimizer.param_groups[0]["lr"] == rate
    assert resumed.optimizer.param_groups[0]["sam_step"] == 6


@pytest.mark.parametrize("accumulate", [1, 2])
def test_works_one_step_per_step(accumulate: int) -> None:
    """Counters and schedulers advance once per step, and the returned loss is L(w)."""
    run = Run(accumulate=accumulate).epochs(2)
    _, optimizer, losses = train_plain(accumulate=accumulate)
    assert run.optimizer.param_groups[0]["sam_step"] == 12 // accumulate
    assert run.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    means = [
        sum(run.losses[i : i + accumulate]) / accumulate
        for i in range(0, len(run.losses), accumulate)
    ]
    assert means == pytest.approx(losses)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_works_sharpness_readout(accumulate: int) -> None:
    found = Run(accumulate=accumulate).epochs(2).passes.optimizer.sharpness
    wanted = train_plain(accumulate=accumulate)[1].sharpness
    assert float(found) == pytest.approx(float(wanted), rel=1e-4)


def test_works_same_dropout_masks() -> None:
    run, dropout = Run(accumulate=2), nn.Dropout()
    masks: dict[bool, list[Tensor]] = {False: [], True: []}

    def loss(x: Tensor, y: Tensor) -> Tensor:
        masks[run.passes.in_second_pass].append(dropout(torch.ones(64)))
        return cross_entropy(run.model(x), y)

    run.loss = loss  # type: ignore[method-assign]
    run.epochs()
    assert len(masks[False]) == 6
    assert all(torch.equal(u, v) for u, v in zip(masks[False], masks[True], strict=True))
    assert not any(torch.equal(masks[False][0], mask) for mask in masks[False][1:])


def test_works_interval() -> None:
    make = lambda params: wsam_over_sgd(params, when=Every(3))  # noqa: E731
    run = Run(make).epochs(2)
    assert run.calls == 12 + 4
    assert difference(run.body, train_plain(make)[0]) == 0


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.samples = net(), torchmetrics.SumMetric()

    def forward(self, x: Tensor) -> Tensor:
        self.samples.update(len(x))
        return self.body(x)


def test_works_metrics() -> None:
    """Metrics of torchmetrics inside the model count each sample once."""
    run = Run(model=Counting(), accumulate=2).epochs()
    assert run.calls == 12
    assert run.model.samples.compute() == 24


def test_works_error_in_second_pass() -> None:
    run = Run()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        if run.passes.in_second_pass:
            raise KeyError("second pass")
        return cross_entropy(run.model(x), y)

    good, run.loss = run.loss, loss  # type: ignore[method-assign]
    with pytest.raises(KeyError, match="second pass"):
        run.epochs()
    assert difference(run.body, net()) == 0
    run.loss = good  # type: ignore[method-assign]
    run.accelerator.gradient_state._set_sync_gradients(True)
    run.epochs(2)
    assert difference(run.body, train_plain()[0]) == 0


def test_works_closure_without_accumulation() -> None:
    """Without accumulation, `step(closure)` of the prepared optimizer is enough."""
    run = Run()
    for x, y in [batch for _ in range(2) for batch in run.loader]:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            loss = cross_entropy(run.model(x), y)
            run.accelerator.backward(loss)
            return loss

        run.optimizer.step(closure)
        run.scheduler.step()
    assert difference(run.body, train_plain()[0]) == 0


def test_works_ddp_with_accumulation_and_clipping(tmp_path: Path) -> None:
    """Two processes with half of each batch equal one process, up to rounding."""
    run_script("ddp_accelerate.py", str(tmp_path))
    make = lambda params: wsam_over_sgd(params, max_norm=0.3)  # noqa: E731
    model = net(torch.float64)
    optimizer = make(model.parameters())
    plain_loop(model, optimizer, split_into_steps(samples(dtype=torch.float64), 4, 2), accumulate=2)
    weights = torch.load(tmp_path / "two.pt")
    assert gap(weights, model) < 1e-13


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two processes with FSDP2 found; see fsdp2_accelerate.py."""
    folder = tmp_path_factory.mktemp("fsdp2")
    run_script("fsdp2_accelerate.py", str(folder))
    return torch.load(folder / "two.pt")


def trained_by_one_process(make: Any) -> nn.Module:
    model = net(torch.float64)
    steps = split_into_steps(samples(dtype=torch.float64), 4, 2)
    plain_loop(model, make(model.parameters()), steps, accumulate=2)
    return model


def test_works_fsdp2_with_accumulation_and_clipping(sharded: Any) -> None:
    """Two processes with half of each batch and of the model equal one process, up to rounding."""
    make = functools.partial(wsam_over_sgd, max_norm=0.3)
    assert gap(sharded["sgd"], trained_by_one_process(make)) < 1e-13


def test_works_fsdp2_over_adamw(sharded: Any) -> None:
    assert gap(sharded["adamw"], trained_by_one_process(wsam_over_adamw)) < 1e-13


def test_works_fsdp2_scaler(sharded: Any) -> None:
    assert gap(sharded["scaler"], trained_by_one_process(wsam_over_sgd)) < 1e-13


def test_works_fsdp2_parallelism_config(sharded: Any) -> None:
    """`ParallelismConfig(dp_shard_size=2)`."""
    assert gap(sharded["dp_shard_size"], trained_by_one_process(wsam_over_sgd)) < 1e-13


def test_works_fsdp2_resume(sharded: Any) -> None:
    assert sharded["resumed"]


# Refused settings -------------------------------------------------------------------------------


def test_refuses_step_without_second_pass() -> None:
    run = Run()
    x, y = next(iter(run.loader))
    run.accelerator.backward(run.loss(x, y))
    with pytest.raises(RuntimeError, match=r"accelerate\.TwoPasses"):
        run.optimizer.step()
    assert difference(run.body, net()) == 0


def test_refuses_clipping_after_the_passes() -> None:
    """`accelerator.clip_grad_norm_` clips the base's gradient but not the decoupled term."""
    run = Run()
    run.passes.backward(run.loss, *next(iter(run.loader)))
    run.accelerator.clip_grad_norm_(run.model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match="max_norm"):
        run.optimizer.step()
    assert difference(run.body, net()) == 0


def test_refuses_fsdp2_clipping_after_the_passes(sharded: Any) -> None:
    """The version counters of DTensors do not show it."""
    assert "clip with max_norm" in sharded["clipping_error"]


def test_refuses_batch_read_from_the_loop() -> None:
    """A function that reads `x` from the loop would use the last batch in every second pass."""
    for accumulate, context in (
        (1, contextlib.nullcontext()),  # the last batch is the only one
        (2, pytest.raises(TypeError, match="batch as an argument")),
    ):
        reset_accelerate()
        run = Run(accumulate=accumulate)
        x, y = next(iter(run.loader))
        with context:
            run.passes.backward(lambda run=run, x=x, y=y: run.loss(x, y))


def test_refuses_plain_optimizer() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(net(), torch.optim.SGD(net().parameters(), lr=0.1))
    with pytest.raises(TypeError, match="sharpness-aware"):
        TwoPasses(accelerator, model, optimizer)


def error_with(kind: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the error that a distributed type raises."""
    run = Run()
    monkeypatch.setattr(type(run.accelerator), "distributed_type", kind)
    with pytest.raises(ValueError, match="is not supported") as raised:
        TwoPasses(run.accelerator, run.model, run.optimizer)
    return str(raised.value)


@pytest.mark.parametrize("kind", ["MEGATRON_LM", "XLA"])
def test_refuses_sharding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind in error_with(kind, monkeypatch)


def test_refuses_fsdp1(monkeypatch: pytest.MonkeyPatch) -> None:
    message = error_with(DistributedType.FSDP, monkeypatch)
    assert "flat shards" in message
    assert "fsdp_version=2" in message


def test_refuses_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    message = error_with(DistributedType.DEEPSPEED, monkeypatch)
    assert "its engine calls the optimizer itself" in message
    assert "fsdp_version=2" in message


@pytest.mark.parametrize("kind", ["MULTI_GPU", "FSDP"])
def test_refuses_parallelism_config(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    monkeypatch.setattr(type(run.accelerator), "distributed_type", kind)
    monkeypatch.setattr(type(run.accelerator), "is_fsdp2", kind == "FSDP")
    parallelism = ParallelismConfig(tp_size=2) if kind == "FSDP" else ParallelismConfig()
    monkeypatch.setattr(type(run.accelerator), "parallelism_config", parallelism)
    with pytest.raises(ValueError, match="parallelism_config"):
        TwoPasses(run.accelerator, run.model, run.optimizer)


def test_refuses_local_perturbation() -> None:
    model = pretend_ddp(net())
    make = lambda params: wsam_over_sgd(params, local=True, model=model)  # noqa: E731
    with pytest.raises(ValueError, match="local=True"):
        Run(make, model=model)


def test_refuses_fp16_on_a_cpu() -> None:
    """Accelerate would train in float32 without a warning."""
    with pytest.raises(ValueError, match="fp16"):
        Run(mixed_precision="fp16")
