"""Data selection: the second pass learns from the samples whose loss grew most."""

from typing import Any

import pytest
import torch
from helpers import MEMBERS, STYLES, make_step, member
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import wsam


class Slopes:
    """Sample i has the loss c_i * w_i: each has a weight of its own, so its gradient tells of it."""

    def __init__(self, slopes: list[float]) -> None:
        self.slopes = torch.tensor(slopes, dtype=torch.float64)
        self.w = nn.Parameter(torch.zeros(len(slopes), dtype=torch.float64))

    def losses(self) -> Tensor:
        return self.slopes * self.w


def kept(problem: Slopes, opt: wsam.SharpnessAware, style: str = "closure") -> list[int]:
    """The samples that the base's gradient holds after a step of the SAM rule."""
    seen: list[Tensor] = []
    opt.base.register_step_pre_hook(lambda *args: seen.append(problem.w.grad.clone()))
    make_step(opt, lambda: opt.select(problem.losses()), style)
    return seen[-1].nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("share", "samples", "count"),
    [(0.29, 100, 29), (0.57, 100, 57), (0.07, 100, 7), (0.6, 10, 6), (0.01, 10, 1), (0.5, 1, 1)],
)
def test_exactly_that_many(share: float, samples: int, count: int) -> None:
    """gamma * B samples, neither one fewer nor none; 0.29 * 100 is 28.999... in floating point."""
    problem = Slopes([1.0 + i for i in range(samples)])
    opt = wsam.ESAM(torch.optim.SGD([problem.w], lr=0.1), beta=1.0, gamma=share)
    # d is along the slopes, so the growth of sample i is proportional to slope_i squared.
    assert kept(problem, opt) == list(range(samples - count, samples))
    assert problem.w.isfinite().all()


@given(
    slopes=st.lists(st.floats(0.1, 10.0), min_size=2, max_size=12, unique=True),
    share=st.floats(0.05, 1.0),
    style=st.sampled_from(STYLES),
)
def test_the_largest_growth_is_kept(slopes: list[float], share: float, style: str) -> None:
    problem = Slopes(slopes)
    opt = wsam.ESAM(torch.optim.SGD([problem.w], lr=0.1), beta=1.0, gamma=share)
    found = kept(problem, opt, style)
    order = sorted(range(len(slopes)), key=lambda i: slopes[i], reverse=True)
    assert sorted(found) == sorted(order[: len(found)])
    assert len(found) in {max(1, int(share * len(slopes) + e)) for e in (-1e-9, 1e-9)}


@pytest.mark.parametrize("name", MEMBERS)
def test_select_is_the_mean_elsewhere(name: str) -> None:
    """Outside a step, and in a first pass, all samples count; any shape of losses will do."""
    p = nn.Parameter(torch.ones(3))
    opt = member(name, torch.optim.SGD([p], lr=0.1))
    losses = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(opt.select(losses), losses.mean())


@pytest.mark.parametrize("name", MEMBERS)
def test_select_refuses_a_mean(name: str) -> None:
    p = nn.Parameter(torch.ones(3))
    opt = member(name, torch.optim.SGD([p], lr=0.1))
    with pytest.raises(ValueError, match=r"sample|reduction"):
        opt.select(torch.ones(()))


def test_select_refuses_another_batch() -> None:
    w = nn.Parameter(torch.ones(3))
    opt = wsam.ESAM(torch.optim.SGD([w], lr=0.1), gamma=0.5)
    sizes = iter([4, 6])

    def closure() -> Tensor:
        loss = opt.select((w.sum() * torch.ones(next(sizes))) ** 2)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="batch"):
        opt.step(closure)
    assert torch.equal(w, torch.ones(3))


def test_without_select_all_are_kept_and_it_is_said_once() -> None:
    results: list[Any] = []
    for gamma in (0.5, 1.0):
        w = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        opt = wsam.ESAM(torch.optim.SGD([w], lr=0.1), gamma=gamma)

        def closure(w: Tensor = w, opt: Any = opt) -> Tensor:
            opt.zero_grad()
            loss = (w**4).mean()
            loss.backward()
            return loss

        if gamma < 1:
            with pytest.warns(wsam.WsamWarning, match="select"):
                opt.step(closure)
        else:
            opt.step(closure)
        for _ in range(2):
            opt.step(closure)  # a second warning would be an error here
        results.append(w.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("style", STYLES)
def test_selection_keeps_nothing_between_steps(style: str) -> None:
    """A first pass that came to nothing does not shift the next step's comparison."""
    slopes = [1.0, 2.0, 3.0, 4.0]
    problem = Slopes(slopes)
    opt = wsam.ESAM(torch.optim.SGD([problem.w], lr=0.0), beta=1.0, gamma=0.5)
    opt.select(torch.tensor([100.0, -100.0, 0.0, 0.0], requires_grad=True))  # and then an error
    if style == "closure":  # by hand it is begin() that says where a step starts
        assert kept(problem, opt, style) == [2, 3]
    else:
        opt.begin()
        assert kept(problem, opt, style) == [2, 3]
    for _ in range(3):
        assert kept(problem, opt, style) == [2, 3]
    assert len(opt._selection._first) <= 1, "losses of past steps pile up"


def test_several_selections_in_one_closure() -> None:
    """Micro-batches inside the closure: each selects among its own samples."""
    halves = Slopes([1.0, 5.0]), Slopes([2.0, 8.0])
    params = [half.w for half in halves]
    opt = wsam.ESAM(torch.optim.SGD(params, lr=0.1), beta=1.0, gamma=0.5)
    seen: list[list[Tensor]] = []
    opt.base.register_step_pre_hook(lambda *args: seen.append([p.grad.clone() for p in params]))

    def closure() -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for half in halves:
            loss = opt.select(half.losses())
            loss.backward()
            total += loss.detach()
        return total

    opt.step(closure)
    assert [g.nonzero().flatten().tolist() for g in seen[0]] == [[1], [1]]


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_sharpness_of_several_selections_in_one_closure(parts: int) -> None:
    """The closure's loss is the mean of what `select` returned: so is what the selection hides."""
    problems = [Slopes([1.0 + i, 5.0 - i, 2.0]) for i in range(parts)]
    base = torch.optim.SGD([problem.w for problem in problems], lr=0.1)
    opt = wsam.ESAM(base, beta=1.0, gamma=0.4, rho=0.5)
    means: list[Tensor] = []

    def closure() -> Tensor:
        each = [problem.losses() for problem in problems]
        means.append(torch.stack([losses.mean() for losses in each]).mean().detach())
        loss = torch.stack([opt.select(losses) for losses in each]).mean()
        loss.backward()
        return loss

    opt.step(closure)
    assert opt.sharpness is not None
    assert float(opt.sharpness) == pytest.approx(float(means[1] - means[0]), rel=1e-12)
