"""Reference implementation of all methods: plain float64, one tensor at a time.

It is written from the papers' formulas. It shares no code with the library, uses no optimizer of torch,
and does nothing in place.

Names: `w` weights, `g0` the gradient at w, `d` the perturbation, `g1` the gradient at w + d.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Weights = list[Tensor]
Losses = Callable[[Weights], Tensor]  # weights -> one loss for each sample
EPS = 1e-12


@dataclass(frozen=True)
class Method:
    """A rule and a geometry with their hyperparameters; some may differ by tensor, as a list."""

    rule: str
    geometry: str = "euclidean"
    rho: float | Sequence[float] = 0.05
    gamma: float | Sequence[float] = 0.9
    alpha: float | Sequence[float] = 0.1
    eta: float = 0.0
    adapted: Sequence[bool] | None = None  # tensors with T = |w| + eta; None: all
    beta: float = 1.0  # probability that a tensor is perturbed
    keep: float = 1.0  # share of the samples in the second pass
    max_norm: float | None = None
    precondition: bool = True  # WSAM's term, over bases that divide by a denominator
    n: int = 1  # LookSAM: two passes on each n-th step
    per_tensor: bool = False  # LookSAM: projections and norms of each tensor
    theta: float = 0.9  # VaSSO: share of the new gradient in the average
    sigma: float = 1.0  # FriendlySAM: how much of the average is removed
    decay: float = 0.9  # FriendlySAM: of the average
    ascent_steps: int = 1  # that lead from w to w + d


METHODS = {
    "sam": Method("sam"),
    "wsam": Method("wsam"),
    "lean_wsam": Method("wsam", precondition=False),
    "coupled_wsam": Method("coupled", gamma=0.8),
    "gsam": Method("gsam"),
    "esam": Method("sam", "masked", beta=0.6, keep=0.6),
    "asam": Method("sam", "adaptive", rho=0.5, eta=0.01),
    "fisher_sam": Method("sam", "fisher", eta=1.0),
    "looksam": Method("looksam", alpha=0.7),
    "vasso": Method("sam", "averaged"),
    "friendly_sam": Method("sam", "without_average"),
    "msam": Method("sam", "along_momentum", rho=3.0),
}

Memory = dict[str, Any]
"""What a method keeps between steps: one dict for a run, empty at its start."""


def at(value: float | Sequence[float], i: int) -> float:
    return value if isinstance(value, float | int) else value[i]


def dot(x: Weights, y: Weights) -> float:
    return sum(float((u * v).sum()) for u, v in zip(x, y, strict=True))


def gradient(losses: Losses, w: Weights, samples: list[int] | None) -> tuple[Tensor, Weights]:
    """Return per-sample losses, and the gradient of the mean over the given samples."""
    w = [p.detach().double().requires_grad_() for p in w]
    each = losses(w)
    chosen = each if samples is None else each[samples]
    return each.detach(), list(torch.autograd.grad(chosen.mean(), w))


def metric(m: Method, w: Tensor, g: Tensor, i: int, mask: Sequence[bool] | None) -> Tensor:
    """Return the diagonal S of d = rho S g0 / (sqrt(<g0, S g0>) + eps), for tensor i."""
    if m.geometry == "adaptive":
        use = m.adapted is None or m.adapted[i]
        return (w.abs() + m.eta) ** 2 if use else torch.ones_like(w)
    if m.geometry == "fisher":
        return 1 / (1 + m.eta * g**2)
    if m.geometry == "masked":
        assert mask is not None
        return torch.ones_like(w) if mask[i] else torch.zeros_like(w)
    assert m.geometry in ("euclidean", "averaged", "without_average")
    return torch.ones_like(w)


def vector(m: Method, g0: Weights, memory: Memory) -> Weights:
    """Return what takes the place of g0 in the perturbation."""
    before = memory.get("average")
    if m.geometry == "averaged":
        share = m.theta if before is not None else 1.0
        memory["average"] = average(before or g0, g0, share)
        return memory["average"]
    if m.geometry == "without_average":
        share = 1 - m.decay if before is not None else 1.0
        memory["average"] = average(before or g0, g0, share)
        if before is not None:
            return [g - m.sigma * x for g, x in zip(g0, before, strict=True)]
    return g0


def average(old: Weights, new: Weights, share: float) -> Weights:
    return [(1 - share) * x + share * y for x, y in zip(old, new, strict=True)]


def perturbation(m: Method, w: Weights, g0: Weights, mask: Sequence[bool] | None) -> Weights:
    sg = [metric(m, p, g, i, mask) * g for i, (p, g) in enumerate(zip(w, g0, strict=True))]
    norm = math.sqrt(dot(g0, sg))
    radius = 1 / m.beta if m.geometry == "masked" else 1.0
    return [radius * at(m.rho, i) * x / (norm + EPS) for i, x in enumerate(sg)]


def coefficients(m: Method, g0: Weights, g1: Weights, i: int) -> tuple[float, float, float, float]:
    """Return a, b, c, e: the base receives a g0 + b g1, then w -= lr (c g0 + e g1)."""
    k = at(m.gamma, i) / (1 - at(m.gamma, i))
    alpha = at(m.alpha, i)
    if m.rule in ("sam", "looksam"):
        return 0.0, 1.0, 0.0, 0.0
    if m.rule == "wsam":
        return 1.0, 0.0, -k, k
    if m.rule == "coupled":
        return 1 - k, k, 0.0, 0.0
    assert m.rule == "gsam"
    return -alpha, 1 + alpha * dot(g0, g1) / dot(g1, g1), 0.0, 0.0


def kept_samples(before: Tensor, after: Tensor, keep: float) -> list[int] | None:
    """Return the samples whose loss increased most: keep * B rounded down, at least one."""
    count = max(1, math.floor(keep * len(before) + 1e-9))
    increase = (after - before).tolist()
    return sorted(range(len(increase)), key=lambda i: increase[i], reverse=True)[:count]


def two_gradients(
    m: Method,
    w: Weights,
    losses: Losses,
    mask: Sequence[bool] | None = None,
    memory: Memory | None = None,
) -> tuple[Weights, Weights]:
    """Return g0 and g1; in steps with one pass twice the same, or what LookSAM's base receives."""
    memory = {} if memory is None else memory
    if m.geometry == "along_momentum":
        d = momentum_step(m, memory) if "momentum" in memory else [torch.zeros_like(p) for p in w]
        only = gradient(losses, [p + x for p, x in zip(w, d, strict=True)], None)[1]
        return only, only
    before, g0 = gradient(losses, w, None)
    if memory.get("step", 0) % m.n != 0:
        return g0, reused(m, g0, memory["orthogonal"])
    moved, g = w, vector(m, g0, memory)
    for number in range(m.ascent_steps):
        if number > 0:
            g = gradient(losses, moved, None)[1]
        d = perturbation(m, moved, g, mask)
        moved = [p + x / m.ascent_steps for p, x in zip(moved, d, strict=True)]
    chosen = None
    if m.keep < 1:
        chosen = kept_samples(before, losses(moved).detach(), m.keep)
    return g0, gradient(losses, moved, chosen)[1]


