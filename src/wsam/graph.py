"""The whole step (both passes, perturbation, base update, decoupled term) as one CUDA graph.

At small batches a two-pass step is bound by kernel launches. `capture` records all of a step's
launches once and replays them by a single one. Learning rate, rho, gamma and alpha become device
tensors while the step is recorded, so they change without another recording; so do momentum, betas
and weight decay where the base's step is one of our kernels. Everything else that is read on the host
(shapes, ...) belongs to the recording's key, and a new value makes a new recording.

The first calls run eagerly: they are real steps that also warm up libraries and allocate the base's
state. No step is made twice and none is lost.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wsam import state as saving
from wsam.bases import BASES
from wsam.checks import warn
from wsam.kernels import Kernels
from wsam.launch import available, kernels_work_on
from wsam.optimizer import SharpnessAware
from wsam.standins import Masks, Rewind, Scalars

EAGER_CALLS = 2
RECORDINGS = 32
"""How many are kept."""


def capture(
    opt: Optimizer,
    loss_fn: Callable[..., Tensor],
    *example_batch: Tensor,
    fuse: bool | None = None,
) -> "CapturedStep":
    """Return `step(*batch) -> loss`, which replays a recorded step.

    Args:
        opt: any member of the family over a base that torch can capture, or a plain optimizer.
        loss_fn: a plain function of a batch that returns the loss; it must not call backward.
        *example_batch: tensors like those the step will be given; another shape makes another
            recording, and the 32 used last are kept.
        fuse: perturb and finish by fused Triton kernels where these can (see `wsam.kernels`); by
            default if Triton is installed, which it is with torch for CUDA on Linux.

    Returns:
        The step. It returns the loss at w; `opt.sharpness` is set, schedulers and step hooks work.

    Example:
        >>> step = capture(opt, lambda x, y: cross_entropy(model(x), y), x, y)  # doctest: +SKIP
        >>> loss = step(x, y)                                                   # doctest: +SKIP
    """
    return CapturedStep(opt, loss_fn, example_batch, fuse)


@dataclass
class Recording:
    """One recorded graph with the tensors it reads and writes."""

    inputs: list[Tensor]
    state: object
    calls: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    out: Tensor | None = None
    """L(w) and the sharpness."""
    fused: Kernels | None = None
    contains: tuple[Any, ...] | None = None
    """The base's numbers, where it has stepped by itself; our kernels read them on the device."""
    kept: list[Any] = field(default_factory=list)
    """What the graph points into and nobody else holds."""


