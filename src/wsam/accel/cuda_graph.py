"""A whole step (both passes, perturbation, base update, decoupled term) as one CUDA graph.

At small batch sizes a two-pass step is bound by kernel launches. A CUDA graph records all launches of
a step once and replays them by a single one. Learning rate, rho, gamma and alpha are device tensors in
a recording, so they can change without a new one; so can momentum, betas and weight decay where a
fused kernel makes the base's step. Everything else that is read on the host, such as shapes, is part
of the recording's key: a new value leads to a new recording.

`wsam.train_step` and `wsam.capture` use it. The first calls run eagerly. They are real steps, which
also warm up libraries and allocate the base's state.
"""

import contextlib
import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from wsam._core.param_groups import STEP
from wsam._core.pytree import map_tensors
from wsam._core.step import KEPT
from wsam._core.validation import warn
from wsam.accel.base_optimizers import BASES
from wsam.accel.graph_inputs import GraphMask, GraphRng, GraphScalars, replaced, sharpness_aware
from wsam.accel.triton_backend import TritonBackend, kernels_work_on, triton_is_installed
from wsam.geometry import Geometry, Masked
from wsam.schedule import Between

if TYPE_CHECKING:
    from wsam.optimizer import SharpnessAware

NEVER = Between(0, 0)
EAGER_CALLS = 2
RECORDINGS = 32
"""How many recordings are kept."""
CONSTANTS = (int, float, str, bytes, type(None), torch.dtype, torch.device)
"""Types of values in a batch that may be constants of a recording."""
MakeStep = Callable[..., tuple[Tensor, Any]]
"""Makes an eager step on a batch; returns the loss at w and the outputs, detached."""


def capture(
    opt: Optimizer,
    loss_fn: Callable[..., Tensor],
    *example_batch: Tensor,
    fuse: bool | None = None,
) -> "CapturedStep":
    """Return `step(*batch) -> loss`, which replays a recorded step.

    `wsam.train_step` does the same with fewer restrictions, and on every device.

    Args:
        opt: any method over a base that torch can capture, or a plain optimizer.
        loss_fn: a function of a batch that returns the loss. It must not call backward.
        *example_batch: tensors like those of the training batches. Another shape leads to another
            recording; the 32 used last are kept.
        fuse: use fused Triton kernels where possible. By default if Triton is installed, as it is with
            torch for CUDA on Linux.

    Returns:
        The step. It returns the loss at w and sets `opt.sharpness`. Schedulers and step hooks work.

    Example:
        >>> step = capture(opt, lambda x, y: cross_entropy(model(x), y), x, y)  # doctest: +SKIP
        >>> loss = step(x, y)                                                   # doctest: +SKIP
    """
    return CapturedStep(opt, loss_fn, example_batch, fuse)


