"""A whole step (both passes, perturbation, base update, decoupled term) as one CUDA graph.

At small batch sizes a two-pass step is bound by kernel launches. `capture` records all launches of a
step once and replays them by a single one. Learning rate, rho, gamma and alpha are device tensors in
a recording, so they can change without a new one; so can momentum, betas and weight decay where a
kernel of ours makes the base's step. Everything else that is read on the host, such as shapes, is part
of the recording's key: a new value leads to a new recording.

The first calls run eagerly. They are real steps, which also warm up libraries and allocate the base's
state.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wsam._core.param_groups import STEP
from wsam._core.validation import warn
from wsam.accel.base_optimizers import BASES
from wsam.accel.graph_inputs import GraphMask, GraphRng, GraphScalars, sharpness_aware
from wsam.accel.triton_backend import TritonBackend, kernels_work_on, triton_is_installed

if TYPE_CHECKING:
    from wsam.optimizer import SharpnessAware

EAGER_CALLS = 2
RECORDINGS = 32
"""How many recordings are kept."""


def capture(
    opt: Optimizer,
    loss_fn: Callable[..., Tensor],
    *example_batch: Tensor,
    fuse: bool | None = None,
) -> "CapturedStep":
    """Return `step(*batch) -> loss`, which replays a recorded step.

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


@dataclass
class Recording:
    """A recorded graph with the tensors that it reads and writes."""

    inputs: list[Tensor]
    state: object
    calls: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    out: Tensor | None = None
    """L(w) and the sharpness."""
    backend: TritonBackend | None = None
    base_numbers: tuple[Any, ...] | None = None
    """The base's numbers, if they are constants of the graph because the base stepped by itself."""
    kept_alive: list[Any] = field(default_factory=list)
    """Memory that the graph uses and that has no other owner."""


