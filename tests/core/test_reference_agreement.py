"""Every method, base and way to step agrees with the reference implementation over fifty steps."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import reference
import torch
from helpers import (
    ALL,
    BASES,
    LEAN,
    METHODS,
    PROBLEMS,
    RULE_VARIANTS,
    STYLES,
    VARIANTS,
    Weights,
    covering,
    make_method,
    make_step,
    parameters,
    reference_base,
    torch_base,
)
from reference import Method
from torch import Tensor

import wsam

STEPS = 50
TOLERANCE = 1e-10

GEOMETRIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "euclidean": (wsam.Euclidean(), {}),
    "adaptive": (wsam.Adaptive(eta=0.1), {"eta": 0.1}),
    "fisher": (wsam.Fisher(eta=0.7), {"eta": 0.7}),
    "masked": (wsam.Masked(beta=0.5), {"beta": 0.5}),
}


def flat(w: Weights) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in w])


@cache
def expected_weights(
    method: Method,
    base: str,
    decay: float,
    problem: str,
    masks: tuple[tuple[bool, ...], ...] | None,
) -> Tensor:
    """Return the reference's weights after each step, one row a step."""
    task = PROBLEMS[problem]
    optimizer, w, rows = reference_base(base, decay), task.weights(), []
    memory: reference.Memory = {}
    for t in range(STEPS):
        g0, g1 = reference.two_gradients(
            method, w, lambda v, t=t: task.losses(v, t), masks[t] if masks else None, memory
        )
        w = reference.update(method, optimizer, w, g0, g1, memory)
        rows.append(flat(w))
    return torch.stack(rows)


def masks_of(opt: wsam.SharpnessAware, method: Method, problem: str) -> Any:
    """Return which tensors the library perturbs at each step, for the reference."""
    if method.geometry != "masked":
        return None
    tensors = len(PROBLEMS[problem].shapes)
    masks = tuple(tuple(opt.geometry.mask(t, tensors)) for t in range(STEPS))
    share = sum(map(sum, masks)) / (STEPS * tensors)
    assert abs(share - method.beta) < 0.15, "the masks are not Bernoulli(beta)"
    return masks


def assert_agrees(
    opt: wsam.SharpnessAware,
    params: Weights,
    method: Method,
    base: str,
    decay: float,
    problem: str,
    style: str = "closure",
) -> None:
    wanted = expected_weights(method, base, decay, problem, masks_of(opt, method, problem))
    task, rows = PROBLEMS[problem], []
    for t in range(STEPS):
        make_step(opt, lambda t=t: opt.select(task.losses(params, t)), style)
        rows.append(flat(params))
    found = torch.stack(rows)
    assert not torch.equal(wanted[0], wanted[-1])
    error = ((found - wanted).abs().amax(1) / wanted.abs().amax(1)).tolist()
    assert max(error) < TOLERANCE, f"step {error.index(max(error))} is off by {max(error):.1e}"


def test_every_method_has_a_reference() -> None:
    assert set(reference.METHODS) - {LEAN} == set(wsam.METHODS)


def papers_toy(w: Weights) -> Tensor:
    """The paper's loss of two Gaussians, w = (mu, sigma)."""
    mu, sigma = w[0]

    def divergence(mean: float, width: float) -> Tensor:
        spread = (sigma**2 + (mu - mean) ** 2) / (2 * width**2)
        return torch.log(width / sigma) + spread - 0.5

    flat = 0.7 * torch.exp(-divergence(20.0, 30.0) / 1.8**2)
    sharp = 0.3 * torch.exp(-divergence(-20.0, 10.0) / 1.2**2)
    return -torch.log(flat + sharp).reshape(1)