def momentum_step(m: Method, memory: Memory) -> Weights:
    """Return d of MSAM from the base's momentum b."""
    b = memory["momentum"]
    norm = math.sqrt(dot(b, b))
    return [-at(m.rho, i) * x / (norm + EPS) for i, x in enumerate(b)]


def pieces(m: Method, tensors: Weights) -> list[Weights]:
    """Return the parts over which LookSAM takes inner products."""
    return [[x] for x in tensors] if m.per_tensor else [tensors]


def orthogonal(m: Method, g0: Weights, g1: Weights) -> Weights:
    """Return LookSAM's g_v, the part of g1 that is orthogonal to g0."""
    found = []
    for x, y in zip(pieces(m, g0), pieces(m, g1), strict=True):
        ratio = dot(x, y) / dot(x, x)
        found += [v - ratio * u for u, v in zip(x, y, strict=True)]
    return found


def reused(m: Method, g0: Weights, g_v: Weights) -> Weights:
    """Return g0 + alpha norm(g0)/norm(g_v) g_v."""
    found = []
    for x, v in zip(pieces(m, g0), pieces(m, g_v), strict=True):
        ratio = math.sqrt(dot(x, x) / dot(v, v))
        found += [a + at(m.alpha, len(found) + i) * ratio * b
                  for i, (a, b) in enumerate(zip(x, v, strict=True))]  # fmt: skip
    return found


