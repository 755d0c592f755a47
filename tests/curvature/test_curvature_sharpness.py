"""Sharpness measures, compared with closed formulas."""

import contextlib
import copy
import json
import math
from collections.abc import Iterator

import pytest
import torch
from curvature_cases import CountedBatches
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import wsam
from wsam.curvature import (
    average_sharpness,
    density,
    hessian,
    landscape,
    random_direction,
    sharpness,
    top_eigenvalues,
    trace,
)
from wsam.curvature.random_vectors import normal


class Quadratic(nn.Module):
    """A weight vector; with `quadratic` and `DATA` its loss is w' A w / 2."""

    def __init__(self, w: list[float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


A = torch.diag(torch.tensor([5.0, 1.0], dtype=torch.float64))
DATA = [A.sqrt()]  # two rows x: the mean of (x w)^2 is w' A w / 2


def quadratic(output: Tensor) -> Tensor:
    return (output**2).mean()


def loss_at(w: Tensor) -> float:
    return float(w @ A @ w / 2)


def test_one_step_equals_sams_perturbation():
    w, rho = torch.tensor([0.3, -2.0], dtype=torch.float64), 0.1
    model = Quadratic(w.tolist())
    found = sharpness(model, quadratic, DATA, rho)
    g = A @ w
    assert found.value == pytest.approx(loss_at(w + rho * g / g.norm()) - loss_at(w), abs=1e-12)
    assert (found.loss, found.measure, found.radius) == (pytest.approx(loss_at(w)), "worst", rho)
    assert found.info["samples"] == 2
    assert torch.equal(model.w.detach(), w)

    opt = wsam.SAM(torch.optim.SGD(model.parameters(), lr=0.0), rho=rho)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = quadratic(model(DATA[0]))
        loss.backward()
        return loss

    opt.step(closure)
    assert found.value == pytest.approx(float(opt.sharpness), rel=1e-6)


def test_many_steps_reach_the_maximum_on_the_ball():
    w, rho = torch.tensor([0.01, -0.4], dtype=torch.float64), 0.5
    model = Quadratic(w.tolist())
    angles = torch.linspace(0, 2 * math.pi, 20001, dtype=torch.float64)
    ball = w + rho * torch.stack([angles.cos(), angles.sin()], 1)
    truth = float((((ball @ A) * ball).sum(1) / 2).max()) - loss_at(w)
    one, many = (sharpness(model, quadratic, DATA, rho, steps=n).value for n in (1, 60))
    assert one < 0.9 * truth
    assert many == pytest.approx(truth, rel=1e-3)
    assert many <= truth + 1e-6
    small = sharpness(model, quadratic, DATA, rho, steps=5, step_size=0.02).value
    assert 0 < small < one  # five short steps do not reach the edge of the ball


def test_many_steps_return_the_highest_loss_of_the_ascent():
    def hill(output: Tensor) -> Tensor:
        return torch.exp(-((output - 1) ** 2)).mean()

    def at(w: float) -> float:
        return math.exp(-((w - 1) ** 2))

    one = [torch.ones(1, 1, dtype=torch.float64)]
    # From 0.5 a step of 0.6 passes the maximum at 1; the next one returns to the start.
    found = sharpness(Quadratic([0.5]), hill, one, 1.0, steps=2, step_size=0.6)
    assert found.value == pytest.approx(at(1.1) - at(0.5), abs=1e-12)


def test_at_a_minimum_sharpness_is_the_top_eigenvalue():
    model = Quadratic([0.0, 0.0])
    assert sharpness(model, quadratic, DATA, 0.1).value == 0  # no gradient, no step
    climbed = sharpness(model, quadratic, DATA, 0.1, steps=40).value
    top = top_eigenvalues(hessian(model, quadratic, DATA)).largest
    assert climbed == pytest.approx(0.5 * top * 0.1**2, rel=1e-3)


def test_adaptive_equals_asams_and_is_invariant_to_rescaling():
    w, rho, eta = torch.tensor([0.3, -2.0], dtype=torch.float64), 0.5, 0.01
    found = sharpness(Quadratic(w.tolist()), quadratic, DATA, rho, adaptive=True, eta=eta)
    t, g = w.abs() + eta, A @ w
    d = rho * t**2 * g / (t * g).norm()
    assert found.value == pytest.approx(loss_at(w + d) - loss_at(w), abs=1e-12)
    assert found.measure == "worst adaptive"

    net = nn.Sequential(
        nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False)
    ).double()
    data = [(torch.randn(9, 3).double(), torch.arange(9) % 2)]
    before = [
        measure(net, F.cross_entropy, data, 0.1, adaptive=adaptive).value
        for measure in (sharpness, average_sharpness)
        for adaptive in (True, False)
    ]
    with torch.no_grad():
        net[0].weight *= 10
        net[2].weight /= 10
    after = [
        measure(net, F.cross_entropy, data, 0.1, adaptive=adaptive).value
        for measure in (sharpness, average_sharpness)
        for adaptive in (True, False)
    ]
    assert after[0] == pytest.approx(before[0], rel=1e-9)
    assert after[2] == pytest.approx(before[2], rel=1e-9)
    assert abs(after[1] - before[1]) > 0.1 * before[1]
    assert abs(after[3] - before[3]) > 0.1 * before[3]


def test_m_sharpness_is_the_mean_over_groups_and_decreases_with_m():
    net = nn.Linear(3, 2).double()
    x, y = torch.randn(12, 3).double(), torch.arange(12) % 2
    data = [(x[:6], y[:6]), (x[6:], y[6:])]
    groups = [(x[i : i + 3], y[i : i + 3]) for i in range(0, 12, 3)]
    alone = [sharpness(net, F.cross_entropy, [group], 0.2).value for group in groups]
    found = sharpness(net, F.cross_entropy, data, 0.2, m=3)
    assert found.value == pytest.approx(sum(alone) / 4, abs=1e-12)
    assert found.measure == "worst m=3"
    values = [sharpness(net, F.cross_entropy, data, 0.2, m=m).value for m in (1, 3, 6)]
    values.append(sharpness(net, F.cross_entropy, data, 0.2).value)
    assert values == sorted(values, reverse=True)
    uneven = sharpness(net, F.cross_entropy, data, 0.2, m=4)  # groups of 4 and 2 in each batch
    parts = [(slice(a, b), b - a) for a, b in ((0, 4), (4, 6), (6, 10), (10, 12))]
    weighed = sum(sharpness(net, F.cross_entropy, [(x[p], y[p])], 0.2).value * n for p, n in parts)
    assert uneven.value == pytest.approx(weighed / 12, abs=1e-12)
    with pytest.raises(ValueError, match="m must be at least 1"):
        sharpness(net, F.cross_entropy, data, m=0)


def test_average_case_is_half_the_trace_on_a_quadratic():
    w, sigma = [0.3, -2.0], 0.1
    found = average_sharpness(Quadratic(w), quadratic, DATA, sigma, samples=300)
    truth = 0.5 * sigma**2 * float(A.trace())
    assert abs(found.value - truth) < 4 * found.standard_error
    assert found.standard_error < 0.1 * truth
    scaled = average_sharpness(Quadratic(w), quadratic, DATA, sigma, samples=300, adaptive=True)
    truth = 0.5 * sigma**2 * float((torch.tensor(w).double() ** 2 * A.diagonal()).sum())
    assert abs(scaled.value - truth) < 4 * scaled.standard_error
    assert scaled.measure == "average adaptive"
    assert average_sharpness(Quadratic(w), quadratic, DATA, sigma, samples=1).standard_error is None


def test_progress_and_json():
    reports, data = [], CountedBatches(DATA)
    report = lambda at: reports.append((*at[:2], data.passes))  # noqa: E731
    sharpness(Quadratic([1.0, 1.0]), quadratic, data, 0.1, steps=3, report=report)
    assert reports == [(n, 4, 1 + n) for n in (1, 2, 3, 4)], "after every gradient"
    reports.clear()
    found = average_sharpness(
        Quadratic([1.0, 1.0]), quadratic, DATA, 0.1, samples=2, report=reports.append
    )
    assert [at[:2] for at in reports] == [(1, 2), (2, 2)], "after every pair"
    assert found.as_dict()["info"]["mode"] == "eval"


def test_infinite_increase_is_null_in_json():
    found = sharpness(Quadratic([1.0, 1.0]), quadratic, [1e3 * DATA[0]], 1e153)
    assert math.isinf(found.value)
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["value"] is None
    assert found.as_dict()["loss"] == found.loss == pytest.approx(3e6)
    average = average_sharpness(Quadratic([1.0, 1.0]), quadratic, DATA, 1e200)
    assert math.isinf(average.value)
    assert json.loads(json.dumps(average.as_dict(), allow_nan=False))["standard_error"] is None


class Checkpointed(nn.Sequential):
    """Layers whose forward pass is computed again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def test_activation_checkpointing_uses_the_perturbed_weights():
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)]
    data = [(torch.randn(9, 3), torch.arange(9) % 2)]
    plain, checkpointed = (
        sharpness(kind(*layers), F.cross_entropy, data, rho=0.5, steps=4).value
        for kind in (nn.Sequential, Checkpointed)
    )
    assert checkpointed == pytest.approx(plain, rel=1e-6)


class TiedNorm(nn.Module):
    """BatchNorm between tied weights, and a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_batchnorm_tied_and_frozen_weights_and_batches_of_unequal_size(mode):
    model, sizes = TiedNorm().double(), (7, 2, 4)
    data = [(torch.randn(n, 3).double(), torch.arange(n) % 3) for n in sizes]
    model(data[0][0])  # running statistics that are not 0 and 1
    worst = sharpness(model, F.cross_entropy, data, 0.3, mode=mode)
    average = average_sharpness(model, F.cross_entropy, data, 0.1, samples=2, mode=mode)

    moved = copy.deepcopy(model).train(mode == "train")
    trained = [p for p in moved.parameters() if p.requires_grad]
    start = nn.utils.parameters_to_vector(trained).detach()

    def loss_at(weights: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(weights, trained)
        return sum(len(x) * F.cross_entropy(moved(x), y) for x, y in data) / sum(sizes)

    loss = loss_at(start)
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, trained)])
    highest = loss_at(start + 0.3 * gradient / gradient.norm())
    assert worst.value == pytest.approx((highest - loss).item(), abs=1e-12)
    assert worst.loss == pytest.approx(loss.item(), abs=1e-12)
    generator = torch.Generator().manual_seed(0)
    noise = [0.1 * normal(start.shape, generator).double() for _ in range(2)]
    around = [loss_at(start + sign * d) for d in noise for sign in (1, -1)]
    assert average.value == pytest.approx((sum(around) / 4 - loss).item(), abs=1e-12)