class CapturedStep:
    """A step that is recorded once for each shape and setting, then replayed."""

    def __init__(
        self,
        opt: Optimizer,
        loss_fn: Callable[..., Tensor],
        example: tuple[Any, ...],
        fuse: bool | None = None,
    ) -> None:
        if fuse and not available():
            raise ValueError("fuse=True needs Triton, which is not installed")
        self.opt = opt
        self.sharp = opt if isinstance(opt, SharpnessAware) else None
        self.loss_fn = loss_fn
        self._device = self._check(example)
        self._fuse = kernels_work_on(self._device) if fuse is None else fuse
        prepare_base(self.sharp.base if self.sharp else opt)
        self._scalars = Scalars(opt, self._device)
        self._masks = Masks(self.sharp, self._device)
        self._random = Rewind(self._device)
        self._recordings: dict[Any, Recording] = {}
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._is_full = False

    def __call__(self, *batch: Tensor) -> Tensor:
        """Make one step on `batch` and return the loss at w."""
        if self.sharp is not None:
            self.sharp._refuse_in_flight("replay a step")
            self.sharp._refresh()
        chosen = self._is_chosen()
        self._scalars.write()
        self._masks.write()
        recording = self._recording(batch, chosen)
        for static, given in zip(recording.inputs, batch, strict=True):
            static.copy_(given, non_blocking=True)
        if recording.fused is not None:
            recording.fused.write_numbers()
        for before in self.opt._optimizer_step_pre_hooks.values():
            before(self.opt, (), {})
        out = self._advance(recording, chosen)
        for after in self.opt._optimizer_step_post_hooks.values():
            after(self.opt, (), {})
        return self._deliver(out)

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
                    f"nonfinite={self.sharp.nonfinite!r} must look at the gradients on the host in the "
                    "middle of a step, which a captured step cannot: use 'propagate'"
                )
            if self.sharp.when is not None and self.sharp.when.needs_norm:
                raise ValueError("an interval that reads the gradient norm cannot be captured")
        device: torch.device = next(iter(devices))
        return device

    def _is_chosen(self) -> bool:
        if self.sharp is None or self.sharp.when is None:
            return True
        return self.sharp.when.chosen(self.sharp._count(), lambda: 0.0)

    def _recording(self, batch: tuple[Tensor, ...], chosen: bool) -> Recording:
        shapes = tuple((tuple(x.shape), x.dtype, x.stride()) for x in batch)
        modes = self.sharp.model.training if self.sharp and self.sharp.model else None
        key, numbers = (shapes, chosen, modes, self._scalars.fixed()), self._scalars.of_base()
        known = self._known(key, batch)
        if known.contains not in (None, numbers):
            known = self._known((*key, numbers), batch)
        return known

    def _known(self, key: tuple[Any, ...], batch: tuple[Tensor, ...]) -> Recording:
        state = self.opt.state
        known = self._recordings.pop(key, None)
        if known is None or known.state is not state:  # loading a state replaces its tensors
            self._make_room()
            inputs = [torch.empty_like(x, device=self._device) for x in batch]
            known = Recording(inputs, state)
            if self._fuse and self.sharp is not None and self._scalars.are_plain():
                boost = self.sharp.geometry.boost
                known.fused = Kernels(self._device, self.sharp.base, self.sharp.rule, boost)
        self._recordings[key] = known  # the last is what was used last
        return known

    def _make_room(self) -> None:
        if len(self._recordings) < RECORDINGS:
            return
        if not self._is_full:
            warn(
                f"a captured step was given {RECORDINGS} combinations of shapes and settings, and each "
                "is recorded by itself: from now on those not used for longest are dropped. If a "
                "scheduler moves momentum, weight decay or betas, leave max_norm and hooks of the base "
                "out, or use cycle_momentum=False"
            )
        self._is_full = True
        del self._recordings[next(iter(self._recordings))]
        if all(recording.graph is None for recording in self._recordings.values()):
            self._pool = None  # it has gone with its last graph

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
        self._random.align()
        recording.graph.replay()
        if self.sharp is not None:
            for group in self.opt.param_groups:
                group[saving.STEP] += 1
        return recording.out.clone()

    def _record(self, recording: Recording, chosen: bool) -> None:
        graph = torch.cuda.CUDAGraph()
        counts = [group.get(saving.STEP) for group in self.opt.param_groups]
        self._random.register(graph)
        context = torch.cuda.graph(graph, pool=self._pool, stream=self._stream)
        try:
            with self._scalars.in_groups(), self._random.installed(self.sharp), context:
                recording.out = self._step(recording, chosen)
        except RuntimeError as error:
            error.add_note(
                "while recording a step: a loss function that waits for the device (item(), print, "
                "a branch on a tensor's value) cannot be recorded, nor can a step while an autograd "
                "graph from before, such as an earlier loss that was not detached, is still alive"
            )
            raise
        for group, count in zip(self.opt.param_groups, counts, strict=True):
            if count is not None:  # recording is not a step
                group[saving.STEP] = count
        if recording.fused is not None:
            recording.fused.recorded()
        by_kernels = recording.fused is not None and recording.fused.stepped_base
        recording.contains = None if by_kernels else self._scalars.of_base()
        recording.graph = graph
        recording.kept = [p.grad for group in self.opt.param_groups for p in group["params"]]
        if self.sharp is not None:
            recording.kept.append(self.sharp._statistics.spare)
        self._pool = self._pool or graph.pool()

    def _step(self, recording: Recording, chosen: bool) -> Tensor:
        """Make an eager step on the recording's inputs; recorded, if a recording is under way."""

        def closure() -> Tensor:
            loss = self.loss_fn(*recording.inputs)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        if self.sharp is None:
            self.opt.zero_grad(set_to_none=True)
            loss = closure().detach()
            self.opt.step()
            return torch.stack((loss.float(), torch.full_like(loss, torch.nan).float()))
        context = (self._masks.installed(), chosen_is(self.sharp, chosen), no_hooks(self.sharp))
        with context[0], context[1], context[2], use_kernels(self.sharp, recording.fused):
            loss = self.sharp.step(closure)
        sharpness = self.sharp.sharpness if chosen else torch.full_like(loss, torch.nan)
        assert isinstance(sharpness, Tensor)
        return torch.stack((loss.float(), sharpness.float()))

    def _deliver(self, out: Tensor) -> Tensor:
        if self.sharp is not None:
            self.sharp._sharpness = out[1]
        return out[0]


def prepare_base(base: Optimizer) -> None:
    """Have the base take tensors for learning rates and keep its counters on the device."""
    for group in base.param_groups:
        params = group["params"]
        if isinstance(base, BASES) and all(p.is_floating_point() for p in params):
            group["fused"], group["foreach"] = True, False
        if "capturable" in group:
            group["capturable"] = True
        elif not group.get("fused"):
            raise ValueError(
                f"{type(base).__name__} cannot be captured: it is neither fused nor capturable; "
                "use it eagerly, or SGD, Adam(W) or a base with a capturable option"
            )
        for p in params:
            step = base.state.get(p, {}).get("step")
            if isinstance(step, Tensor) and step.device != p.device:
                base.state[p]["step"] = step.to(p.device, torch.float32)


@contextlib.contextmanager
def chosen_is(sharp: SharpnessAware, chosen: bool) -> Iterator[None]:
    """Decide for the optimizer whether this step is perturbed; it cannot ask while recording."""
    sharp._decided = chosen
    try:
        yield
    finally:
        sharp._decided = None


@contextlib.contextmanager
def use_kernels(sharp: SharpnessAware, fused: Kernels | None) -> Iterator[None]:
    """Let the optimizer use fused kernels for the time of a step."""
    if fused is not None:
        fused.begin(recording=torch.cuda.is_current_stream_capturing())
    sharp._kernels = fused
    try:
        yield
    finally:
        sharp._kernels = None


@contextlib.contextmanager
def no_hooks(sharp: SharpnessAware) -> Iterator[None]:
    """Keep step hooks from being recorded: the replay calls them."""
    pre, post = sharp._optimizer_step_pre_hooks, sharp._optimizer_step_post_hooks
    sharp._optimizer_step_pre_hooks, sharp._optimizer_step_post_hooks = type(pre)(), type(post)()
    try:
        yield
    finally:
        sharp._optimizer_step_pre_hooks, sharp._optimizer_step_post_hooks = pre, post