class CapturedStep:
    """A step that is recorded once for each shape and setting, and then replayed."""

    def __init__(
        self,
        opt: Optimizer,
        loss_fn: Callable[..., Tensor],
        example: tuple[Any, ...],
        fuse: bool | None = None,
    ) -> None:
        self._opt, self._loss_fn = opt, loss_fn
        self._graph = GraphedStep(opt, self._make_step, fuse)
        if not all(isinstance(x, Tensor) for x in example) or not example:
            raise TypeError("capture takes the tensors of an example batch")

    def __call__(self, *batch: Tensor) -> Tensor:
        """Make one step on `batch` and return the loss at w."""
        return self._graph.run(*flatten_batch(batch, {}))[0]

    def _make_step(self, *batch: Tensor) -> tuple[Tensor, None]:
        def closure() -> Tensor:
            if sharpness_aware(self._opt) is None:
                self._opt.zero_grad(set_to_none=True)
            loss = self._loss_fn(*batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        loss: Any = self._opt.step(closure)  # type: ignore[arg-type]
        return loss.detach(), None


def flatten_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return the leaves of a batch, and its structure; None for a sequence of tensors."""
    if not kwargs and all(isinstance(x, Tensor) for x in args):
        return list(args), None
    return tree_flatten((args, kwargs))


@dataclass
class Result:
    """What a step computes. In a recording, its tensors are overwritten by each replay."""

    losses: Tensor
    """L(w) and the sharpness."""
    outputs: Any


@dataclass
class Recording:
    """A recorded graph with the tensors that it reads and writes."""

    inputs: list[Any]
    """The leaves of a batch."""
    structure: Any
    state: object
    calls: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    result: Result | None = None
    backend: TritonBackend | None = None
    base_numbers: tuple[Any, ...] | None = None
    """The base's numbers, if they are constants of the graph because the base stepped by itself."""
    kept_alive: list[Any] = field(default_factory=list)
    """Memory that the graph uses and that has no other owner."""


class GraphedStep:
    """Records a step once for each shape and setting, and then replays it.

    Args:
        opt: a sharpness-aware or a plain optimizer.
        make_step: makes an eager step, which is recorded.
        fuse: use fused Triton kernels where possible; None if Triton is installed.

    Raises:
        ValueError: The optimizer cannot be captured.
    """

    def __init__(self, opt: Optimizer, make_step: MakeStep, fuse: bool | None = None) -> None:
        if fuse and not triton_is_installed():
            raise ValueError("fuse=True needs Triton, which is not installed")
        self.opt = opt
        self.sharp = sharpness_aware(opt)
        self.is_last_eager_call = False
        """Whether a step is made eagerly for the last time before it is recorded."""
        self._make_step = make_step
        self._device = check_optimizer(opt)
        if self.sharp is not None:
            self.sharp._refresh_blocks()  # parameters may have moved to the device just now
        self._fuse = kernels_work_on(self._device) if fuse is None else fuse
        self._base = self.sharp.base if self.sharp else opt
        prepare_base(self._base)
        self._state: object = opt.state
        self._params = [p for group in opt.param_groups for p in group["params"]]
        model = self.sharp.model if self.sharp else None
        self._modules = list(model.modules()) if model is not None else []
        self._scalars = GraphScalars(opt, self._device)
        self._mask = GraphMask(self.sharp, self._device)
        self._rng = GraphRng(self._device)
        self._recordings: dict[Any, Recording] = {}
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._is_full = False

    def __len__(self) -> int:
        """Return the number of combinations of shapes and settings that are kept."""
        return len(self._recordings)

    def run(self, leaves: Sequence[Any], structure: Any) -> tuple[Tensor, Any]:
        """Make one step on a batch; return the loss at w and the outputs.

        Args:
            leaves: of the batch, as returned by `flatten_batch`. Tensors are copied to the device.
            structure: of the batch.
        """
        if self.opt.state is not self._state:  # loaded, with the options it was saved with
            prepare_base(self._base)
            self._state = self.opt.state
        if self.sharp is not None:
            self.sharp._step_state.require_weights("replay a step")
            self.sharp._values.refresh()
        chosen = self._is_chosen()
        self._scalars.write()
        self._mask.write()
        recording = self._recording(leaves, structure, chosen)
        for static, given in zip(recording.inputs, leaves, strict=True):
            if isinstance(static, Tensor):
                static.copy_(given, non_blocking=True)
        if recording.backend is not None:
            recording.backend.write_numbers()
        for before in self.opt._optimizer_step_pre_hooks.values():
            before(self.opt, (), {})
        result = self._advance(recording, chosen)
        for after in self.opt._optimizer_step_post_hooks.values():
            after(self.opt, (), {})
        # Copies: the next step overwrites the tensors of this one.
        losses, outputs = result.losses.clone(), map_tensors(Tensor.clone, result.outputs)
        if self.sharp is not None:
            self.sharp._sharpness = losses[1]
        return losses[0], outputs

    def _is_chosen(self) -> bool:
        if self.sharp is None or self.sharp.when is None:
            return True
        return self.sharp.when.chosen(self.sharp.param_groups[0][STEP], lambda: 0.0)

    def _has_kept_vector(self) -> bool:
        """Whether a step that the interval does not choose reuses a vector of an earlier one."""
        if self.sharp is None or not self.sharp.rule.reuse:
            return False
        return self.sharp._step_state.memory.has(KEPT)

    def _recording(self, leaves: Sequence[Any], structure: Any, chosen: bool) -> Recording:
        modes = tuple(module.training for module in self._modules)
        trained = tuple(p.requires_grad for p in self._params)
        shapes = tuple(map(_describe, leaves))
        form = None if structure is None else str(structure)
        # A chosen step is recorded after eager ones, which have kept a vector.
        kind = (chosen, not chosen and self._has_kept_vector())
        key = (shapes, form, kind, modes, trained, self._scalars.constants())
        numbers = self._scalars.base_numbers()
        known = self._find(key, leaves, structure, reuses=kind[1])
        if known.base_numbers not in (None, numbers):
            known = self._find((*key, numbers), leaves, structure, reuses=kind[1])
        return known

    def _find(
        self, key: tuple[Any, ...], leaves: Sequence[Any], structure: Any, reuses: bool
    ) -> Recording:
        state = self.opt.state
        known = self._recordings.pop(key, None)
        if known is None or known.state is not state:  # loading a state replaces its tensors
            self._limit_recordings()
            inputs = [
                torch.empty_like(x, device=self._device) if isinstance(x, Tensor) else x
                for x in leaves
            ]
            known = Recording(inputs, structure, state)
            if self._fuse and self.sharp is not None and self._scalars.are_numbers():
                sharp = self.sharp
                boost = sharp.geometry.boost
                known.backend = TritonBackend(self._device, sharp.base, sharp.rule, boost, reuses)
        self._recordings[key] = known  # most recently used last
        return known

    def _limit_recordings(self) -> None:
        if len(self._recordings) < RECORDINGS:
            return
        if not self._is_full:
            warn(
                f"a captured step has seen {RECORDINGS} combinations of shapes and settings, and each "
                "is recorded separately: from now on the least recently used are dropped. If a "
                "scheduler changes momentum, weight decay or betas, omit max_norm and hooks of the "
                "base, or use cycle_momentum=False"
            )
        self._is_full = True
        del self._recordings[next(iter(self._recordings))]
        if all(recording.graph is None for recording in self._recordings.values()):
            self._pool = None  # freed with its last graph

    def _advance(self, recording: Recording, chosen: bool) -> Result:
        recording.calls += 1
        self.is_last_eager_call = recording.calls == EAGER_CALLS
        if recording.graph is None:
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            if recording.calls <= EAGER_CALLS:
                with torch.cuda.stream(self._stream), self._scalars.in_groups():
                    result = self._step(recording, chosen)
                current.wait_stream(self._stream)
                return result
            self._record(recording, chosen)
        assert recording.graph is not None
        assert recording.result is not None
        self._rng.align()
        recording.graph.replay()
        if self.sharp is not None:
            self.sharp._values.count_update()
        return recording.result

    def _record(self, recording: Recording, chosen: bool) -> None:
        graph = torch.cuda.CUDAGraph()
        counts = [group.get(STEP) for group in self.opt.param_groups]
        self._rng.register(graph)
        torch.clear_autocast_cache()  # an enclosing autocast may have cast other weights
        context = torch.cuda.graph(graph, pool=self._pool, stream=self._stream)
        installed = self._rng.installed(self.sharp)
        try:
            with no_garbage_collection(), self._scalars.in_groups(), installed, context:
                recording.result = self._step(recording, chosen)
        except RuntimeError as error:
            error.add_note(
                "while recording a step: a loss function that synchronizes (item(), print, a branch on "
                "a tensor's value) cannot be recorded, nor can a step while an earlier autograd graph, "
                "such as that of a loss that was not detached, is still alive; train_step with "
                "capture=False makes eager steps"
            )
            raise
        for group, count in zip(self.opt.param_groups, counts, strict=True):
            if count is not None:  # recording is not a step
                group[STEP] = count
        if recording.backend is not None:
            recording.backend.recorded()
        by_kernel = recording.backend is not None and recording.backend.stepped_base
        recording.base_numbers = None if by_kernel else self._scalars.base_numbers()
        recording.graph = graph
        recording.kept_alive = [p.grad for p in self._params]
        if self.sharp is not None:
            recording.kept_alive.append(self.sharp._norm_stats.copies)
        self._pool = self._pool or graph.pool()

    def _step(self, recording: Recording, chosen: bool) -> Result:
        """Make an eager step on the recording's inputs, which a graph may be recording."""
        args, kwargs = recording.inputs, {}
        if recording.structure is not None:
            args, kwargs = tree_unflatten(recording.inputs, recording.structure)
        sharp = self.sharp
        with contextlib.ExitStack() as contexts:
            for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                contexts.enter_context(replaced(self.opt, **{hooks: OrderedDict()}))  # see `run`
            if sharp is not None:
                contexts.enter_context(self._mask.installed())
                # A recorded step cannot evaluate intervals.
                contexts.enter_context(replaced(sharp, when=None if chosen else NEVER))
                contexts.enter_context(use_backend(sharp, recording.backend))
            loss, outputs = self._make_step(*args, **kwargs)
        sharpness = sharp.sharpness if sharp is not None and chosen else None
        if sharpness is None:
            sharpness = torch.full_like(loss, torch.nan)
        return Result(torch.stack((loss, sharpness.to(loss.dtype))), outputs)


def _describe(leaf: Any) -> tuple[Any, ...]:
    """Return what a recording depends on: the layout of a tensor, or a constant."""
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.stride())
    if not isinstance(leaf, CONSTANTS):
        raise TypeError(
            f"the batch of a captured step contains a {type(leaf).__name__}: pass tensors, numbers and "
            "strings, in lists, tuples and dicts"
        )
    return (type(leaf), leaf)


