"""Sharpness measures: how much the loss increases in a neighborhood of the weights.

All measures use the same neighborhood. A perturbation is `d = T u` with scaling `T = 1`, or
`T = abs(w) + eta` for the adaptive measures, and its size is `norm(u)`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from wsam._core.validation import count, number
from wsam._utils.batches import split_batch
from wsam._utils.text import json_safe
from wsam.curvature.objective import LossFunction, Objective, ObjectiveOptions
from wsam.curvature.progress import Progress, ProgressCallback
from wsam.curvature.random_vectors import normal

LossAndGradient = Callable[[Tensor], tuple[float, Tensor]]


@dataclass(frozen=True)
class Sharpness:
    """A sharpness measure.

    Attributes:
        value: Increase of the loss, `L(w + d) - L(w)`, for the worst or the average d.
        loss: L(w).
        radius: Size of the perturbation; its standard deviation for the average case.
        measure: "worst" or "average", with "adaptive" and "m=..." if they apply.
        steps: Number of ascent steps, or of pairs of random perturbations.
        standard_error: Of an average. None for a worst case, which is a lower bound.
        info: Data, mode and precision of the loss.
    """

    value: float
    loss: float
    radius: float
    measure: str
    steps: int
    standard_error: float | None
    info: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary for JSON; numbers that are not finite become None."""
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
    report: ProgressCallback | None = None,
    **options: Unpack[ObjectiveOptions],
) -> Sharpness:
    """Return the worst-case sharpness, by gradient ascent.

    Equation, with the projection P onto the ball of radius rho and gradients g at w + T u::

        S = max over norm(u) <= rho of  L(w + T u) - L(w)
        one step:    u = rho T g / norm(T g)
        more steps:  u <- P(u + a T g / norm(T g))

    One step is SAM's perturbation. More steps keep the highest loss of the ascent. Both are lower
    bounds of the maximum.

    Args:
        model: Any module.
        loss_fn: Mean loss of a batch.
        batches: A list or a loader.
        rho: Radius of the ball.
        steps: Number of ascent steps, one gradient over all batches each.
        step_size: a. Default: rho, so that the first step is SAM's and more steps find at least as
            much.
        adaptive: Scale the perturbation of every weight by its absolute value (ASAM).
        eta: Added to `abs(w)` in the adaptive scaling.
        m: Maximize for every m samples separately and return the mean (m-sharpness). Groups are
            parts of batches, so the batch size should be a multiple of m.
        seed: Seed of the random direction used if the gradient vanishes and steps > 1.
        report: Called with a `Progress` after every gradient.
        **options: mode, params, dtype, reduction, size and check of `Objective`.

    Returns:
        The sharpness and the loss at w.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> model = nn.Linear(1, 1, bias=False).double()
        >>> _ = nn.init.constant_(model.weight, 1.0)
        >>> data = [(torch.ones(1, 1).double(), torch.zeros(1, 1).double())]
        >>> round(sharpness(model, nn.functional.mse_loss, data, rho=0.1).value, 9)
        0.21

    References:
        Foret et al., Sharpness-aware minimization, ICLR 2021 (one step, m-sharpness).

        Kwon et al., ASAM, ICML 2021 (adaptive).

        Andriushchenko et al., A modern look at the relationship between sharpness and
        generalization, ICML 2023 (several steps, adaptive).
    """
    number("rho", rho, low_open=True)
    number("eta", eta)
    count("steps", steps, 1)
    step = number("step_size", rho if step_size is None else step_size, low_open=True)
    if m is not None:
        count("m", m, 1)
    objective = Objective(model, loss_fn, batches, **options)
    weights = objective.weights()
    scale = _scaling(weights, adaptive, eta)
    generator = torch.Generator().manual_seed(seed)
    if m is not None:
        objective.read_again()  # gradients of groups cannot show that the whole data changed
    increase, loss, total = 0.0, 0.0, 0.0
    groups = 1 if m is None else math.ceil(objective.samples / m)
    gradients = itertools.count(1)

    def evaluate(group: Iterable[Any] | None, at: Tensor) -> tuple[float, Tensor]:
        summary, gradient = objective.gradient(at, group)
        if report is not None:  # groups of unequal size may need more gradients than planned
            done = next(gradients)
            report(Progress(done, max(groups * (steps + 1), done), math.nan))
        objective.confirm(summary)  # compares the first gradient only: all batches, at w
        return summary.loss, gradient

    for group, size in _groups(objective, m):
        ascent = partial(evaluate, group)
        start, highest = _ascend(ascent, weights, scale, rho, steps, step, generator)
        increase += size * (highest - start)
        loss, total = loss + size * start, total + size
    words = ["worst", *(["adaptive"] if adaptive else []), *([f"m={m}"] if m else [])]
    return Sharpness(
        value=increase / total,
        loss=loss / total,
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
    report: ProgressCallback | None = None,
    **options: Unpack[ObjectiveOptions],
) -> Sharpness:
    """Return the average-case sharpness under Gaussian perturbations.

    Equation, for z standard normal::

        S = E[L(w + sigma T z)] - L(w)

    Perturbations are used in pairs d and -d, which does not change the mean and removes the part of
    the variance that is linear in d.

    Args:
        model: Any module.
        loss_fn: Mean loss of a batch.
        batches: A list or a loader.
        sigma: Standard deviation of the perturbation of every weight; the norm of the perturbation
            is about `sigma * sqrt(number of weights)`.
        samples: Number of pairs of perturbations, two losses over all batches each.
        adaptive: Scale the perturbation of every weight by its absolute value.
        eta: Added to `abs(w)` in the adaptive scaling.
        seed: Seed of the perturbations.
        report: Called with a `Progress` after every pair.
        **options: mode, params, dtype, reduction, size and check of `Objective`.

    Returns:
        The sharpness, its standard error and the loss at w.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> model = nn.Linear(1, 1, bias=False).double()
        >>> data = [(torch.ones(1, 1).double(), torch.zeros(1, 1).double())]
        >>> found = average_sharpness(model, nn.functional.mse_loss, data, 0.1, samples=400)
        >>> abs(found.value - 0.01) < 4 * found.standard_error  # E[(w + s z)^2] - w^2 = s^2
        True

    References:
        Keskar et al., On large-batch training for deep learning, ICLR 2017 (the idea).

        Andriushchenko et al., A modern look at the relationship between sharpness and
        generalization, ICML 2023 (this form).
    """
    number("sigma", sigma, low_open=True)
    number("eta", eta)
    count("samples", samples, 1)
    objective = Objective(model, loss_fn, batches, **options)
    weights = objective.weights()
    scale = _scaling(weights, adaptive, eta) * sigma
    generator = torch.Generator().manual_seed(seed)
    increases: list[float] = []
    objective.read_again()
    for index in range(samples):
        noise = scale * _normal(weights, generator)
        pair = objective.mean_loss(weights + noise) + objective.mean_loss(weights - noise)
        increases.append(pair / 2 - objective.loss)
        if report is not None:
            report(Progress(index + 1, samples, math.nan))
    values = torch.tensor(increases, dtype=torch.float64, device="cpu")
    return Sharpness(
        value=float(values.mean()),
        loss=objective.loss,
        radius=sigma,
        measure="average adaptive" if adaptive else "average",
        steps=samples,
        standard_error=float(values.std()) / math.sqrt(samples) if samples > 1 else None,
        info=objective.describe(),
    )