@pytest.mark.parametrize(
    ("rule", "gamma", "end", "off"),
    [
        ("sam", 0.0, (-16.8, 12.8), 0.5),
        ("wsam", 0.6, (-16.8, 12.8), 0.5),
        ("coupled", 0.6, (-16.8, 12.8), 0.5),
        ("wsam", 0.95, (-16.8, 12.8), 1.0),  # it circles around that minimum forever
        ("coupled", 0.95, (19.815, 29.766), 0.001),
    ],
)
def test_the_reference_reaches_the_known_minima_of_the_toy(
    rule: str, gamma: float, end: tuple[float, ...], off: float
) -> None:
    """Known end points of the paper's toy problem: momentum 0.9, rho 2, learning rate 5."""
    method, base = Method(rule, rho=2.0, gamma=gamma), reference.Base("sgd", 5.0, momentum=0.9)
    w = [torch.tensor([-6.0, 10.0], dtype=torch.float64)]
    for _ in range(150):
        w = reference.update(method, base, w, *reference.two_gradients(method, w, papers_toy))
    assert w[0].tolist() == pytest.approx(end, abs=off)


@covering(
    2, name=VARIANTS, base=list(BASES), decay=[0.0, 0.01], problem=list(PROBLEMS), style=STYLES
)
def test_method_over_base(name: str, base: str, decay: float, problem: str, style: str) -> None:
    params = parameters(PROBLEMS[problem].weights())
    opt = make_method(name, torch_base(base, params, decay))
    assert_agrees(opt, params, reference.METHODS[name], base, decay, problem, style)


@covering(
    2, name=[*RULE_VARIANTS, "coupled_wsam"], geometry=list(GEOMETRIES), base=["momentum", "adamw"]
)
def test_rule_with_geometry(name: str, geometry: str, base: str) -> None:
    part, numbers = GEOMETRIES[geometry]
    method = replace(reference.METHODS[name], geometry=geometry, rho=0.1, gamma=0.8, **numbers)
    gamma = {"gamma": 0.8} if name.endswith("wsam") else {}
    params = parameters(PROBLEMS["mlp"].weights())
    opt = make_method(name, torch_base(base, params, 0.01), geometry=part, rho=0.1, **gamma)
    assert_agrees(opt, params, method, base, 0.01, "mlp")


def test_adaptive_on_weights_only() -> None:
    """The original ASAM: T = |w| + eta for tensors named weight, 1 for the others."""
    task = PROBLEMS["mlp"]
    params = parameters(task.weights())
    named = list(zip(task.names, params, strict=True))
    opt = wsam.ASAM(torch.optim.SGD(named, lr=0.05), rho=0.5, eta=0.01, weights_only=True)
    adapted = tuple("weight" in name for name in task.names)
    method = replace(reference.METHODS["asam"], adapted=adapted)
    assert_agrees(opt, params, method, "sgd", 0.0, "mlp")


@covering(name=ALL, base=["momentum", "adam"], style=STYLES)
def test_clip(name: str, base: str, style: str) -> None:
    """One factor, from the norm of the combined gradient, scales base_grad and the decoupled term."""
    method = replace(reference.METHODS[name], max_norm=0.3)
    params = parameters(PROBLEMS["mlp"].weights())
    opt = make_method(name, torch_base(base, params), max_norm=0.3)
    masks = masks_of(opt, method, "mlp")
    free = expected_weights(reference.METHODS[name], base, 0.0, "mlp", masks)
    clipped = expected_weights(method, base, 0.0, "mlp", masks)
    assert not torch.allclose(free, clipped), "max_norm is too large to test anything"
    assert_agrees(opt, params, method, base, 0.0, "mlp", style)


@pytest.mark.parametrize("name", METHODS)
def test_keep_a_share_of_the_samples(name: str) -> None:
    """Every method can select samples; only ESAM does by default."""
    method = replace(reference.METHODS[name], keep=0.3)
    params = parameters(PROBLEMS["mlp"].weights())
    option = {"gamma": 0.3} if name == "esam" else {"keep": 0.3}
    opt = make_method(name, torch_base("momentum", params), **option)
    assert_agrees(opt, params, method, "momentum", 0.0, "mlp")
