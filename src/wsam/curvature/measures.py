"""Sharpness as papers define it: how much the loss rises in a neighbourhood of the weights.

All measures share one ball. With scaling `T = 1`, or `T = abs(w) + eta` for the adaptive ones, a
perturbation is `d = T u` and its size is `norm(u)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from wsam._format import json_safe
from wsam.curvature.batch import split_batch
from wsam.curvature.objective import LossFunction, Objective, ObjectiveOptions
from wsam.curvature.progress import Progress, Report

__all__ = ["Sharpness", "average_sharpness", "sharpness"]

LossAndGradient = Callable[[Tensor], tuple[float, Tensor]]


@dataclass(frozen=True)
class Sharpness:
    """A measured sharpness.

    Attributes:
        value: rise of the loss, `L(w + d) - L(w)`, over the worst or the average d.
        loss: L(w).
        radius: size of the perturbation (standard deviation for the average case).
        measure: "worst" or "average", with "adaptive" and "m=..." where they apply.
        steps: ascent steps, or pairs of random perturbations.
        standard_error: of an average; None for a worst case, which is a lower bound.
        info: what the loss was computed from.
    """

    value: float
    loss: float
    radius: float
    measure: str
    steps: int
    standard_error: float | None
    info: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return the result, fit for JSON: a number that is not finite becomes None."""
        found: dict[str, Any] = json_safe(asdict(self))
        return found


def sharpness(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    rho: float = 0.05,
    *,
    steps: int = 1,
    step_size: float | None = None,
    adaptive: bool = False,
    eta: float = 0.0,
    m: int | None = None,
    seed: int = 0,
    report: Report | None = None,
    **options: Unpack[ObjectiveOptions],
) -> Sharpness:
    """Worst-case sharpness, `max over norm(u) <= rho of L(w + T u) - L(w)`, by gradient ascent.

    One step is SAM's own: `u = rho T g / norm(T g)`. More steps climb by
    `u <- P(u + a T g / norm(T g))`, P the projection onto the ball, and keep the highest loss
    seen. Either is a lower bound of the maximum.

    Args:
        model: any module.
        loss_fn: mean loss of a batch.
        batches: a list or a loader.
        rho: radius of the ball.
        steps: ascent steps, one gradient of all batches each.
        step_size: a; default rho, so that the first step is SAM's and n steps find no less.
        adaptive: scale every weight's perturbation by that weight (ASAM).
        eta: added to `abs(w)` in the adaptive scaling.
        m: maximise for every m samples separately and take the mean (m-sharpness). Groups are cut
            from batches, so a batch should hold a multiple of m samples.
        seed: of the direction taken by further steps where the gradient vanishes.
        report: called with a `Progress` after every gradient.
        **options: mode, params, dtype, reduction, size, check: see `Objective`.

    Example:
        >>> model = nn.Linear(1, 1, bias=False).double()
        >>> _ = nn.init.constant_(model.weight, 1.0)
        >>> data = [(torch.ones(1, 1).double(), torch.zeros(1, 1).double())]
        >>> round(sharpness(model, nn.functional.mse_loss, data, rho=0.1).value, 9)
        0.21

    References: Foret et al., SAM, ICLR 2021 (one step, m-sharpness); Kwon et al., ASAM, ICML 2021
    (adaptive); Andriushchenko et al., A modern look at the relationship between sharpness and
    generalization, ICML 2023 (steps, adaptive).
    """
    _check(rho, steps, eta, "rho", "steps")
    if m is not None and m < 1:
        raise ValueError(f"m must be at least 1, got {m}")
    if step_size is not None and not step_size > 0:
        raise ValueError(f"step_size must be a positive number, got {step_size}")
    objective = Objective(model, loss_fn, batches, **options)
    weights = objective.weights()
    scale = _scaling(weights, adaptive, eta)
    step = rho if step_size is None else step_size
    generator = torch.Generator().manual_seed(seed)
    if m is not None:
        objective.read_again()  # parts of the data alone cannot show that all of it changed
    rise, loss, count = 0.0, 0.0, 0.0
    groups = 1 if m is None else math.ceil(objective.samples / m)
    counter = _Counter(groups * (steps + 1), report)
    for group, size in _groups(objective, m):
        evaluate = partial(_evaluate, objective, counter, group)
        start, highest = _ascend(evaluate, weights, scale, rho, steps, step, generator)
        rise, loss, count = rise + size * (highest - start), loss + size * start, count + size
    words = ["worst", *(["adaptive"] if adaptive else []), *([f"m={m}"] if m else [])]
    return Sharpness(
        value=rise / count,
        loss=loss / count,
        radius=rho,
        measure=" ".join(words),
        steps=steps,
        standard_error=None,
        info=objective.describe(),
    )


