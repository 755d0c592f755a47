"""Batch norms are told to keep no statistics in the second pass; in any case the numbers are right."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from squares import X
from switching import STEPS, Forward, count, normed, train, trained, watched
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from wsam import switches


def by_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "KINDS", ())


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for name, value in other.state_dict().items():
        assert torch.equal(value, one.state_dict()[name]), name


# --- where they obey -----------------------------------------------------------------------------


NORMS: dict[str, Any] = {
    "plain": nn.BatchNorm1d,
    "cumulative": lambda n: nn.BatchNorm1d(n, momentum=None),
    "not affine": lambda n: nn.BatchNorm1d(n, affine=False),
    "of images": lambda n: nn.Sequential(
        nn.Unflatten(1, (n, 1, 1)), nn.BatchNorm2d(n), nn.Flatten()
    ),
    "of films": lambda n: nn.Sequential(
        nn.Unflatten(1, (n, 1, 1, 1)), nn.BatchNorm3d(n), nn.Flatten()
    ),
}


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_the_same_numbers_as_by_copies(
    told: bool, norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = normed(norm=NORMS[norm])
    (layer,) = (part for part in model.modules() if hasattr(part, "running_mean"))
    seen = watched(layer)
    trained(model, told)
    met = [] if told else [True, True]  # in the first step, where nobody has told of the model
    assert seen == met + [True, False] * (STEPS - len(met) // 2)
    assert count(layer) == STEPS
    assert layer.track_running_stats
    by_copies(monkeypatch)
    copied = normed(norm=NORMS[norm])
    trained(copied, told)
    assert_same(model, copied)


# --- where they may not --------------------------------------------------------------------------


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
        self.norm.running_mean.data += 1.0  # uncounted, as theirs is
        return self.norm(x)


class OfOnesOwn(nn.BatchNorm1d):
    """A batch norm that looks at no switch."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        return batch_norm(x, self.running_mean, self.running_var, training=True)


class Branching(nn.BatchNorm1d):
    """A batch norm that means something else by its switch."""

    def forward(self, x: Tensor) -> Tensor:
        y = nn.BatchNorm1d.forward(self, x)
        return y if self.track_running_stats else 2.0 * y


@pytest.mark.parametrize(
    "more",
    [Around(True), Around(False), Broadcasting(), OfOnesOwn(8), Branching(8)],
    ids=["around", "around, uncounted", "broadcasting", "of one's own", "another switch"],
)
def test_statistics_that_move_by_another_way_are_put_back(
    more: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = normed(copy.deepcopy(more))
    model = copy.deepcopy(begin)
    trained(model)
    by_copies(monkeypatch)
    trained(begin)
    assert_same(model, begin)


def scripted(model: nn.Sequential) -> Forward:
    return torch.jit.script(model)


def traced(model: nn.Sequential) -> Forward:
    return torch.jit.trace(model, X, check_trace=False)


def exported(model: nn.Sequential) -> Forward:
    return torch.export.export(model, (X,)).module()


def twin(model: nn.Sequential) -> Forward:
    other = copy.deepcopy(model)
    for mine, its in zip(model.modules(), other.modules(), strict=True):
        its._parameters, its._buffers = mine._parameters, mine._buffers
    return other


def patched(model: nn.Sequential) -> Forward:
    model[1].forward = OfOnesOwn.forward.__get__(model[1])
    return model


def reclassed(model: nn.Sequential) -> Forward:
    model[1].__class__ = OfOnesOwn
    return model


def branched(model: nn.Sequential) -> Forward:
    model[1].forward = Branching.forward.__get__(model[1])
    return model


def replayed(model: nn.Sequential) -> Forward:
    """Runs as a CUDA graph does: torch does not count what that writes."""

    def forward(x: Tensor) -> Tensor:
        norm = model[1]
        norm.num_batches_tracked.data.add_(1)
        y = batch_norm(model[0](x), norm.running_mean, norm.running_var, training=True)
        return model[2:](y)

    return forward


def toggling(model: nn.Sequential) -> Forward:
    """A consistency loss whose inner pass is not to count: it turns the switch over, twice."""

    def forward(x: Tensor) -> Tensor:
        model[1].track_running_stats ^= True
        aside = model(x + 1.0)
        model[1].track_running_stats ^= True
        return model(x) + 0.1 * aside

    return forward


def setting(model: nn.Sequential) -> Forward:
    def forward(x: Tensor) -> Tensor:
        model[1].track_running_stats = False
        aside = model(x + 1.0)
        model[1].track_running_stats = True
        return model(x) + 0.1 * aside

    return forward


LATER = [
    scripted,
    traced,
    exported,
    twin,
    patched,
    reclassed,
    branched,
    replayed,
    toggling,
    setting,
]


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("change", LATER, ids=lambda change: change.__name__)
def test_what_begins_after_some_steps_is_noticed(
    change: Callable[[nn.Sequential], Forward], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They obeyed until then, and nothing says that they will go on to."""

    def run() -> nn.Sequential:
        model = normed()
        opt = trained(model)
        forward = change(model)
        train(opt, forward)
        return model

    switched = run()
    by_copies(monkeypatch)
    assert_same(switched, run())


def test_layers_that_join_later() -> None:
    model = normed()
    opt = trained(model)
    model.insert(2, nn.BatchNorm1d(8))
    train(opt, model)
    assert (count(model[1]), count(model[2])) == (2 * STEPS, STEPS)


def test_a_layer_that_takes_over_the_statistics_of_another() -> None:
    model = normed()
    opt = trained(model)
    heir = OfOnesOwn(8)
    heir._parameters, heir._buffers = model[1]._parameters, model[1]._buffers
    model[1] = heir
    train(opt, model)
    assert count(heir) == 2 * STEPS


def test_a_layer_that_is_met_in_the_second_pass() -> None:
    """Others obey, and it has to be put back all the same."""
    model, stranger = normed(), nn.BatchNorm1d(4)
    opt = trained(model, told=False)
    seen = watched(model[1])
    train(opt, lambda x: model(stranger(x)), steps=1)
    assert seen == [True, False]
    assert count(stranger) == 1


def test_statistics_that_a_closure_freezes_for_good() -> None:
    model = normed()
    opt = trained(model)

    def forward(x: Tensor) -> Tensor:
        y = model(x)
        model[1].track_running_stats = False
        return y

    train(opt, forward, steps=1)
    assert not model[1].track_running_stats
    assert count(model[1]) == STEPS + 1


def test_layers_that_compiled_code_runs_keep_their_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be compiled once more for each state of a switch."""
    model = normed()
    opt = trained(model)
    monkeypatch.setattr(switches, "compilations", lambda: 1)
    seen = watched(model[1])
    train(opt, model, steps=1)
    assert seen == [True, True]


def test_statistics_that_somebody_has_frozen_stay_frozen() -> None:
    model = normed()
    model[1].track_running_stats = False
    trained(model)
    assert not model[1].track_running_stats
    assert count(model[1]) == 0
