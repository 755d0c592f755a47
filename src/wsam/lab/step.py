"""Optimizer, training step (eager or captured) and evaluation of a run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from wsam.curvature.batches import batch_size as count_samples
from wsam.curvature.batches import move_batch
from wsam.lab import metrics, settings
from wsam.lab.data_feed import Batch
from wsam.lab.metrics import Loss, Metric, cross_entropy, format_shape, is_used, loss_sum
from wsam.lab.problem import Problem
from wsam.lab.run import Run
from wsam.lab.user_code import (
    RAISED,
    RunError,
    UserCodeError,
    describe,
    explain,
    is_code,
    is_out_of_memory,
    is_own,
    is_user_code,
    source_file,
)

if TYPE_CHECKING:
    from wsam.geometry import Geometry
    from wsam.rule import Reuse
    from wsam.schedule import Interval


WARMUP_SHARE = 0.05
"""Share of the steps in which ``warmup-cosine`` raises the learning rate."""


def make_optimizer(run: Run, model: nn.Module, steps: int = 1) -> torch.optim.Optimizer:
    """Return the base optimizer, wrapped in the method unless the run is vanilla.

    Args:
        run: Has the method and the base optimizer.
        model: The model. Frozen parameters are left out.
        steps: Steps of the whole run.

    Raises:
        ValueError: A hyperparameter is out of range, or the method is the user's own and raises.
    """
    base_class = getattr(torch.optim, settings.BASE_CLASSES[run.base])
    trained = [p for p in model.parameters() if p.requires_grad]
    base = cast(torch.optim.Optimizer, base_class(trained, **run.base_args))
    if run.method == settings.VANILLA:
        return base
    method = settings.method_class(run.method)
    options: dict[str, Any] = dict(run.options)
    passed: dict[str, Any] = {
        name: options[name] for name in ("lean", "max_norm", "precondition") if name in options
    }
    arguments: dict[str, Any] = {**_with_schedules(run, steps), **passed, "model": model}
    if (when := _interval(run, steps)) is not None:
        arguments["when"] = when
    if settings.accepts(run.method, "precondition"):
        arguments.setdefault("precondition", False)
    if options.get("reuse"):
        arguments["reuse"] = _reuse(options)
    if run.geometry is not None:
        arguments["geometry"] = _make_geometry(run, model)
    arguments |= _seed_argument(method, run.seed)
    if not is_code(run.method):
        return method(base, **arguments)
    return _make_own(run.method, method, base, arguments)


def _make_own(
    name: str, method: Any, base: torch.optim.Optimizer, arguments: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return an optimizer of the user's own class."""
    parameters = inspect.signature(method).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for argument in arguments:
            if argument not in parameters:
                raise UserCodeError(
                    f"{name} does not take {argument!r}: add {argument} to its keyword-only arguments "
                    "and pass it to wsam.SharpnessAware"
                )
    with explain(name, source_file(name)):
        return cast(torch.optim.Optimizer, method(base, **arguments))


def _with_schedules(run: Run, steps: int) -> dict[str, Any]:
    """Return the hyperparameters of a method; those that change over the steps as schedules."""
    from wsam.schedule import FollowLR, Warmup

    hyper: dict[str, Any] = dict(run.hyper)
    for name in ("rho", "gamma"):
        if share := run.options.get(f"{name}_warmup"):
            hyper[name] = Warmup(hyper[name], max(1, round(cast(float, share) * steps)))
    if run.options.get("rho_follows_lr"):
        hyper["rho"] = FollowLR(hyper["rho"], 0.0, lr_high=cast(float, run.base_args["lr"]))
    return hyper


def _interval(run: Run, steps: int) -> Interval | None:
    """Return which steps have two passes; None for the method's own choice."""
    from wsam.schedule import Every, NormAbove

    options: dict[str, Any] = dict(run.options)
    if (factor := options.get("threshold")) is not None:
        return NormAbove(factor, final=-factor, steps=steps)
    start = round(options.get("start", 0.0) * steps)
    every = run.hyper["n"] if "n" in run.hyper else options.get("every", 1)  # LookSAM has n
    return Every(cast(int, every), start) if start or "every" in options else None


def _reuse(options: dict[str, Any]) -> Reuse:
    from wsam.rule import Reuse

    return Reuse(
        scale_by_norm=options.get("reuse_scaled", False),
        average=options.get("reuse_average", 0.0),
        weight=options.get("reuse_weight", 1.0),
    )