def average_sharpness(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    sigma: float = 0.01,
    *,
    samples: int = 16,
    adaptive: bool = False,
    eta: float = 0.0,
    seed: int = 0,
    report: Report | None = None,
    **options: Unpack[ObjectiveOptions],
) -> Sharpness:
    """Average-case sharpness, `E[L(w + sigma T z)] - L(w)` for z standard normal.

    Perturbations come in pairs d and -d, which leaves the mean as it is and removes the part of
    the spread that is linear in d.

    Args:
        model: any module.
        loss_fn: mean loss of a batch.
        batches: a list or a loader.
        sigma: standard deviation of every weight's perturbation; its norm is near
            `sigma * sqrt(number of weights)`.
        samples: pairs of perturbations, two losses of all batches each.
        adaptive: scale every weight's perturbation by that weight.
        eta: added to `abs(w)` in the adaptive scaling.
        seed: of the perturbations.
        report: called with a `Progress` after every pair.
        **options: mode, params, dtype, reduction, size, check: see `Objective`.

    Example:
        >>> model = nn.Linear(1, 1, bias=False).double()
        >>> data = [(torch.ones(1, 1).double(), torch.zeros(1, 1).double())]
        >>> found = average_sharpness(model, nn.functional.mse_loss, data, 0.1, samples=400)
        >>> abs(found.value - 0.01) < 4 * found.standard_error  # E[(w + s z)^2] - w^2 = s^2
        True

    References: Keskar et al., ICLR 2017 (the idea); Andriushchenko et al., ICML 2023 (this form).
    """
    _check(sigma, samples, eta, "sigma", "samples")
    objective = Objective(model, loss_fn, batches, **options)
    weights = objective.weights()
    scale = _scaling(weights, adaptive, eta) * sigma
    generator = torch.Generator().manual_seed(seed)
    rises: list[float] = []
    objective.read_again()
    for index in range(samples):
        noise = scale * _normal(weights, generator)
        pair = objective.mean_loss(weights + noise) + objective.mean_loss(weights - noise)
        rises.append(pair / 2 - objective.loss)
        if report is not None:
            report(Progress(index + 1, samples, math.nan))
    spread = torch.tensor(rises, dtype=torch.float64)
    return Sharpness(
        value=float(spread.mean()),
        loss=objective.loss,
        radius=sigma,
        measure="average adaptive" if adaptive else "average",
        steps=samples,
        standard_error=float(spread.std()) / math.sqrt(samples) if samples > 1 else None,
        info=objective.describe(),
    )


class _Counter:
    """How many gradients were taken, told to whoever follows."""

    def __init__(self, limit: int, report: Report | None) -> None:
        self.done = 0
        self.limit = limit
        self.report = report

    def add(self) -> None:
        """Count a gradient; uneven groups may take more of them than were expected."""
        self.done += 1
        if self.report is not None:
            self.report(Progress(self.done, max(self.limit, self.done), math.nan))


def _evaluate(
    objective: Objective, counter: _Counter, group: Iterable[Any] | None, at: Tensor
) -> tuple[float, Tensor]:
    """Return loss and gradient of a group of samples, or of all where it is None."""
    reading, gradient = objective.gradient(at, group)
    counter.add()
    if group is None and counter.done == 1:  # all batches, at the weights themselves
        objective.confirm(reading)
    return reading.loss, gradient


def _ascend(
    evaluate: LossAndGradient,
    weights: Tensor,
    scale: Tensor,
    rho: float,
    steps: int,
    step: float,
    generator: torch.Generator,
) -> tuple[float, float]:
    """Return the loss at the weights and the highest one on the way up."""
    start, gradient = evaluate(weights)
    offset = torch.zeros_like(weights)
    if steps == 1:
        ascent = scale * gradient
        if _norm(ascent) == 0:
            return start, start  # SAM does not move where the gradient vanishes
        return start, evaluate(weights + scale * _climbed(offset, ascent, step, rho))[0]
    highest = start
    for _ in range(steps):
        ascent = scale * gradient
        if _norm(ascent) == 0:
            ascent = _normal(weights, generator)
        offset = _climbed(offset, ascent, step, rho)
        loss, gradient = evaluate(weights + scale * offset)
        highest = max(highest, loss)
    return start, highest


def _climbed(offset: Tensor, direction: Tensor, step: float, rho: float) -> Tensor:
    """Go a step of the given length in a direction, and back onto the ball where that leaves it."""
    offset = offset + direction * (step / _norm(direction))
    length = _norm(offset)
    return offset * (rho / length) if length > rho else offset


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))


def _groups(objective: Objective, m: int | None) -> Iterator[tuple[Iterable[Any] | None, float]]:
    """Yield what is maximised together: everything, or every m samples."""
    if m is None:
        yield None, 1.0
        return
    for batch, _ in objective.stream():
        for group in split_batch(batch, m):
            yield [group], float(objective.size_of(group))


def _scaling(weights: Tensor, adaptive: bool, eta: float) -> Tensor:
    return weights.abs() + eta if adaptive else torch.ones_like(weights)


def _normal(weights: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(len(weights), generator=generator).to(weights)


def _check(radius: float, count: int, eta: float, radius_name: str, count_name: str) -> None:
    if not (radius > 0 and math.isfinite(radius)):
        raise ValueError(f"{radius_name} must be a positive number, got {radius}")
    if count < 1:
        raise ValueError(f"{count_name} must be at least 1, got {count}")
    if not (eta >= 0 and math.isfinite(eta)):
        raise ValueError(f"eta must be zero or positive, got {eta}")