class CapturedStep:
    """A step that is recorded once for each shape and setting, and then replayed."""

    def __init__(
        self,
        opt: Optimizer,
        loss_fn: Callable[..., Tensor],
        example: tuple[Any, ...],
        fuse: bool | None = None,
    ) -> None:
        if fuse and not triton_is_installed():
            raise ValueError("fuse=True needs Triton, which is not installed")
        self.opt = opt
        self.sharp = sharpness_aware(opt)
        self.loss_fn = loss_fn
        self._device = self._check(example)
        if self.sharp is not None:
            self.sharp._all_blocks(refresh=True)  # parameters may have moved to the device just now
        self._fuse = kernels_work_on(self._device) if fuse is None else fuse
        prepare_base(self.sharp.base if self.sharp else opt)
        self._scalars = GraphScalars(opt, self._device)
        self._mask = GraphMask(self.sharp, self._device)
        self._rng = GraphRng(self._device)
        self._recordings: dict[Any, Recording] = {}
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._is_full = False

    def __call__(self, *batch: Tensor) -> Tensor:
        """Make one step on `batch` and return the loss at w."""
        if self.sharp is not None:
            self.sharp._step_state.require_weights("replay a step")
            self.sharp._values.refresh()
        chosen = self._is_chosen()
        self._scalars.write()
        self._mask.write()
        recording = self._recording(batch, chosen)
        for static, given in zip(recording.inputs, batch, strict=True):
            static.copy_(given, non_blocking=True)
        if recording.backend is not None:
            recording.backend.write_numbers()
        for before in self.opt._optimizer_step_pre_hooks.values():
            before(self.opt, (), {})
        out = self._advance(recording, chosen)
        for after in self.opt._optimizer_step_post_hooks.values():
            after(self.opt, (), {})
        if self.sharp is not None:
            self.sharp._sharpness = out[1]
        return out[0]

    def _check(self, example: tuple[Any, ...]) -> torch.device:
        devices = {p.device for group in self.opt.param_groups for p in group["params"]}
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            found = ", ".join(sorted(str(device) for device in devices))
            raise ValueError(
                f"capture needs all parameters on one CUDA device, they are on {found}"
            )
        if not all(isinstance(x, Tensor) for x in example) or not example:
            raise TypeError("capture takes the tensors of an example batch")
        if self.sharp is not None:
            if self.sharp.nonfinite != "propagate":
                raise ValueError(
                    f"nonfinite={self.sharp.nonfinite!r} reads gradients on the host, which a captured "
                    "step cannot: use 'propagate'"
                )
            if self.sharp.when is not None and self.sharp.when.needs_norm:
                raise ValueError("an interval that reads the gradient norm cannot be captured")
        device: torch.device = next(iter(devices))
        return device

    def _is_chosen(self) -> bool:
        if self.sharp is None or self.sharp.when is None:
            return True
        return self.sharp.when.chosen(self.sharp.param_groups[0][STEP], lambda: 0.0)

    def _recording(self, batch: tuple[Tensor, ...], chosen: bool) -> Recording:
        shapes = tuple((tuple(x.shape), x.dtype, x.stride()) for x in batch)
        training = self.sharp.model.training if self.sharp and self.sharp.model else None
        key = (shapes, chosen, training, self._scalars.constants())
        numbers = self._scalars.base_numbers()
        known = self._find(key, batch)
        if known.base_numbers not in (None, numbers):
            known = self._find((*key, numbers), batch)
        return known

    def _find(self, key: tuple[Any, ...], batch: tuple[Tensor, ...]) -> Recording:
        state = self.opt.state
        known = self._recordings.pop(key, None)
        if known is None or known.state is not state:  # loading a state replaces its tensors
            self._limit_recordings()
            inputs = [torch.empty_like(x, device=self._device) for x in batch]
            known = Recording(inputs, state)
            if self._fuse and self.sharp is not None and self._scalars.are_numbers():
                sharp = self.sharp
                boost = sharp.geometry.boost
                known.backend = TritonBackend(self._device, sharp.base, sharp.rule, boost)
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

    def _advance(self, recording: Recording, chosen: bool) -> Tensor:
        recording.calls += 1
        if recording.graph is None:
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            if recording.calls <= EAGER_CALLS:
                with torch.cuda.stream(self._stream), self._scalars.in_groups():
                    out = self._step(recording, chosen)
                current.wait_stream(self._stream)
                return out
            self._record(recording, chosen)
        assert recording.graph is not None
        assert recording.out is not None
        self._rng.align()
        recording.graph.replay()
        if self.sharp is not None:
            self.sharp._values.count_update()
        return recording.out.clone()

    def _record(self, recording: Recording, chosen: bool) -> None:
        graph = torch.cuda.CUDAGraph()
        counts = [group.get(STEP) for group in self.opt.param_groups]
        self._rng.register(graph)
        context = torch.cuda.graph(graph, pool=self._pool, stream=self._stream)
        try:
            with self._scalars.in_groups(), self._rng.installed(self.sharp), context:
                recording.out = self._step(recording, chosen)
        except RuntimeError as error:
            error.add_note(
                "while recording a step: a loss function that synchronizes (item(), print, a branch on "
                "a tensor's value) cannot be recorded, nor can a step while an earlier autograd graph, "
                "such as that of a loss that was not detached, is still alive"
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
        recording.kept_alive = [p.grad for group in self.opt.param_groups for p in group["params"]]
        if self.sharp is not None:
            recording.kept_alive.append(self.sharp._norm_stats.copies)
        self._pool = self._pool or graph.pool()

    def _step(self, recording: Recording, chosen: bool) -> Tensor:
        """Make an eager step on the recording's inputs, which a graph may be recording."""

        def closure() -> Tensor:
            loss = self.loss_fn(*recording.inputs)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        if self.sharp is None:
            self.opt.zero_grad(set_to_none=True)
            loss = closure().detach()
            self.opt.step()
            return torch.stack((loss.float(), torch.full_like(loss, torch.nan).float()))
        context = (self._mask.installed(), perturb_if(self.sharp, chosen), no_hooks(self.sharp))
        with context[0], context[1], context[2], use_backend(self.sharp, recording.backend):
            loss = self.sharp.step(closure)
        sharpness = self.sharp.sharpness if chosen else torch.full_like(loss, torch.nan)
        assert isinstance(sharpness, Tensor)
        return torch.stack((loss.float(), sharpness.float()))


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


@contextlib.contextmanager
def perturb_if(sharp: "SharpnessAware", chosen: bool) -> Iterator[None]:
    """Decide in advance whether the step is perturbed: a recorded step cannot evaluate intervals."""
    sharp._perturb_this_step = chosen
    try:
        yield
    finally:
        sharp._perturb_this_step = None


@contextlib.contextmanager
def use_backend(sharp: "SharpnessAware", backend: TritonBackend | None) -> Iterator[None]:
    """Make the optimizer use a recording's own backend during a step."""
    if backend is not None:
        backend.begin(recording=torch.cuda.is_current_stream_capturing())
    own, sharp._backend = sharp._backend, backend
    try:
        yield
    finally:
        sharp._backend = own


@contextlib.contextmanager
def no_hooks(sharp: "SharpnessAware") -> Iterator[None]:
    """Disable step hooks while a step is recorded: each replay calls them."""
    pre, post = sharp._optimizer_step_pre_hooks, sharp._optimizer_step_post_hooks
    sharp._optimizer_step_pre_hooks, sharp._optimizer_step_post_hooks = type(pre)(), type(post)()
    try:
        yield
    finally:
        sharp._optimizer_step_pre_hooks, sharp._optimizer_step_post_hooks = pre, post