def update(
    m: Method,
    base: "Base",
    w: Weights,
    g0: Weights,
    g1: Weights,
    memory: Memory | None = None,
) -> Weights:
    """Return the new weights: combine, clip, step the base, apply the decoupled term."""
    memory = {} if memory is None else memory
    if m.rule == "looksam" and memory.get("step", 0) % m.n == 0:
        memory["orthogonal"] = orthogonal(m, g0, g1)
    memory["step"] = memory.get("step", 0) + 1
    rows = [coefficients(m, g0, g1, i) for i in range(len(w))]
    pairs = list(zip(rows, g0, g1, strict=True))
    base_grad = [a * x + b * y for (a, b, _, _), x, y in pairs]
    decoupled = [c * x + e * y for (_, _, c, e), x, y in pairs]
    if m.max_norm is not None:
        total = [x + y for x, y in zip(base_grad, decoupled, strict=True)]
        factor = min(1.0, m.max_norm / (math.sqrt(dot(total, total)) + 1e-6))
        base_grad, decoupled = ([factor * x for x in part] for part in (base_grad, decoupled))
    new = apply_both(m, base, w, base_grad, decoupled)
    if base.name != "rmsprop" and all("m" in base.memory[i] for i in range(len(w))):
        memory["momentum"] = [base.memory[i]["m"] for i in range(len(w))]
    return new


def apply_both(
    m: Method, base: "Base", w: Weights, base_grad: Weights, decoupled: Weights
) -> Weights:
    if m.rule == "wsam" and m.precondition and base.name in Base.ADAPTIVE:
        return base.step(w, base_grad, decoupled)
    stepped = base.step(w, base_grad)
    return [p - base.lr * x for p, x in zip(stepped, decoupled, strict=True)]


@dataclass
class ReusedSharpness:
    """WSAM with h = g1 - g0 on each n-th step, kept for the steps between."""

    method: Method
    n: int
    scale_by_norm: bool = False
    average: float = 0.0
    weight: float = 1.0
    kept: Weights | None = None

    def step(self, base: "Base", w: Weights, losses: Losses, t: int) -> Weights:
        k = at(self.method.gamma, 0) / (1 - at(self.method.gamma, 0))
        if t % self.n == 0:
            g0, g1 = two_gradients(self.method, w, losses)
            h = [y - x for x, y in zip(g0, g1, strict=True)]
            new = [x / math.sqrt(dot(g0, g0)) for x in h] if self.scale_by_norm else h
            old = self.kept
            if old is not None:
                a = self.average
                new = [a * x + (1 - a) * y for x, y in zip(old, new, strict=True)]
            self.kept = new
        else:
            assert self.kept is not None
            g0 = gradient(losses, w, None)[1]
            k *= self.weight * (math.sqrt(dot(g0, g0)) if self.scale_by_norm else 1.0)
            h = self.kept
        return apply_both(self.method, base, w, g0, [k * x for x in h])


