"""The bounds on runs of the optimizers: counter-examples and random problems."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR

from wsam import SAM, WSAM, CoupledWSAM
from wsam.schedule import InverseSqrt
from wsam.theory import Convex, NonConvex

SLACK = 1 + 1e-9  # for rounding
seeds = st.integers(0, 2**32 - 1)
gammas = st.floats(0, 0.95)


class Run:
    """Points w_1..w_T and the largest gradient entry of a run of a public optimizer."""

    def __init__(self, losses, start, *, gamma, lr, rho, rule=WSAM):
        weights = torch.tensor(start, dtype=torch.float64, requires_grad=True)
        optimizer = rule(torch.optim.SGD([weights], lr=lr), rho=rho, **gamma)
        scheduler = LambdaLR(optimizer, lambda step: 1 / math.sqrt(step + 1))
        self.points, self.gradient = [], 0.0
        for loss in losses:
            self.points.append(weights.detach().clone())

            def closure(loss=loss):
                optimizer.zero_grad()
                value = loss(weights)
                value.backward()
                self.gradient = max(self.gradient, weights.grad.abs().max().item())
                return value

            optimizer.step(closure)
            scheduler.step()

    def regret(self, losses, best):
        pairs = zip(losses, self.points, strict=True)
        return sum((loss(w) - loss(best)).item() for loss, w in pairs)

    def distance(self, best):
        return max((w - best).abs().max().item() for w in self.points)


def test_linear_losses_violate_the_printed_regret_bound():
    losses = [lambda w: w.sum(), lambda w: -w.sum()]
    run = Run(losses, [0.0], gamma={"gamma": 0.0}, lr=5.0, rho=InverseSqrt(0.1))
    best = torch.tensor([-2.5], dtype=torch.float64)  # the sum is constant: every point is optimal
    bound = Convex(
        gamma=0.0,
        lr=5.0,
        rho=0.1,
        smoothness=0.0,
        parameters=1,
        gradient=run.gradient,
        distance=run.distance(best),
    )
    assert run.regret(losses, best) == pytest.approx(5.0)
    assert bound.corollary(2, "printed") == pytest.approx(3.712, abs=1e-3)
    assert bound.corollary(2, "corrected") == pytest.approx(15.026, abs=1e-3)
    assert bound.corollary(2, "tight") >= 5.0


@settings(max_examples=15)
@given(lr=st.floats(3.5, 1e4), slope=st.floats(0.1, 10))
def test_large_steps_violate_the_printed_bound_and_nearly_reach_the_tight_one(lr, slope):
    losses = [lambda w: slope * w.sum(), lambda w: -slope * w.sum()]
    run = Run(losses, [0.0], gamma={"gamma": 0.0}, lr=lr, rho=InverseSqrt(0.1))
    best = run.points[1] / 2
    bound = Convex(
        gamma=0.0,
        lr=lr,
        rho=0.1,
        smoothness=0.0,
        parameters=1,
        gradient=slope,
        distance=run.distance(best),
    )
    regret = run.regret(losses, best)
    assert bound.corollary(2, "printed") < regret <= bound.corollary(2, "tight")
    assert regret > 0.9 * bound.corollary(2, "tight")


@settings(max_examples=40)
@given(
    seed=seeds,
    gamma=gammas,
    lr=st.floats(0.01, 5),
    rho=st.floats(0.01, 2),
    steps=st.integers(2, 25),
    size=st.integers(1, 4),
    kind=st.sampled_from(["square", "logistic", "linear"]),
    rule=st.sampled_from([WSAM, CoupledWSAM]),
)
def test_regret_is_below_the_corrected_bound(seed, gamma, lr, rho, steps, size, kind, rule):
    draw = np.random.default_rng(seed)
    inputs = torch.from_numpy(draw.normal(size=(steps, size)) / math.sqrt(size))
    labels = torch.from_numpy(draw.choice([-1.0, 1.0], size=steps))
    make = {
        "square": lambda x, y: lambda w: 0.5 * (x @ w - y) ** 2,
        "logistic": lambda x, y: lambda w: torch.nn.functional.softplus(-y * (x @ w)),
        "linear": lambda x, y: lambda w: y * (x @ w),
    }[kind]
    curvature = {"square": 1.0, "logistic": 0.25, "linear": 0.0}[kind]
    losses = [make(x, y) for x, y in zip(inputs, labels, strict=True)]
    if kind == "square":
        best = torch.linalg.lstsq(inputs, labels, driver="gelsd").solution  # the exact minimizer
    else:  # the bound holds for every point
        best = torch.from_numpy(draw.normal(size=size))
    start = draw.normal(size=size).tolist()
    run = Run(losses, start, gamma={"gamma": gamma}, lr=lr, rho=InverseSqrt(rho), rule=rule)
    bound = Convex(
        gamma=gamma,
        lr=lr,
        rho=rho,
        smoothness=curvature * inputs.square().sum(1).max().item(),
        parameters=size,
        gradient=run.gradient,
        distance=run.distance(best),
    )
    regret = run.regret(losses, best)
    assert regret <= bound.corollary(steps) * SLACK
    assert regret <= bound.corollary(steps, "tight") * SLACK


def waves(draw, size, offset):
    """Return a smooth non-convex loss, its smoothness and a lower bound."""
    heights = torch.from_numpy(draw.uniform(0.1, 1, size=3))
    wave = torch.from_numpy(draw.normal(size=(3, size)))
    phase = torch.from_numpy(draw.uniform(0, 2 * math.pi, size=3))

    def loss(w):
        return (heights * (1 - torch.cos(wave @ w + phase))).sum() + offset

    return loss, (heights * wave.square().sum(1)).sum().item(), offset


def squared_gradient(loss, w):
    gradient = torch.func.grad(loss)(w)
    return gradient.square().sum().item(), gradient.abs().max().item()


@settings(max_examples=15)
@given(
    seed=seeds,
    gamma=gammas,
    lr=st.floats(0.01, 5),
    rho=st.floats(0.01, 2),
    steps=st.integers(2, 40),
    size=st.integers(1, 3),
    offset=st.floats(-3, 3),
)
def test_full_batch_gradient_is_below_the_corrected_bound(
    seed, gamma, lr, rho, steps, size, offset
):
    draw = np.random.default_rng(seed)
    loss, smoothness, lowest = waves(draw, size, offset)
    start = draw.normal(size=size).tolist()
    run = Run([loss] * steps, start, gamma={"gamma": gamma}, lr=lr, rho=InverseSqrt(rho))
    bound = NonConvex(
        gamma=gamma,
        lr=lr,
        rho=rho,
        smoothness=smoothness,
        parameters=size,
        gradient=run.gradient,
        start_loss=loss(run.points[0]).item(),
        lowest_loss=lowest,
    )
    measured = min(squared_gradient(loss, w)[0] for w in run.points)
    assert measured <= bound.corollary(steps) * SLACK
    assert measured <= bound.corollary(steps, "tight") * SLACK


@settings(max_examples=10)
@given(
    seed=seeds, gamma=gammas, lr=st.floats(0.05, 5), rho=st.floats(0.05, 2), steps=st.integers(2, 4)
)
def test_stochastic_gradient_is_below_the_corrected_bound(seed, gamma, lr, rho, steps):
    """The expectation is exact: every sequence of the two batches is run."""
    draw = np.random.default_rng(seed)
    batches = [waves(draw, 2, 0.0) for _ in range(2)]
    start = draw.normal(size=2).tolist()

    def mean(w):
        return (batches[0][0](w) + batches[1][0](w)) / 2

    sequences = list(itertools.product([b[0] for b in batches], repeat=steps))
    runs = [Run(s, start, gamma={"gamma": gamma}, lr=lr, rho=InverseSqrt(rho)) for s in sequences]
    pairs = [[squared_gradient(mean, w) for w in run.points] for run in runs]
    expected = np.mean([[square for square, _ in pair] for pair in pairs], axis=0)
    largest = max([run.gradient for run in runs] + [entry for pair in pairs for _, entry in pair])
    bound = NonConvex(
        gamma=gamma,
        lr=lr,
        rho=rho,
        smoothness=max(b[1] for b in batches),
        parameters=2,
        gradient=largest,
        start_loss=mean(runs[0].points[0]).item(),
    )
    assert expected.min() <= bound.corollary(steps) * SLACK
    assert expected.min() <= bound.corollary(steps, "tight") * SLACK


def plateau(v, radius):
    """Return an odd step from -1 to 1 with a continuous slope, constant outside half the radius."""
    u = (2 * v / radius).clamp(-1, 1)
    return 1.5 * u - 0.5 * u**3


def test_smoothness_of_the_mean_loss_violates_the_printed_bound():
    """L = w^2/2 is 1-smooth; each batch adds +-(w + c) q(v), whose mean is zero.

    The sign of the batch is the sign of the perturbation in v. At the perturbed point the gradient
    in w is therefore the same for both signs: 1 more than that of L. The run stays at L' = -1 for
    every sequence of signs, so its expectation is the run itself.
    """
    rho, lr, steps = 0.01, 0.2, 400
    start = -1 + rho / math.sqrt(2)
    shift = -start * (1 + rho / 3)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=steps)
    losses = [
        lambda w, s=s: 0.5 * w[0] ** 2 + s * (w[0] + shift) * plateau(w[1], rho) for s in signs
    ]
    run = Run(losses, [start, 0.0], gamma={}, lr=lr, rho=rho, rule=SAM)
    same = Run(losses[:40], [start, 0.0], gamma={"gamma": 0.5}, lr=lr, rho=rho, rule=CoupledWSAM)
    assert all(torch.equal(a, b) for a, b in zip(run.points, same.points, strict=False))
    measured = min(w[0].item() ** 2 for w in run.points)
    assert all(w[1] == 0 for w in run.points)
    assert measured > 0.98
    common = {
        "gamma": 0.5,
        "lr": lr,
        "rho": rho,
        "parameters": 2,
        "gradient": run.gradient,
        "start_loss": start**2 / 2,
    }
    smooth_mean = NonConvex(smoothness=1.0, **common)
    assert smooth_mean.constant_radius(steps, "printed") < 0.2
    # On the run |w + c| < rho, so a batch's Hessian is at most 1 + 3/rho + 12/rho^2 rho.
    smooth_batches = NonConvex(smoothness=1 + 3 / rho + 12 / rho**2 * rho, **common)
    assert measured <= smooth_batches.constant_radius(steps)


def test_negative_loss_violates_the_printed_bound():
    def loss(w):
        return 0.5 * w.square().sum() - 100.0

    run = Run([loss] * 50, [1.0], gamma={"gamma": 0.6}, lr=0.1, rho=InverseSqrt(0.05))
    bound = NonConvex(
        gamma=0.6,
        lr=0.1,
        rho=0.05,
        smoothness=1.0,
        parameters=1,
        gradient=run.gradient,
        start_loss=-99.5,
        lowest_loss=-100.0,
    )
    measured = min(w.item() ** 2 for w in run.points)
    assert bound.corollary(50, "printed") < 0 <= measured <= bound.corollary(50)
