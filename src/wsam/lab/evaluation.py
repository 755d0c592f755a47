"""The figures of a split: mean loss, error and metric."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils._pytree import tree_map

from wsam._utils.batches import count_samples, move_batch
from wsam.lab import metrics
from wsam.lab.data.feed import Batch
from wsam.lab.errors import explain
from wsam.lab.metrics import Metric, count_correct, loss_sum
from wsam.lab.problem import Problem
from wsam.lab.step import forward


@torch.no_grad()
def evaluate(
    problem: Problem, batches: Iterable[Batch], precision: str, device: torch.device
) -> dict[str, float]:
    """Return the figures of a split.

    Returns:
        ``loss``, its mean over the samples; ``error`` in percent if the model classifies; and the
        metric by its name.
    """
    model, metric = problem.model, problem.metric
    loss, correct, predictions = torch.zeros(3, dtype=torch.float64, device=device)
    samples = 0
    kept: list[Batch] = []
    model.eval()
    for inputs, targets in batches:
        output = forward(model, inputs, precision, device)
        count = count_samples(targets)
        loss += loss_sum(problem.loss, output, targets, count)
        samples += count
        if problem.classifies:
            found, used = count_correct(output, targets)
            correct += found
            predictions += used
        if metric.function is not None:
            kept.append(move_batch((output, targets), torch.device("cpu")))
    model.train()
    total_loss, total_correct, total = torch.stack((loss, correct, predictions)).tolist()
    figures = {"loss": total_loss / samples}
    if problem.classifies:
        figures["error"] = 100 * (1 - total_correct / total)
    if metric == metrics.ACCURACY:
        figures["accuracy"] = 100 * (total_correct / total)
    if metric.function is not None:
        figures[metric.column] = _apply(metric, kept, problem.feed.units)
    return figures


def _apply(metric: Metric, batches: list[Batch], units: tuple[float, float] | None) -> float:
    """Return a metric of all outputs and targets of a split, in the original unit of the targets."""
    outputs, targets = tree_map(lambda *parts: torch.cat(parts), *batches)
    if units is not None:
        mean, std = units  # float32 has too few digits if the mean is large, as that of times
        outputs, targets = (part.double() * std + mean for part in (outputs, targets))
    with explain(f"the metric {metric.name}"):
        return metric(outputs, targets)
