"""Shared by the optimizer's tests: problems, base optimizers, ways to step, and parameter lists."""

import copy
import functools
import io
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import reference
import torch
from torch import Tensor, nn

import wsam


def default_geometry(name: str) -> wsam.Geometry:
    base = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    return wsam.METHODS[name](base).geometry


ONE_PASS = [name for name in wsam.METHODS if not default_geometry(name).needs_g0]
"""Methods with one gradient a step; tests/core/test_msam.py has most of their tests."""
METHODS = [name for name in sorted(wsam.METHODS) if name not in ONE_PASS]
"""Methods with two gradients a step."""
ALL = [*METHODS, *ONE_PASS]
AVERAGING = [name for name in METHODS if default_geometry(name).memory]
"""Methods that average gradients, so that the order of micro-batches matters."""
RULES = ["sam", "wsam", "gsam"]
"""One method for each kind of rule: g1 only, a decoupled term, inner products of the gradients."""
LEAN = "lean_wsam"
REUSED = "reused_wsam"
VARIANTS = [*METHODS, LEAN]
"""All methods, and WSAM with lean=True."""
RULE_VARIANTS = [*RULES, LEAN]
STYLES = ["closure", "two_step", "phases"]
Weights = list[Tensor]


def full(**factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with all combinations of the factors' values."""
    return pytest.mark.parametrize(tuple(factors), list(itertools.product(*factors.values())))


def covering(strength: int = 1, **factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with all combinations, of which all but a covering array are slow.

    Args:
        strength: 1 for an array that has each value of each factor at least once, 2 for one that has
            each pair of values of two factors.
        factors: for each argument of the test its values.
    """
    rows = list(itertools.product(*(range(len(values)) for values in factors.values())))
    chosen = _covering_rows(rows, strength)
    cases = [
        pytest.param(
            *(values[i] for values, i in zip(factors.values(), row, strict=True)),
            marks=() if row in chosen else pytest.mark.slow,
        )
        for row in rows
    ]
    return pytest.mark.parametrize(tuple(factors), cases)


def _covering_rows(rows: list[tuple[int, ...]], strength: int) -> set[tuple[int, ...]]:
    """Choose rows greedily: most tuples not yet covered, then values that were used least."""
    bits: dict[Any, int] = {}
    masks = {}
    for row in rows:
        found = itertools.combinations(enumerate(row), strength)
        masks[row] = sum(1 << bits.setdefault(values, len(bits)) for values in found)
    left, chosen, uses = (1 << len(bits)) - 1, set(), Counter()
    while left:
        best = max(
            rows,
            key=lambda row: (
                (masks[row] & left).bit_count(),
                -sum(uses[value] for value in enumerate(row)),
            ),
        )
        left &= ~masks[best]
        chosen.add(best)
        uses.update(enumerate(best))
    return chosen


@dataclass(frozen=True)
class Problem:
    """A function of a list of weights that returns a loss for each of ten samples."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    outputs: Callable[[Weights, Tensor], Tensor]

    def weights(self) -> Weights:
        generator = torch.Generator().manual_seed(3)
        return [0.7 * torch.randn(s, generator=generator, dtype=torch.float64) for s in self.shapes]

    def losses(self, w: Weights, step: int) -> Tensor:
        """Return the per-sample losses on the mini-batch of this step."""
        return self.outputs(w, batch(step))


@functools.cache
def batch(step: int) -> Tensor:
    """Ten samples of five numbers, different at each step, the same in every test."""
    i = torch.arange(50, dtype=torch.float64).reshape(10, 5)
    return torch.sin(1.7 * i + 0.37 * step * (i % 7)) + 0.1 * torch.cos(3.1 * i)


def _quadratic(w: Weights, x: Tensor) -> Tensor:
    matrix, bias, scale = w
    stretch = torch.tensor([0.3, 1.0, 3.0], dtype=x.dtype)
    residual = x[:, :2] @ matrix.T + bias - x[:, 2:]
    return 0.5 * (stretch * residual**2).sum(1) + 0.5 * ((scale - x[:, 0]) ** 2)


def _mlp(w: Weights, x: Tensor) -> Tensor:
    hidden = torch.tanh(x[:, :3] @ w[0].T + w[1])
    return ((hidden @ w[2].T + w[3] - x[:, 3:]) ** 2).sum(1)


PROBLEMS = {
    "quadratic": Problem(("weight", "bias", "scale"), ((3, 2), (3,), (1,)), _quadratic),
    "mlp": Problem(
        ("1.weight", "1.bias", "2.weight", "2.bias"), ((4, 3), (4,), (2, 4), (2,)), _mlp
    ),
}

# name -> (class, arguments for torch, name and arguments for the reference)
BASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], str, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}, "sgd", {}),
    "momentum": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}, "sgd", {"momentum": 0.9}),
    "nesterov": (
        torch.optim.SGD,
        {"lr": 0.02, "momentum": 0.8, "nesterov": True},
        "sgd",
        {"momentum": 0.8, "nesterov": True},
    ),
    "adam": (torch.optim.Adam, {"lr": 0.01}, "adam", {}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}, "adamw", {}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.003}, "rmsprop", {}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.03}, "adagrad", {}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.2}, "adadelta", {}),
}
# The products of the tests over BASES are large, so these are not among them.
MORE_BASES = BASES | {
    "nadam": (torch.optim.NAdam, {"lr": 0.01}, "nadam", {}),
    "radam": (torch.optim.RAdam, {"lr": 0.01}, "radam", {}),
}