def can_capture(run: Run) -> bool:
    """Return whether the steps of a run can be captured.

    They cannot if gradient norms choose the steps with two passes. A method of the user's own may do
    work on the host, which a captured step does not repeat.
    """
    return run.options.get("threshold") is None and not is_code(run.method)


def _make_geometry(run: Run, model: nn.Module) -> Geometry:
    arguments: dict[str, Any] = dict(run.geometry or {})
    name = arguments.pop("name")
    geometry = settings.geometry_classes()[name]
    if name != "norm-layers":
        return geometry(**arguments, **_seed_argument(geometry, run.seed))
    from wsam.geometry import Only

    found = Only.layers(model)
    if not any(model.get_parameter(name).requires_grad for name in found.names):
        raise RunError(
            f"the geometry norm-layers perturbs normalization layers, and {run.model} trains none: "
            "use another model or geometry"
        )
    return found


def _seed_argument(function: Callable[..., object], seed: int) -> dict[str, int]:
    """Return ``{"seed": seed}`` if the function has such a parameter."""
    has_seed = settings.SEED in inspect.signature(function).parameters
    return {settings.SEED: seed} if has_seed else {}


@contextmanager
def cudnn_settings(device: torch.device) -> Iterator[None]:
    """On CUDA, enable cuDNN's algorithm search, and use torch's attention instead of cuDNN's.

    The search pays, since shapes are constant during a run. The backward pass of cuDNN's attention can
    return NaN for some sequence lengths: https://github.com/pytorch/pytorch/issues/196678.
    """
    if device.type != "cuda":
        yield
        return
    benchmark = torch.backends.cudnn.benchmark
    attention = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        torch.backends.cuda.enable_cudnn_sdp(attention)


def learning_rate(run: Run, step: int, steps: int) -> float:
    """Return the learning rate of a step: ``lr * (1 + cos(pi * step/steps)) / 2`` for cosine.

    ``warmup-cosine`` rises linearly to lr first, and is the cosine over the steps that remain.

    Args:
        run: Has the schedule and the initial learning rate.
        step: From 0.
        steps: Steps of the whole run.
    """
    initial = cast(float, run.base_args["lr"])
    if run.schedule == "constant":
        return initial
    if run.schedule == "warmup-cosine":
        first = max(1, round(WARMUP_SHARE * steps))
        if step < first:
            return initial * (step + 1) / first
        step, steps = step - first, max(1, steps - first)
    return initial * (1 + math.cos(math.pi * step / steps)) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of all groups; a tensor, as read by a CUDA graph, is set in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


class Objective:
    """The loss of a batch; counts predictions at w without a device synchronization.

    A step may compute the loss twice; only the first call after `begin` is at w and counted. A
    captured step calls this during capture only, and replays the writes to `counts`, so that tensor
    is never replaced.

    Args:
        model: The model, compiled or not.
        select: Reduces per-sample losses: the mean, or the optimizer's sample selection.
        precision: ``bf16`` or ``fp32``.
        device: The training device.
        loss: Compares outputs and targets.
        classifies: Count predictions; otherwise none are counted.
    """

    def __init__(
        self,
        model: Callable[[Any], Any],
        select: Callable[[Tensor], Tensor],
        precision: str,
        device: torch.device,
        loss: Loss = cross_entropy,
        classifies: bool = True,
    ) -> None:
        self.model, self.select = model, select
        self.precision, self.device = precision, device
        self.loss, self.classifies = loss, classifies
        self.counts = torch.zeros(2, device=device)
        """Correct predictions, and all of them."""
        self._first_pass = True

    def begin(self) -> None:
        """Begin a step: the next call counts predictions."""
        self._first_pass = True

    def __call__(self, inputs: Any, targets: Any) -> Tensor:
        """Return the loss."""
        output = forward(self.model, inputs, self.precision, self.device)
        if self._first_pass:
            self._first_pass = False
            if self.classifies:
                with torch.no_grad():
                    self.counts[0].copy_((output.argmax(1) == targets).sum())
                    self.counts[1].copy_(is_used(targets).sum())
        loss = self.loss(output, targets)
        return self.select(loss) if loss.dim() else loss


