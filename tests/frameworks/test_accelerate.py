"""Accelerate's loop with `TwoPasses` equals the plain loop; what it cannot do is refused."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from framework_helpers import (
    by_hand,
    difference,
    forget_accelerators,
    net,
    new_scaler,
    plain_loop,
    pretend_ddp,
    run_script,
    samples,
    scaled_loop,
    windows,
    wsam_over_sgd,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import wsam
from wsam.integrations.accelerate import TwoPasses
from wsam.schedule import Every

Make = Callable[..., wsam.SharpnessAware]


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    forget_accelerators()
    yield
    forget_accelerators()


class Run:
    """A user's program: everything prepared, then epochs of the loop the documents show."""

    def __init__(
        self,
        make: Make = wsam_over_sgd,
        *,
        every: int = 1,
        scaler: Any = None,
        count: int = 24,
        model: nn.Module | None = None,
        size: int = 4,
        **options: Any,
    ) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=every, **options)
        if scaler is not None:  # float16 needs a CUDA device in Accelerate; its scaler does not
            self.accelerator.scaler = scaler
        self.body = net() if model is None else model
        optimizer = make(self.body.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        data = samples(count, next(self.body.parameters()).dtype)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            self.body, optimizer, DataLoader(data, size), scheduler
        )
        self.passes = TwoPasses(self.accelerator, self.model, self.optimizer)
        self.losses: list[float] = []
        self.calls = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        losses = cross_entropy(self.model(x), y, reduction="none")
        return self.passes.optimizer.select(losses)

    def epochs(self, count: int = 1) -> "Run":
        for _ in range(count):
            for x, y in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.losses.append(float(self.passes.backward(self.loss, x, y)))
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
        return self


@pytest.mark.parametrize("name", sorted(wsam.METHODS))
def test_works_training(name: str) -> None:
    def make(params: Any) -> wsam.SharpnessAware:
        return wsam.create(name, torch.optim.AdamW(params, lr=0.02))

    assert difference(Run(make).epochs(2).body, by_hand(make)[0]) == 0


def test_works_accumulation() -> None:
    """Three micro-batches a step, and two in the last one of an epoch."""
    run = Run(every=3, count=32).epochs(2)
    model, optimizer, _ = by_hand(every=3, count=32)
    assert difference(run.body, model) == 0
    assert run.optimizer.param_groups[0]["sam_step"] == optimizer.param_groups[0]["sam_step"] == 6
    assert run.calls == 2 * 2 * 8


@pytest.mark.parametrize("every", [1, 2])
def test_works_clipping_by_norm(every: int) -> None:
    make = lambda params: wsam_over_sgd(params, max_norm=0.3)  # noqa: E731
    assert difference(Run(make, every=every).epochs(2).body, by_hand(make, every=every)[0]) == 0
    assert difference(by_hand(make, every=every)[0], by_hand(every=every)[0]) > 1e-3


def test_works_bf16() -> None:
    run = Run(every=2, mixed_precision="bf16").epochs(2)
    assert difference(run.body, by_hand(every=2, autocast=torch.bfloat16)[0]) < 1e-6
    assert difference(run.body, by_hand(every=2)[0]) > 1e-5


def test_works_fp16_scaler() -> None:
    run = Run(every=2, scaler=new_scaler()).epochs(2)
    model = net()
    optimizer = wsam_over_sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    steps = windows(samples(), 4, 2, epochs=2)
    after = scheduler.step
    scaled_loop(model, optimizer, steps, new_scaler(), every=2, after=after, autocast=None)
    assert difference(run.body, model) == 0


def test_works_fp16_overflow() -> None:
    """An infinite loss changes nothing, and the scale is halved once a step."""
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
    """Saved after an epoch with `save_state`, loaded by a fresh program: the same bits."""
    whole = Run(every=2).epochs()
    whole.accelerator.save_state(str(tmp_path))
    whole.epochs()
    rate = whole.optimizer.param_groups[0]["lr"]
    resumed = Run(every=2)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.epochs()
    assert difference(resumed.body, whole.body) == 0
    assert difference(resumed.body, by_hand(every=2)[0]) == 0
    assert resumed.optimizer.param_groups[0]["lr"] == rate
    assert resumed.optimizer.param_groups[0]["sam_step"] == 6