def reference_base(name: str, weight_decay: float = 0.0) -> reference.Base:
    _, options, twin, hyper = MORE_BASES[name]
    return reference.Base(twin, options["lr"], weight_decay, **hyper)


def torch_base(name: str, params: Any, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    kind, options, _, _ = MORE_BASES[name]
    return kind(params, weight_decay=weight_decay, **options)


def parameters(w: Weights) -> list[nn.Parameter]:
    return [nn.Parameter(p.clone()) for p in w]


def make_step(
    opt: wsam.SharpnessAware, loss: Callable[[], Tensor], style: str = "closure"
) -> Tensor:
    """Make one step of `opt`. `loss` computes the loss without calling backward."""

    def backward() -> Tensor:
        opt.zero_grad()
        value = loss()
        value.backward()
        return value.detach()

    if style == "closure":
        return opt.step(backward)
    if style == "two_step":
        value = backward()
        opt.first_step(zero_grad=True)
        backward()
        opt.second_step(zero_grad=True)
        return value
    assert style == "phases"
    opt.begin()
    value = backward()
    opt.ascend()
    backward()
    opt.descend()
    opt.step()
    return value


def train(
    opt: wsam.SharpnessAware,
    params: Weights,
    problem: Problem,
    steps: range,
    style: str = "closure",
) -> list[Tensor]:
    """Make these steps on the problem; return the losses."""
    return [make_step(opt, lambda t=t: opt.select(problem.losses(params, t)), style) for t in steps]


def snapshot(opt: torch.optim.Optimizer) -> dict[str, Any]:
    """Return deep copies of weights, base state and groups."""
    params = [p for group in opt.param_groups for p in group["params"]]
    return {
        "weights": [p.detach().clone() for p in params],
        "state": [copy.deepcopy(dict(opt.state.get(p, {}))) for p in params],
        "groups": [
            copy.deepcopy({k: v for k, v in group.items() if k != "params"})
            for group in opt.param_groups
        ],
    }


def save_and_load(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as a checkpoint file returns it, with plain values and tensors only."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(x: Any, y: Any) -> bool:
    """Whether two nested structures of tensors and values are bitwise equal; NaN equals NaN."""
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return (
            isinstance(x, Tensor)
            and isinstance(y, Tensor)
            and x.dtype == y.dtype
            and x.shape == y.shape
            and bool(((x == y) | ((x != x) & (y != y))).all())
        )
    if isinstance(x, dict):
        return isinstance(y, dict) and x.keys() == y.keys() and all(same(x[k], y[k]) for k in x)
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(same(u, v) for u, v in zip(x, y, strict=True))
    return bool(x == y) or (x != x and y != y)


def gap(x: Weights, y: Weights) -> float:
    """The largest absolute difference, relative to the largest element of `y`."""
    size = max(float(v.detach().abs().max()) for v in y)
    return max(float((u - v).detach().abs().max()) for u, v in zip(x, y, strict=True)) / size


def make_method(
    name: str, base: torch.optim.Optimizer, all_samples: bool = False, **options: Any
) -> wsam.SharpnessAware:
    """Construct a method, or the lean variant of WSAM, with its defaults.

    WSAM has the same gamma over every base. Coupled-WSAM has another gamma than by default, where it
    equals SAM, and LookSAM has two passes at every step; tests/core/test_peers.py reuses.

    Args:
        name: one of `VARIANTS`.
        base: the base optimizer.
        all_samples: let ESAM use the whole batch in its second pass.
        options: arguments of the constructor.
    """
    own: dict[str, Any] = {"coupled_wsam": {"gamma": 0.8}, "looksam": {"n": 1}}.get(name, {})
    if name in ("wsam", REUSED):
        own["gamma"] = 0.9
    if all_samples and name == "esam":
        own["gamma"] = 1.0
    if name == LEAN:
        name, own = "wsam", {"lean": True, "precondition": False}
    if name == REUSED:
        name, own = "wsam", {**own, "when": wsam.schedule.Every(3), "reuse": True}
    return wsam.create(name, base, **{**own, **options})


def small_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def model_loss(opt: wsam.SharpnessAware, model: nn.Module, step: int = 0) -> Callable[[], Tensor]:
    """Return a function that computes the loss of `model` on the mini-batch of the step."""
    x = batch(step).to(next(model.parameters()).dtype)
    return lambda: opt.select((model(x) ** 2).sum(1))


def closure(opt: wsam.SharpnessAware, model: nn.Module, step: int = 0) -> Callable[[], Tensor]:
    """Return the closure that a user writes."""
    loss = model_loss(opt, model, step)

    def run() -> Tensor:
        opt.zero_grad()
        value = loss()
        value.backward()
        return value

    return run