def forward(model: Callable[[Any], Any], inputs: Any, precision: str, device: torch.device) -> Any:
    """Return the model's output in float32; the model runs in the given precision."""
    # Each weight is used once per pass, so the autocast cache would not help, and a CUDA graph must
    # not capture its tensors.
    with torch.autocast(
        device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
    ):
        output = model(inputs)
        return output.float() if isinstance(output, Tensor) else move_batch(output, device)


def check_forward(run: Run, model: nn.Module, inputs: Any, device: torch.device) -> Any:
    """Run a forward pass in training mode and leave the model and generators unchanged.

    Third-party models often do not declare which inputs they accept. This check refuses an
    unsuitable one before the run creates any files.

    Args:
        run: Has the names of model and data, and the precision.
        model: On the device.
        inputs: A small batch.
        device: The training device.

    Returns:
        The output.

    Raises:
        ValueError: The forward pass fails.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            return forward(
                lambda x: functional_call(model, buffers, (x,)), inputs, run.precision, device
            )
    except RAISED as error:
        if is_out_of_memory(error):
            raise  # does not mean that the inputs are unsuitable
        images = isinstance(inputs, Tensor) and inputs.dim() == 4
        shape = " x ".join(map(str, inputs.shape)) if images else format_shape(inputs)
        what = "images" if images else "inputs"
        raise UserCodeError(
            f"{run.model} does not accept the {what} of {run.data} ({shape}): "
            f"{describe(error) if is_user_code(run.model) and is_own(error) else _reason(error)}"
        ) from error


def check_metric(run: Run, problem: Problem, output: Any, targets: Any) -> None:
    """Compare the metric with the output and the targets of a small batch.

    Raises:
        ValueError: The metric needs classes and the targets are numbers, or the reverse.
    """
    name = problem.metric.name
    shapes = f"got outputs of {format_shape(output)} and targets of {format_shape(targets)}"
    if problem.metric in metrics.OF_CLASSES:
        fits = isinstance(targets, Tensor) and not targets.is_floating_point()
        if not fits or problem.loss is metrics.squared_error:
            raise RunError(
                f"the metric {name} needs classes, but the targets of {run.data} are "
                f"{'numbers' if isinstance(targets, Tensor) else format_shape(targets)}: use mse or "
                "loss, or a metric of your own"
            )
        scored = isinstance(output, Tensor) and output.dim() > 1
        if not problem.classifies and not (scored and output.argmax(1).shape == targets.shape):
            raise RunError(f"the metric {name} needs one score per class in dim 1, {shapes}")
    if problem.metric == metrics.MSE and problem.loss is not metrics.squared_error:
        if problem.loss is cross_entropy:
            raise RunError(
                f"the metric mse needs numbers, but the targets of {run.data} are classes: use "
                "error, accuracy, macro-f1 or loss, or a metric of your own"
            )
        tensors = isinstance(output, Tensor) and isinstance(targets, Tensor)
        if not tensors or output.numel() != targets.numel():
            raise RunError(f"the metric mse needs one output for each number, {shapes}")


def check_loss(run: Run, problem: Problem, output: Any, targets: Any) -> None:
    """Compute the loss of a small batch.

    Raises:
        ValueError: The output does not fit the targets, or the loss is not a tensor of one value or
            of one per sample.
    """
    name = getattr(problem.loss, "__name__", type(problem.loss).__name__)
    what = (
        f"the output of {run.model}, {format_shape(output)}, does not fit {name} with the targets "
        f"of {run.data}, {format_shape(targets)}"
    )
    try:
        with torch.no_grad():
            value = problem.loss(output, targets)
            if problem.classifies and output.argmax(1).shape != targets.shape:
                raise ValueError("there must be one score per class in dim 1")
    except RAISED as error:
        if is_own(error):
            what = (
                f"{name} raised {describe(error)} for the output of {run.model}, "
                f"{format_shape(output)}, and the targets of {run.data}, {format_shape(targets)}"
            )
            raise UserCodeError(what) from error
        raise UserCodeError(f"{what}: {_reason(error)}") from error
    count = count_samples(targets)
    if not isinstance(value, Tensor) or value.shape not in ((), (count,)):
        raise UserCodeError(
            f"{name} must return one value per sample or their mean, got {format_shape(value)} for "
            f"{count} samples"
        )
    if run.method == "esam" and value.dim() == 0:
        raise UserCodeError(
            f"esam selects samples by their loss: {name} must return one value per sample, got a "
            "single one; use reduction='none'"
        )


def _reason(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


@dataclass
class EpochTotals:
    """Sums over the steps of an epoch, on the device."""

    loss: Tensor
    sharpness: Tensor
    measured: Tensor
    """Steps with two passes, which measure the sharpness."""
    counts: Tensor
    """Correct predictions, and all of them."""
    steps: int = 0

    @classmethod
    def zeros(cls, device: torch.device) -> EpochTotals:
        """Return sums over no steps."""
        sums = torch.zeros(5, dtype=torch.float64, device=device)
        return cls(sums[0], sums[1], sums[2], sums[3:])

    def means(self) -> tuple[float, float, float]:
        """Return mean loss, error in percent and mean sharpness; synchronizes with the device."""
        sums = torch.stack((self.loss, self.sharpness, self.measured, *self.counts)).tolist()
        loss, sharpness, measured, correct, predictions = sums
        return (
            loss / max(self.steps, 1),
            100 * (1 - correct / max(predictions, 1)),
            sharpness / measured if measured else math.nan,
        )


class Stepper:
    """Makes training steps and sums their metrics, without device synchronizations.

    Args:
        optimizer: A `wsam.SharpnessAware` or a plain optimizer.
        objective: Computes the loss of a batch.
        capture: Replay the whole step from a CUDA graph.
        options: Of the run. ``gather`` and ``ascent_share`` are those of `wsam.train_step`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        capture: bool,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.optimizer, self.objective, self.capture = optimizer, objective, capture
        self.sharpness_aware = hasattr(optimizer, "sharpness")
        self._made_step: Callable[..., Tensor] | None = None  # captured, or on parts of the batch
        options = options or {}
        ascent_share = options.get("ascent_share", 1.0)
        if options.get("gather") or ascent_share < 1.0:
            self._made_step = self._step_on_parts(ascent_share)
        self.totals = EpochTotals.zeros(objective.device)

    def reset_totals(self) -> None:
        """Begin the sums of a new epoch."""
        self.totals = EpochTotals.zeros(self.objective.device)

    def __call__(self, inputs: Any, targets: Any) -> None:
        """Make one step."""
        self.objective.begin()
        loss = self._step(inputs, targets)
        totals = self.totals
        totals.loss += loss.detach()
        totals.counts += self.objective.counts
        if self.sharpness_aware:
            sharpness = cast(Tensor, self.optimizer.sharpness)  # type: ignore[attr-defined]
            one_pass = sharpness.isnan()
            totals.sharpness += sharpness.masked_fill(one_pass, 0.0)
            totals.measured += ~one_pass
        totals.steps += 1

    def _step_on_parts(self, ascent_share: float) -> Callable[..., Tensor]:
        """Return a step whose passes may use parts of the batch."""
        from wsam.training_step import train_step

        step = train_step(
            self.optimizer,
            self.objective,
            ascent_share=ascent_share,
            capture=self.capture,
        )
        return lambda inputs, targets: step(inputs, targets)[0]

    def _step(self, inputs: Any, targets: Any) -> Tensor:
        if self.capture and self._made_step is None:
            from wsam.accel.cuda_graph import capture

            self._made_step = capture(self.optimizer, self.objective, inputs, targets)
        if self._made_step is not None:
            return self._made_step(inputs, targets)

        def closure() -> Tensor:
            loss = self.objective(inputs, targets)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        if self.sharpness_aware:
            return cast(Tensor, self.optimizer.step(closure))  # type: ignore[arg-type]
        self.optimizer.zero_grad()
        loss = closure()
        self.optimizer.step()
        return loss


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
            correct += (output.argmax(1) == targets).sum()
            predictions += is_used(targets).sum()
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
    outputs, targets = (concatenate([batch[part] for batch in batches]) for part in (0, 1))
    if units is not None:
        mean, std = units  # float32 has too few digits if the mean is large, as that of times
        outputs, targets = (part.double() * std + mean for part in (outputs, targets))
    with explain(f"the metric {metric.name}"):
        return metric(outputs, targets)


def concatenate(parts: list[Any]) -> Any:
    """Join batches of tensors, or of tuples and mappings of tensors, along their first dimension."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, dict):
        return {name: concatenate([part[name] for part in parts]) for name in first}
    return tuple(concatenate(list(items)) for items in zip(*parts, strict=True))