def _ascend(
    evaluate: LossAndGradient,
    weights: Tensor,
    scale: Tensor,
    rho: float,
    steps: int,
    step: float,
    generator: torch.Generator,
) -> tuple[float, float]:
    """Return the loss at the weights and the highest loss of the ascent."""
    start, gradient = evaluate(weights)
    offset = torch.zeros_like(weights)
    if steps == 1:
        ascent = scale * gradient
        if _norm(ascent) == 0:
            return start, start  # as SAM, which does not move if the gradient vanishes
        return start, evaluate(weights + scale * _projected_step(offset, ascent, step, rho))[0]
    highest = start
    for _ in range(steps):
        ascent = scale * gradient
        if _norm(ascent) == 0:
            ascent = _normal(weights, generator)
        offset = _projected_step(offset, ascent, step, rho)
        loss, gradient = evaluate(weights + scale * offset)
        highest = max(highest, loss)
    return start, highest


def _projected_step(offset: Tensor, direction: Tensor, step: float, rho: float) -> Tensor:
    """Move by `step` along a direction and project onto the ball of radius `rho`."""
    offset = offset + direction * (step / _norm(direction))
    length = _norm(offset)
    return offset * (rho / length) if length > rho else offset


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))


def _groups(objective: Objective, m: int | None) -> Iterator[tuple[Iterable[Any] | None, float]]:
    """Yield the groups to maximize separately, with their sizes; None means all samples."""
    if m is None:
        yield None, 1.0
        return
    for batch, _ in objective.stream():
        for group in split_batch(batch, m):
            yield [group], float(objective.size_of(group))


def _scaling(weights: Tensor, adaptive: bool, eta: float) -> Tensor:
    return weights.abs() + eta if adaptive else torch.ones_like(weights)


def _normal(weights: Tensor, generator: torch.Generator) -> Tensor:
    return normal(weights.shape, generator).to(weights)
