"""Batch norms are told to keep no statistics in the second pass, where that is seen to serve."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from squares import X
from torch import Tensor, nn
from torch.nn.functional import batch_norm

import wsam
from wsam import switches

STEPS = 6


def normed(*more: nn.Module, norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), norm(8), nn.ReLU(), *more, nn.Linear(8, 2))


def optimizer(model: nn.Module, told: nn.Module | None = None) -> wsam.WSAM:
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return wsam.WSAM(base, rho=0.5, gamma=0.8, model=told)


def step(opt: wsam.WSAM, model: Callable[[Tensor], Tensor], number: int = 0) -> None:
    def closure() -> Tensor:
        loss = (model(X + 0.1 * number) ** 2).mean()
        loss.backward()
        return loss

    opt.step(closure)


def serve(opt: wsam.WSAM) -> bool:
    return opt._statistics._switches.serve


def trained(model: nn.Module, told: bool = True, steps: int = STEPS) -> tuple[wsam.WSAM, nn.Module]:
    opt = optimizer(model, model if told else None)
    for number in range(steps):
        step(opt, model, number)
    return opt, model


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "KINDS", ())


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d,
        lambda n: nn.BatchNorm1d(n, momentum=None),
        lambda n: nn.BatchNorm1d(n, affine=False),
    ],
    ids=["plain", "cumulative", "not affine"],
)
def test_the_same_numbers_as_by_copies(
    told: bool, norm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opt, switched = trained(normed(norm=norm), told)
    assert serve(opt)
    forbid(monkeypatch)
    other, copied = trained(normed(norm=norm), told)
    assert not serve(other)
    for name, value in copied.state_dict().items():
        assert torch.equal(value, switched.state_dict()[name]), name
    assert int(switched[1].num_batches_tracked) == STEPS
    assert all(m.track_running_stats for m in switched.modules() if isinstance(m, nn.BatchNorm1d))


def test_nothing_is_copied_once_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    opt, model = trained(normed())

    def refuse() -> None:
        raise AssertionError("statistics were copied")

    monkeypatch.setattr(opt._statistics.spare, "take", refuse)
    step(opt, model)


class Direct(nn.BatchNorm1d):
    """A batch norm of one's own, which may do anything."""


class Around(nn.Module):
    """Uses a batch norm's statistics without asking it."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.norm, self.counts = nn.BatchNorm1d(8), counts

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        if self.counts:
            norm.num_batches_tracked.add_(1)
        return batch_norm(x, norm.running_mean, norm.running_var, training=True)


class Broadcasting(nn.Module):
    """Writes into buffers before each pass, as DistributedDataParallel does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        self.norm.running_mean += 1.0
        return self.norm(x)


@pytest.mark.parametrize(
    "more",
    [Around(counts=True), Around(counts=False), Broadcasting(), Direct(8), nn.BatchNorm1d(8)],
    ids=[
        "around",
        "around, uncounted",
        "broadcasting",
        "a class of one's own",
        "a method of its own",
    ],
)
def test_statistics_that_move_by_another_way_are_put_back(
    more: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = copy.deepcopy(more)
    if type(more) is nn.BatchNorm1d:
        more.forward = Around.forward.__get__(Around(counts=True))  # type: ignore[method-assign]
    begin = normed(more)
    opt, model = trained(copy.deepcopy(begin))
    assert not serve(opt)
    forbid(monkeypatch)
    _, copied = trained(begin)
    for name, value in copied.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_layers_that_compiled_code_runs_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be compiled once more for each state of a switch."""
    opt, model = trained(normed())
    monkeypatch.setattr(switches, "compilations", lambda: 1)
    seen = []
    model[1].register_forward_pre_hook(lambda m, args: seen.append(m.track_running_stats))
    step(opt, model)
    assert seen == [True, True]
    assert int(model[1].num_batches_tracked) == STEPS + 1


def test_a_layer_that_has_not_counted_the_first_pass_is_copied() -> None:
    """A CUDA graph runs it without asking, and counts where nobody sees it."""
    opt, model = trained(normed())

    def replayed(x: Tensor) -> Tensor:
        norm = model[1]
        norm.num_batches_tracked.data.add_(1)  # unseen
        hidden = batch_norm(model[0](x), norm.running_mean, norm.running_var, training=True)
        return model[2:](hidden)

    before = int(model[1].num_batches_tracked)
    step(opt, replayed)
    assert int(model[1].num_batches_tracked) == before + 1


def test_a_pass_that_fails_leaves_no_switch_off() -> None:
    opt, model = trained(normed())
    calls = []

    def closure() -> Tensor:
        loss = (model(X) ** 2).mean()
        loss.backward()
        calls.append(model[1].track_running_stats)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        opt.step(closure)
    assert calls == [True, False]
    assert model[1].track_running_stats


@pytest.mark.parametrize("steps", [1, STEPS], ids=["while it is tried", "when it serves"])
def test_an_optimizer_given_up_in_the_middle_leaves_no_switch_off(steps: int) -> None:
    opt, model = trained(normed(), steps=steps)
    opt.begin()
    (model(X) ** 2).mean().backward()
    opt.ascend()
    assert not model[1].track_running_stats
    del opt
    gc.collect()
    assert model[1].track_running_stats
    assert not model[1]._forward_hooks


def test_a_step_that_is_given_up_proves_nothing() -> None:
    """Statistics are unchanged where the second pass did not run."""
    opt, model = trained(normed(), steps=1)
    opt.begin()
    (model(X) ** 2).mean().backward()
    opt.ascend()
    opt.abandon()
    assert not serve(opt)


def test_two_optimizers_whose_steps_cross() -> None:
    """The first throws its switches back while the second's pass is still to come."""
    model = normed()
    one, two = optimizer(model[0], model), optimizer(model[3], model)
    for number in range(STEPS):
        for opt in (one, two):
            step(opt, model, number)
    before = int(model[1].num_batches_tracked)
    (model(X) ** 2).mean().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    one.ascend()
    two.ascend()
    for opt in (one, two):
        for p, g in zip(model.parameters(), gradients, strict=True):
            p.grad = g.clone()
        model(X)
        opt.descend()
        opt.step()
    assert int(model[1].num_batches_tracked) == before + 1


def test_layers_may_go_that_nobody_else_holds() -> None:
    """Without a model they are remembered weakly, switched or not."""
    model = nn.Linear(4, 2)
    opt = optimizer(model)
    norms = [nn.BatchNorm1d(4)]
    for number in range(STEPS):
        step(opt, lambda x: model(norms[0](x)), number)
    assert serve(opt)
    norms.clear()
    gc.collect()
    assert not opt._statistics._modules
    step(opt, model)


def test_statistics_that_somebody_has_frozen_stay_frozen() -> None:
    model = normed()
    model[1].track_running_stats = False
    trained(model)
    assert not model[1].track_running_stats
    assert int(model[1].num_batches_tracked) == 0


def test_all_layers_have_to_run() -> None:
    """One that rests in this step keeps the others from being switched: nothing is proved of it."""
    model = normed(nn.BatchNorm1d(8))
    opt = optimizer(model, model)
    short = nn.Sequential(*[part for i, part in enumerate(model) if i != 3])
    for number in range(STEPS):
        step(opt, short, number)
    assert not serve(opt)
    assert int(model[1].num_batches_tracked) == STEPS
