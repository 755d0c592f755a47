"""What the optimizer's tests share: small problems, base optimizers, and the ways to make a step."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import reference
import torch
from torch import Tensor, nn

import wsam

MEMBERS = sorted(wsam.METHODS)
STYLES = ["closure", "two_step", "phases"]
Weights = list[Tensor]


@dataclass(frozen=True)
class Problem:
    """A function of a list of weights, with a loss for each of ten samples."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    outputs: Callable[[Weights, Tensor], Tensor]

    def weights(self) -> Weights:
        generator = torch.Generator().manual_seed(3)
        return [0.7 * torch.randn(s, generator=generator, dtype=torch.float64) for s in self.shapes]

    def losses(self, w: Weights, step: int) -> Tensor:
        """Each sample's loss on the mini-batch of this step."""
        return self.outputs(w, batch(step))


@functools.cache
def batch(step: int) -> Tensor:
    """Ten samples of five numbers, others at each step, the same for everyone."""
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


def reference_base(name: str, weight_decay: float = 0.0) -> reference.Base:
    _, options, twin, hyper = BASES[name]
    return reference.Base(twin, options["lr"], weight_decay, **hyper)


def torch_base(name: str, params: Any, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    kind, options, _, _ = BASES[name]
    return kind(params, weight_decay=weight_decay, **options)


def parameters(w: Weights) -> list[nn.Parameter]:
    return [nn.Parameter(p.clone()) for p in w]


def make_step(
    opt: wsam.SharpnessAware, loss: Callable[[], Tensor], style: str = "closure"
) -> Tensor:
    """One whole step of `opt`; `loss` computes the loss and leaves the backward pass to us."""

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
    """Let `opt` make these steps on the problem; return the losses."""
    return [make_step(opt, lambda t=t: opt.select(problem.losses(params, t)), style) for t in steps]


def snapshot(opt: torch.optim.Optimizer) -> dict[str, Any]:
    """A copy of weights, base state and groups that later changes cannot reach."""
    params = [p for group in opt.param_groups for p in group["params"]]
    return {
        "weights": [p.detach().clone() for p in params],
        "state": [copy.deepcopy(dict(opt.state.get(p, {}))) for p in params],
        "groups": [
            copy.deepcopy({k: v for k, v in group.items() if k != "params"})
            for group in opt.param_groups
        ],
    }


def same(x: Any, y: Any) -> bool:
    """Whether two nests of tensors and values are equal to the last bit (NaN equals NaN)."""
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
    """The largest difference relative to the size of the whole vector."""
    size = max(float(v.detach().abs().max()) for v in y)
    return max(float((u - v).detach().abs().max()) for u, v in zip(x, y, strict=True)) / size


def member(name: str, base: torch.optim.Optimizer, **options: Any) -> wsam.SharpnessAware:
    """The registered member with its own defaults; but Coupled-WSAM's would be SAM."""
    own = {"gamma": 0.8} if name == "coupled_wsam" else {}
    return wsam.create(name, base, **{**own, **options})


def small_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def model_loss(opt: wsam.SharpnessAware, model: nn.Module, step: int = 0) -> Callable[[], Tensor]:
    """A loss of `model` on the mini-batch of the step, with `opt` selecting samples if it does."""
    x = batch(step).to(next(model.parameters()).dtype)
    return lambda: opt.select((model(x) ** 2).sum(1))


def closure(opt: wsam.SharpnessAware, model: nn.Module, step: int = 0) -> Callable[[], Tensor]:
    """The closure a user writes."""
    loss = model_loss(opt, model, step)

    def run() -> Tensor:
        opt.zero_grad()
        value = loss()
        value.backward()
        return value

    return run