@contextlib.contextmanager
def default_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "context",
    [
        pytest.param(torch.no_grad, marks=pytest.mark.slow, id="no_grad"),
        pytest.param(torch.inference_mode, id="inference_mode"),
        pytest.param(lambda: torch.device("meta"), marks=pytest.mark.slow, id="default_device"),
        pytest.param(default_float64, marks=pytest.mark.slow, id="default_dtype"),
    ],
)
def test_measurements_do_not_depend_on_global_settings(context):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    data = (model, F.cross_entropy, [(torch.randn(9, 3), torch.arange(9) % 2)])
    vector = torch.ones(26).numpy()

    def measure() -> list[float]:
        H = hessian(*data, differentiation="reverse")
        return [
            *top_eigenvalues(H, 2, which="both").values.tolist(),
            top_eigenvalues(H, method="power").largest,
            *(trace(H, method=method).value for method in ("hutchinson", "hutch++")),
            density(H, steps=9, max_probes=3).below(0.1).low,
            sharpness(*data).value,
            sharpness(*data, m=4, steps=3).value,
            average_sharpness(*data).value,
            *landscape(*data, random_direction(model)).losses,
            *H.to_scipy().matvec(vector).tolist(),
        ]

    expected = measure()
    with context():
        assert measure() == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("measure", "steps", "needed"), [(sharpness, "steps", 2), (average_sharpness, "samples", 2)]
)
def test_number_of_passes_over_the_data(measure, steps, needed):
    """One pass to set up, then what the measure needs; the first gradient is also the check."""
    for check in (False, True):
        data = CountedBatches(DATA)
        measure(Quadratic([1.0, 1.0]), quadratic, data, 0.1, check=check, **{steps: 1})
        check_pass = check and measure is average_sharpness
        assert data.passes == 1 + needed + check_pass


@pytest.mark.parametrize("check", [False, True])
def test_passes_of_m_sharpness_and_landscape(check):
    model, data = Quadratic([1.0, 1.0]), CountedBatches(DATA)
    sharpness(model, quadratic, data, 0.1, m=1, steps=3, check=check)
    assert data.passes == 2 + check
    data = CountedBatches(DATA)
    landscape(model, quadratic, data, random_direction(model, normalise="unit"), check=check)
    assert data.passes == 2 + check


def m_sharpness(model: nn.Module, loss_fn: object, batches: list[Tensor]) -> object:
    return sharpness(model, loss_fn, batches, m=1)


@pytest.mark.parametrize("measure", [sharpness, m_sharpness, average_sharpness])
def test_fewer_batches_in_a_second_pass_raise(measure):
    class Shrinking(CountedBatches):  # the mean loss does not change
        def __iter__(self):
            super().__iter__()
            return iter([self[0]] * (4 - min(self.passes, 3)))

    with pytest.raises(ValueError, match="6 samples in 3 batches, then 4 in 2"):
        measure(Quadratic([1.0, 1.0]), quadratic, Shrinking(DATA))
