"""Sample selection: the second pass uses the samples whose loss increased most."""

from typing import Any

import pytest
import torch
from helpers import METHODS, STYLES, make_method, make_step
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import wsam


class Slopes:
    """Sample i has the loss c_i * w_i: the nonzero gradients show which samples were used."""

    def __init__(self, slopes: list[float]) -> None:
        self.slopes = torch.tensor(slopes, dtype=torch.float64)
        self.w = nn.Parameter(torch.zeros(len(slopes), dtype=torch.float64))

    def losses(self) -> Tensor:
        return self.slopes * self.w


def kept(problem: Slopes, opt: wsam.SharpnessAware, style: str = "closure") -> list[int]:
    """Return the samples of which the base received a gradient in a step."""
    seen: list[Tensor] = []
    opt.base.register_step_pre_hook(lambda *args: seen.append(problem.w.grad.clone()))
    make_step(opt, lambda: opt.select(problem.losses()), style)
    return seen[-1].nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("share", "samples", "count"),
    [(0.29, 100, 29), (0.57, 100, 57), (0.07, 100, 7), (0.6, 10, 6), (0.01, 10, 1), (0.5, 1, 1)],
)
def test_number_of_samples(share: float, samples: int, count: int) -> None:
    """gamma * B samples, at least one; 0.29 * 100 is 28.999... in floating point."""
    problem = Slopes([1.0 + i for i in range(samples)])
    opt = wsam.ESAM(torch.optim.SGD([problem.w], lr=0.1), beta=1.0, gamma=share)
    # d is along the slopes, so the increase of sample i is proportional to slope_i squared.
    assert kept(problem, opt) == list(range(samples - count, samples))
    assert problem.w.isfinite().all()


@given(
    slopes=st.lists(st.floats(0.1, 10.0), min_size=2, max_size=12, unique=True),
    share=st.floats(0.05, 1.0),
    style=st.sampled_from(STYLES),
)
def test_samples_with_the_largest_increase(slopes: list[float], share: float, style: str) -> None:
    problem = Slopes(slopes)
    opt = wsam.ESAM(torch.optim.SGD([problem.w], lr=0.1), beta=1.0, gamma=share)
    found = kept(problem, opt, style)
    order = sorted(range(len(slopes)), key=lambda i: slopes[i], reverse=True)
    assert sorted(found) == sorted(order[: len(found)])
    assert len(found) in {max(1, int(share * len(slopes) + e)) for e in (-1e-9, 1e-9)}


@pytest.mark.parametrize("name", METHODS)
def test_select_is_the_mean_outside_a_step(name: str) -> None:
    """For losses of any shape."""
    p = nn.Parameter(torch.ones(3))
    opt = make_method(name, torch.optim.SGD([p], lr=0.1))
    losses = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(opt.select(losses), losses.mean())


@pytest.mark.parametrize("name", METHODS)
def test_select_rejects_a_mean(name: str) -> None:
    p = nn.Parameter(torch.ones(3))
    opt = make_method(name, torch.optim.SGD([p], lr=0.1))
    with pytest.raises(ValueError, match=r"sample|reduction"):
        opt.select(torch.ones(()))


def test_select_rejects_a_batch_of_another_size() -> None:
    w = nn.Parameter(torch.ones(3))
    opt = wsam.ESAM(torch.optim.SGD([w], lr=0.1), gamma=0.5)
    sizes = iter([4, 6])

    def closure() -> Tensor:
        loss = opt.select((w.sum() * torch.ones(next(sizes))) ** 2)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="size of tensor"):
        opt.step(closure)
    assert torch.equal(w, torch.ones(3))


def test_closure_without_select_warns_once_and_uses_all_samples() -> None:
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
            opt.step(closure)  # a second warning would be an error
        results.append(w.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("style", STYLES)
def test_selection_is_reset_between_steps(style: str) -> None:
    """Losses of an abandoned first pass are not compared with those of the next step."""
    slopes = [1.0, 2.0, 3.0, 4.0]
    problem = Slopes(slopes)
    opt = wsam.ESAM(torch.optim.SGD([problem.w], lr=0.0), beta=1.0, gamma=0.5)
    opt.select(torch.tensor([100.0, -100.0, 0.0, 0.0], requires_grad=True))
    if style == "closure":  # by hand begin() starts a step
        assert kept(problem, opt, style) == [2, 3]
    else:
        opt.begin()
        assert kept(problem, opt, style) == [2, 3]
    for _ in range(3):
        assert kept(problem, opt, style) == [2, 3]
    assert len(opt._selection._first) <= 1, "losses of past steps accumulate"


def test_several_selections_in_one_closure() -> None:
    """Each micro-batch inside the closure selects among its own samples."""
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
    """The closure's loss is the mean of what `select` returned; sharpness is over all samples."""
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