class Base:
    """A base optimizer by name, with torch's defaults.

    An adaptive one takes a second vector s: its squares are averaged over g^2 + s^2, and s is divided
    by its denominator but does not enter its momentum.
    """

    ADAPTIVE = ("adam", "adamw", "nadam", "radam", "rmsprop", "adagrad", "adadelta")

    def __init__(self, name: str, lr: float, weight_decay: float = 0.0, **hyper: Any) -> None:
        self.name, self.lr, self.decay, self.hyper = name, lr, weight_decay, hyper
        self.t = 0
        self.memory: dict[int, dict[str, Tensor]] = {}

    def step(self, w: Weights, g: Weights, s: Weights | None = None) -> Weights:
        self.t += 1
        rule = getattr(self, self.name)
        out = []
        for i, (p, x) in enumerate(zip(w, g, strict=True)):
            decouples_decay = self.name == "adamw"
            start = p - self.lr * self.decay * p if decouples_decay else p
            gradient = x if decouples_decay else x + self.decay * p
            both = [gradient]
            if self.name in self.ADAPTIVE:
                both.append(torch.zeros_like(p) if s is None else s[i])
            move = rule(*both, self.memory.setdefault(i, {}), **self.hyper)
            out.append(start - self.lr * move)
        return out

    def sgd(self, g: Tensor, s: dict[str, Tensor], momentum: float = 0.0, dampening: float = 0.0,
            nesterov: bool = False) -> Tensor:  # fmt: skip
        if momentum == 0:
            return g
        s["m"] = momentum * s["m"] + (1 - dampening) * g if "m" in s else g
        return g + momentum * s["m"] if nesterov else s["m"]

    def moments(self, g: Tensor, x: Tensor, s: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return m and v with bias corrections, as all Adam-like bases do."""
        zero = torch.zeros_like(g)
        s["m"] = 0.9 * s.get("m", zero) + 0.1 * g
        s["v"] = 0.999 * s.get("v", zero) + 0.001 * (g**2 + x**2)
        return s["m"] / (1 - 0.9**self.t), s["v"] / (1 - 0.999**self.t)

    def adam(self, g: Tensor, x: Tensor, s: dict[str, Tensor], amsgrad: bool = False) -> Tensor:
        m, v = self.moments(g, x, s)
        if amsgrad:
            s["max"] = torch.maximum(s.get("max", torch.zeros_like(g)), s["v"])
            v = s["max"] / (1 - 0.999**self.t)
        return (m + x) / (v.sqrt() + 1e-8)

    adamw = adam

    def nadam(self, g: Tensor, x: Tensor, s: dict[str, Tensor]) -> Tensor:
        _, v = self.moments(g, x, s)
        now, after = (0.9 * (1 - 0.5 * 0.96 ** (t * 0.004)) for t in (self.t, self.t + 1))
        product = s["mu"] = s.get("mu", 1.0) * now
        m = (1 - now) / (1 - product) * g + after / (1 - product * after) * s["m"]
        return (m + x) / (v.sqrt() + 1e-8)

    def radam(self, g: Tensor, x: Tensor, s: dict[str, Tensor]) -> Tensor:
        m, _ = self.moments(g, x, s)
        correction = 1 - 0.999**self.t
        longest = 2 / (1 - 0.999) - 1
        length = longest - 2 * self.t * 0.999**self.t / correction
        if length <= 5:
            return m + x
        above, below = (length - 4) * (length - 2) * longest, (longest - 4) * (longest - 2) * length
        return (m + x) * math.sqrt(above / below * correction) / (s["v"].sqrt() + 1e-8)

    def rmsprop(self, g: Tensor, x: Tensor, s: dict[str, Tensor], centered: bool = False,
                momentum: float = 0.0) -> Tensor:  # fmt: skip
        zero = torch.zeros_like(g)
        s["v"] = 0.99 * s.get("v", zero) + 0.01 * (g**2 + x**2)
        s["m"] = 0.99 * s.get("m", zero) + 0.01 * g
        root = (s["v"] - s["m"] ** 2).sqrt() if centered else s["v"].sqrt()
        s["b"] = momentum * s.get("b", zero) + g / (root + 1e-8)
        return s["b"] + x / (root + 1e-8)

    def adagrad(self, g: Tensor, x: Tensor, s: dict[str, Tensor], lr_decay: float = 0.0) -> Tensor:
        s["v"] = s.get("v", torch.zeros_like(g)) + g**2 + x**2
        return (g + x) / (s["v"].sqrt() + 1e-10) / (1 + (self.t - 1) * lr_decay)

    def adadelta(self, g: Tensor, x: Tensor, s: dict[str, Tensor]) -> Tensor:
        zero = torch.zeros_like(g)
        s["v"] = 0.9 * s.get("v", zero) + 0.1 * (g**2 + x**2)
        root = (s["v"] + 1e-6).sqrt()
        move = (s.get("u", zero) + 1e-6).sqrt() / root * g
        s["u"] = 0.9 * s.get("u", zero) + 0.1 * move**2
        return move + (s["u"] + 1e-6).sqrt() / root * x