@pytest.mark.parametrize("every", [1, 2])
def test_works_one_step_per_step(every: int) -> None:
    """Steps and rates are counted once a step, and the loss returned is the one at w."""
    run = Run(every=every).epochs(2)
    _, optimizer, losses = by_hand(every=every)
    assert run.optimizer.param_groups[0]["sam_step"] == 12 // every
    assert run.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    means = [sum(run.losses[i : i + every]) / every for i in range(0, len(run.losses), every)]
    assert means == pytest.approx(losses)


@pytest.mark.parametrize("every", [1, 2])
def test_works_sharpness_readout(every: int) -> None:
    found = Run(every=every).epochs(2).passes.optimizer.sharpness
    wanted = by_hand(every=every)[1].sharpness
    assert float(found) == pytest.approx(float(wanted), rel=1e-4)


def test_works_same_dropout_masks() -> None:
    run, dropout = Run(every=2), nn.Dropout()
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
    assert difference(run.body, by_hand(make)[0]) == 0


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
    assert difference(run.body, by_hand()[0]) == 0


def test_works_closure_without_accumulation() -> None:
    """`prepare` keeps `step(closure)`; without accumulation it is all one needs."""
    run = Run()
    for x, y in [batch for _ in range(2) for batch in run.loader]:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            loss = cross_entropy(run.model(x), y)
            run.accelerator.backward(loss)
            return loss

        run.optimizer.step(closure)
        run.scheduler.step()
    assert difference(run.body, by_hand()[0]) == 0


@pytest.mark.slow
def test_works_ddp_with_accumulation_and_clipping(tmp_path: Path) -> None:
    """Two processes with half of each batch equal one process, to rounding."""
    run_script("ddp_accelerate.py", str(tmp_path))
    make = lambda params: wsam_over_sgd(params, max_norm=0.3)  # noqa: E731
    model = net(torch.float64)
    optimizer = make(model.parameters())
    plain_loop(model, optimizer, windows(samples(dtype=torch.float64), 4, 2), every=2)
    weights = torch.load(tmp_path / "two.pt")
    gaps = [float((weights[k] - v).abs().max()) for k, v in model.state_dict().items()]
    assert max(gaps) < 1e-13


# --- refused -----------------------------------------------------------------------------------


def test_refuses_step_without_second_pass() -> None:
    run = Run()
    x, y = next(iter(run.loader))
    run.accelerator.backward(run.loss(x, y))
    with pytest.raises(RuntimeError, match="closure"):
        run.optimizer.step()
    assert difference(run.body, net()) == 0


def test_refuses_clipping_after_the_passes() -> None:
    """`accelerator.clip_grad_norm_` reaches what the base is fed and not the term beside it."""
    run = Run()
    run.passes.backward(run.loss, *next(iter(run.loader)))
    run.accelerator.clip_grad_norm_(run.model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match="max_norm"):
        run.optimizer.step()
    assert difference(run.body, net()) == 0


def test_refuses_batch_read_from_the_loop() -> None:
    """A function that reads `x` from the loop would see the last batch in every second pass."""
    run = Run(every=2)
    x, y = next(iter(run.loader))
    with pytest.raises(TypeError, match="batch as an argument"):
        run.passes.backward(lambda: run.loss(x, y))


def test_refuses_plain_optimizer() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(net(), torch.optim.SGD(net().parameters(), lr=0.1))
    with pytest.raises(TypeError, match="sharpness-aware"):
        TwoPasses(accelerator, model, optimizer)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_refuses_sharding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    monkeypatch.setattr(type(run.accelerator), "distributed_type", kind)
    with pytest.raises(ValueError, match=kind):
        TwoPasses(run.accelerator, run.model, run.optimizer)


def test_refuses_parallelism_config(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    monkeypatch.setattr(type(run.accelerator), "parallelism_config", object())
    with pytest.raises(ValueError, match="parallelism_config"):
        TwoPasses(run.accelerator, run.model, run.optimizer)


def test_refuses_local_perturbation() -> None:
    model = pretend_ddp(net())
    make = lambda params: wsam_over_sgd(params, local=True, model=model)  # noqa: E731
    with pytest.raises(ValueError, match="this framework does not make"):
        Run(make, model=model)


def test_refuses_fp16_on_a_cpu() -> None:
    """Accelerate would train in float32 and not say so."""
    with pytest.raises(ValueError, match="fp16"):
        Run(mixed_precision="fp16")