def check_optimizer(opt: Optimizer) -> torch.device:
    """Return the device of an optimizer that can be captured.

    Raises:
        ValueError: It cannot.
    """
    sharp = sharpness_aware(opt)
    if sharp is not None and sharp.ascent_steps > 1:
        raise ValueError(
            "ascent_steps > 1 cannot be captured: a graph has two states of the generator"
        )
    kind = Geometry if sharp is None else type(sharp.geometry)
    if kind.mask is not Geometry.mask and kind is not Masked:
        raise ValueError(
            f"{kind.__name__}.mask cannot be captured: it selects tensors on the host at every step"
        )
    devices = {p.device for group in opt.param_groups for p in group["params"]}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        found = ", ".join(sorted(str(device) for device in devices))
        raise ValueError(f"capture needs all parameters on one CUDA device, they are on {found}")
    if sharp is not None and sharp.nonfinite != "propagate":
        raise ValueError(
            f"nonfinite={sharp.nonfinite!r} reads gradients on the host, which a captured step cannot: "
            "use 'propagate'"
        )
    if sharp is not None and sharp.when is not None and sharp.when.needs_norm:
        raise ValueError("an interval that reads the gradient norm cannot be captured")
    device: torch.device = devices.pop()
    return device


def prepare_base(base: Optimizer) -> None:
    """Make the base accept tensors as learning rates and keep its counters on the device."""
    for group in base.param_groups:
        params = group["params"]
        if isinstance(base, BASES) and all(p.is_floating_point() for p in params):
            group["fused"], group["foreach"] = True, False
        if "capturable" in group:
            group["capturable"] = True
        elif not group.get("fused"):
            raise ValueError(
                f"{type(base).__name__} cannot be captured: it is neither fused nor capturable; "
                "use it eagerly, or use SGD, Adam(W) or a base with a capturable option"
            )
        for p in params:
            count = base.state.get(p, {}).get("step")
            if isinstance(count, Tensor) and count.device != p.device:
                base.state[p]["step"] = count.to(p.device, torch.float32)


def use_backend(
    sharp: "SharpnessAware", backend: TritonBackend | None
) -> AbstractContextManager[None]:
    """Make the optimizer use a recording's own backend during a step."""
    if backend is not None:
        backend.begin(recording=torch.cuda.is_current_stream_capturing())
    return replaced(sharp, _backend=backend)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable the collector while a step is recorded: freeing another graph invalidates it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
