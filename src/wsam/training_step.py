"""`train_step`: one call for a whole training step, the same on every device."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wsam._core.pytree import map_tensors, structure_of, tensors_of
from wsam._core.validation import count, number
from wsam.optimizer import SharpnessAware

if TYPE_CHECKING:
    from wsam.accel.step_capture import StepCapture

LossFn = Callable[..., Any]


def train_step(
    optimizer: Optimizer,
    loss_fn: LossFn,
    *,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    micro_batches: int = 1,
    perturb_per_micro_batch: bool = False,
    gather_selected: bool = True,
    ascent_share: float = 1.0,
    capture: bool | Literal["auto"] = "auto",
) -> "TrainStep":
    """Return a function that makes one training step on a batch.

    A call runs both passes, forward and backward, clears gradients and updates the weights. It returns
    the loss at w and the outputs of the first pass.

    Args:
        optimizer: any method of this library, or a plain `torch.optim.Optimizer`. Options such as
            `max_norm`, `when` and `local` are those of the optimizer. Pass `model=` to it.
        loss_fn: a function of the batch. It returns the loss, or `(loss, outputs)`, or a dict with the
            key "loss", such as a model of Hugging Face returns it. It must not call `backward`. It
            runs twice a step; `optimizer.second_pass` is True in the second run.
        autocast: the dtype of mixed precision, `torch.bfloat16` or `torch.float16`; None for none.
        scaler: the GradScaler for float16. `train_step` scales, unscales, steps and updates it.
        micro_batches: split each tensor of the batch along its first dimension into so many parts, and
            accumulate their gradients. The result is that of the whole batch if the loss is a mean
            over samples: parts are weighted by their sizes. Other values are passed to each part.
        perturb_per_micro_batch: compute a perturbation for each micro-batch (m-sharpness) instead of
            one for the batch. Not with a GradScaler.
        gather_selected: where `loss_fn` calls `optimizer.select` (ESAM), run the second pass on the
            selected samples alone: a forward pass without gradients at w + d selects them. False runs
            it on all samples and averages the losses of the selected ones, which saves no time.
        ascent_share: compute the perturbation from this share of the batch, its first samples. Only
            for methods whose base receives g1 alone, such as SAM, and not with `micro_batches`, ESAM's
            selection or `NormAbove`. Steps that `when` does not choose use the whole batch. The loss
            and the outputs that are returned are those of the first pass, and `optimizer.sharpness`
            compares the loss of the whole batch with it.
        capture: "auto" records the step into a CUDA graph once a shape has occurred twice, if all
            parameters are on one CUDA device and nothing prevents it, and logs once what does. True
            raises an error instead. False makes eager steps. A graph does not repeat what `loss_fn`
            does on the host, such as counting, and reads only the batch and tensors that are
            modified in place.

    Returns:
        The step, `step(*batch) -> (loss, outputs)` or `step(**batch)`. The loss is a tensor on the
        device. Outputs are detached: None if `loss_fn` returns the loss alone, the whole dict if it
        returns one. Those of micro-batches are combined: tensors are concatenated along the first
        dimension; scalars are averaged, and summed if they are integers. Lists are combined entry by
        entry, so numbers in them are added up, too. Other objects are those of the first micro-batch.

    Raises:
        ValueError: With `capture=True`, the step cannot be captured. Or the outputs of micro-batches
            differ in structure.

    Example:
        >>> import wsam
        >>> model = torch.nn.Linear(2, 3)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = wsam.WSAM(base, rho=0.05, gamma=0.9, model=model)
        >>> def loss_fn(x, y):
        ...     logits = model(x)
        ...     return torch.nn.functional.cross_entropy(logits, y), logits
        >>> step = wsam.train_step(optimizer, loss_fn)
        >>> loss, logits = step(torch.ones(4, 2), torch.tensor([0, 1, 2, 0]))
    """
    return TrainStep(
        optimizer,
        loss_fn,
        autocast,
        scaler,
        micro_batches,
        perturb_per_micro_batch,
        gather_selected,
        ascent_share,
        capture,
    )


class MicroBatch(NamedTuple):
    """A micro-batch, and its share of the batch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    weight: float = 1.0

    def map(self, function: Callable[[Tensor], Tensor]) -> "MicroBatch":
        """Apply a function to each tensor."""
        args, kwargs = map_tensors(function, (self.args, self.kwargs))
        return self._replace(args=args, kwargs=kwargs)


@dataclass(eq=False)
class TrainStep:
    """A training step as a function of the batch; see `train_step`."""

    optimizer: Optimizer
    loss_fn: LossFn
    autocast: torch.dtype | None
    scaler: torch.amp.GradScaler | None
    micro_batches: int
    perturb_per_micro_batch: bool
    gather_selected: bool
    ascent_share: float
    capture: bool | Literal["auto"]

    def __post_init__(self) -> None:
        self._sharp = self.optimizer if isinstance(self.optimizer, SharpnessAware) else None
        self._scaler = self.scaler if self.scaler is not None and self.scaler.is_enabled() else None
        if isinstance(getattr(self.optimizer, "optimizer", None), SharpnessAware):
            name = type(self.optimizer).__name__
            raise TypeError(f"{name} is a framework's wrapper: use wsam.integrations")
        self._gathers = self.gather_selected and self._sharp is not None and self._sharp.keep < 1.0
        self._check_options()
        model = self._sharp.model if self._sharp is not None else None
        modules = model.modules() if model is not None and self.micro_batches > 1 else ()
        self._synchronized: list[Any] = [m for m in modules if _reduces(m)]
        self._step_capture = self._make_capture() if self.capture is True else None

    def _check_options(self) -> None:
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(f"train_step takes an optimizer first, got {self.optimizer!r}")
        if self.autocast is not None and not isinstance(self.autocast, torch.dtype):
            raise TypeError(
                f"autocast must be a dtype such as torch.bfloat16, got {self.autocast!r}"
            )
        count("micro_batches", self.micro_batches, 1)
        number("ascent_share", self.ascent_share, 0, 1, low_open=True, high_open=False)
        if self.perturb_per_micro_batch and self._scaler is not None:
            raise ValueError("perturb_per_micro_batch does not support a GradScaler: use bfloat16")
        if self.ascent_share == 1.0:
            return
        sharp = self._sharp
        if sharp is None or sharp.rule.keeps_g0 or not sharp.geometry.needs_g0:
            raise ValueError("ascent_share needs a method whose base receives g1 alone, as SAM")
        reads_norm = sharp.when is not None and sharp.when.needs_norm
        if reads_norm or self.micro_batches > 1 or self._gathers:
            raise ValueError(
                "ascent_share does not support micro_batches, ESAM's selection, or an interval that "
                "reads the gradient norm"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Make one step; return the loss at w and the outputs of the first pass, detached."""
        if self.capture is False or not self._is_on_cuda():
            return self._make_step(*args, **kwargs)
        if self._step_capture is None:
            self._step_capture = self._make_capture()
        return self._step_capture.run(args, kwargs)

    def _is_on_cuda(self) -> bool:
        groups = self.optimizer.param_groups
        return any(group["params"] and group["params"][0].is_cuda for group in groups)

    def _make_capture(self) -> "StepCapture":
        from wsam.accel.step_capture import StepCapture

        has_scaler, required = self._scaler is not None, self.capture is True
        return StepCapture(
            self.optimizer, self._make_step, has_scaler=has_scaler, required=required
        )

    def _make_step(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Make an eager step, which a CUDA graph may be recording."""
        parts = self._split(args, kwargs)
        outputs: dict[int, Any] = {}
        sharp = self._sharp
        perturbs_parts = sharp is not None and self.perturb_per_micro_batch and len(parts) > 1

        def run(index: int) -> Tensor:
            weight = parts[index].weight
            if perturbs_parts:
                weight = 1.0  # of the loss: `step` multiplies the gradients by the part's weight
            elif sharp is not None and len(parts) > 1:
                sharp._selection.share = weight
            loss, found = self._run(self._samples_of_pass(parts[index]), weight)
            if index not in outputs:  # of the first pass
                outputs[index] = map_tensors(_detach, found)
                if index:
                    _require_same_structure(outputs[index], outputs[0])
            return loss

        def run_all() -> Tensor:
            if sharp is None:
                self.optimizer.zero_grad()
            with self._without_reduction():
                found = [run(index) for index in range(len(parts) - 1)]
            found.append(run(len(parts) - 1))
            return sum(found[1:], found[0])

        if self._scaler is not None:
            loss = self._scaled_step(run_all, self._scaler)
        elif sharp is not None and perturbs_parts:
            closures = [lambda index=index: run(index) for index in range(len(parts))]
            loss = sharp.step(closures, weights=[part.weight for part in parts])
        else:
            loss = self.optimizer.step(run_all)  # type: ignore[arg-type, assignment]
        if len(parts) == 1:
            return loss.detach(), outputs[0]
        return loss.detach(), _combine([outputs[i] for i in range(len(parts))], parts)

    def _samples_of_pass(self, part: MicroBatch) -> MicroBatch:
        """Return the samples that this pass uses."""
        sharp = self._sharp
        if sharp is None:
            return part
        if self.ascent_share < 1.0 and not sharp._in_last_pass and sharp._may_perturb_next_step():
            size = _batch_size(part, "ascent_share")
            return part.map(_slicer(0, max(1, int(self.ascent_share * size + 1e-9))))
        if not (self._gathers and sharp.second_pass):
            return part
        with self._autocast_context():
            found = sharp._selection.choose(lambda: self.loss_fn(*part.args, **part.kwargs))
        if not found:  # loss_fn does not select
            return part
        selected, losses = found[0]
        if len(found) > 1 or losses != _batch_size(part, "gather_selected"):
            raise ValueError(
                "loss_fn does not call select once, with a loss for each sample of the batch: pass "
                "gather_selected=False"
            )
        return part.map(lambda x: x[selected] if x.dim() else x)

    def _run(self, part: MicroBatch, weight: float) -> tuple[Tensor, Any]:
        """Run a micro-batch forward and backward; return weight * loss, and the outputs."""
        with torch.enable_grad():
            capture = self._step_capture
            watch = nullcontext() if capture is None else capture.find_host_work()
            with self._autocast_context(), watch:
                result = self.loss_fn(*part.args, **part.kwargs)
            loss, outputs = _loss_and_outputs(result)
            loss = loss if weight == 1.0 else loss * weight
            scaled = loss if self._scaler is None else self._scaler.scale(loss)
            scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), outputs

    def _scaled_step(self, run_all: Callable[[], Tensor], scaler: torch.amp.GradScaler) -> Tensor:
        """Make a step with a GradScaler, which needs the passes one by one."""
        if self._sharp is None:
            loss: Tensor = run_all()
            scaler.step(self.optimizer)
            scaler.update()
            return loss
        optimizer = self._sharp
        optimizer._scale_is_checked = True  # the scaled gradients are unscaled here
        try:
            with torch.no_grad():
                loss, sharpness = optimizer._run_closure(run_all, scaler)
            optimizer.descend()
            scaler.step(optimizer)
        except BaseException:
            optimizer.abandon()
            state = scaler._per_optimizer_states.get(id(optimizer))
            if state and state["found_inf_per_device"]:  # after `unscale_`
                scaler.update()
            raise
        scaler.update()
        optimizer._sharpness = sharpness
        return loss

    def _autocast_context(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        params = (p for group in self.optimizer.param_groups for p in group["params"])
        return torch.autocast(next(params).device.type, self.autocast)

    @contextlib.contextmanager
    def _without_reduction(self) -> Iterator[None]:
        """Let backward passes accumulate gradients without reducing them over processes."""
        with contextlib.ExitStack() as contexts:
            for module in self._synchronized:
                if hasattr(module, "no_sync"):
                    contexts.enter_context(module.no_sync())
                else:
                    module.set_requires_gradient_sync(False)
                    contexts.callback(module.set_requires_gradient_sync, True)
            yield

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[MicroBatch]:
        whole = MicroBatch(args, kwargs)
        if self.micro_batches == 1:
            return [whole]
        size = _batch_size(whole, f"micro_batches={self.micro_batches}")
        pieces = min(self.micro_batches, size)
        bounds = pairwise(size * index // pieces for index in range(pieces + 1))
        return [whole.map(_slicer(a, b))._replace(weight=(b - a) / size) for a, b in bounds]


def _reduces(module: Any) -> bool:
    """Whether the module reduces gradients over processes, and can leave that out."""
    if hasattr(module, "require_backward_grad_sync"):  # DistributedDataParallel
        return not module.static_graph  # torch records it in the first backward pass
    return hasattr(module, "set_requires_gradient_sync")  # FSDP2


def _batch_size(part: MicroBatch, option: str) -> int:
    """Return the size of the first dimension of all tensors of a batch."""
    sizes = {len(tensor) for tensor in tensors_of((part.args, part.kwargs)) if tensor.dim()}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            f"{option} divides each tensor of the batch along its first dimension, which must have "
            f"the same size, at least 1, in all of them; found: {sorted(sizes)}"
        )
    return sizes.pop()


def _slicer(start: int, stop: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x[start:stop] if x.dim() else x


def _loss_and_outputs(result: Any) -> tuple[Tensor, Any]:
    """Return the loss, a scalar, and the outputs of what a loss function returned."""
    loss, outputs = result, None
    if isinstance(result, tuple) and len(result) == 2:
        loss, outputs = result
    elif isinstance(result, Mapping):  # a model of Hugging Face returns no loss without labels
        loss, outputs = result.get("loss"), result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = type(loss).__name__
        if isinstance(loss, Tensor):
            found = f"of shape {tuple(loss.shape)}"
        elif isinstance(loss, tuple):
            found = f"a tuple of {len(loss)}: write return loss, (a, b)"
        raise TypeError(
            "loss_fn must return the loss, a tensor of one element, or (loss, outputs), or a dict with "
            f'the key "loss"; its loss is {found}'
        )
    return loss.reshape(()), outputs


def _detach(output: Tensor) -> Tensor:
    """Detach an output; copy it if it is a parameter, which the step updates."""
    return output.detach().clone() if isinstance(output, nn.Parameter) else output.detach()


def _require_same_structure(outputs: Any, first: Any) -> None:
    """Raise if the outputs of a micro-batch cannot be combined with those of the first one."""
    if structure_of(outputs, _combination) != structure_of(first, _combination):
        raise ValueError(
            "the outputs of micro-batches differ in structure: return tensors whose first dimension "
            "is the batch"
        )


def _combine(outputs: list[Any], parts: list[MicroBatch]) -> Any:
    """Return the outputs of all micro-batches, which have the same structure, in one."""
    kinds = (Tensor, int, float)
    columns = zip(*(tensors_of(found, kinds) for found in outputs), strict=True)
    return map_tensors(lambda _: _join(next(columns), parts), outputs[0], kinds)


def _combination(value: Any) -> str:
    """Return how an output of several micro-batches is combined."""
    if isinstance(value, Tensor) and value.dim():
        return "concatenate"
    if isinstance(value, bool) or not isinstance(value, Tensor | int | float):
        return "first"
    is_float = value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, float)
    return "average" if is_float else "sum"


def _join(values: tuple[Any, ...], parts: list[MicroBatch]) -> Any:
    """Return one output of all micro-batches, given that of each."""
    how = _combination(values[0])
    if how == "first":
        return values[0]
    if how == "concatenate":
        return torch.cat(values)
    if how == "average":
        values = tuple(part.weight * x for part, x in zip(parts, values, strict=True))
    return sum(values)
