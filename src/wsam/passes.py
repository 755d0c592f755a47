"""What must not move between the two passes: running statistics and random masks.

Statistics that the second pass pollutes with activations at w + d ruin a network silently; masks
that differ between the passes make g1 - g0 measure noise. Both are put back by copy, which is right
for every kind of module and momentum, NaN activations included.
"""

import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from wsam.checks import warn
from wsam.plan import places

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _statistics(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's running statistics; those of a lazy layer that has not run are none yet."""
    found = ((name, module._buffers.get(name)) for name in STATISTICS)
    return {name: b for name, b in found if b is not None and not is_lazy(b)}


def _can_have_statistics(module: nn.Module) -> bool:
    """Whether the module has running statistics; a lazy layer has none yet, but will."""
    return isinstance(module, nn.modules.batchnorm._NormBase) or bool(_statistics(module))


def _compilations() -> int:
    """How many graphs have been compiled so far."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return int(compiler.counters["stats"]["unique_graphs"]) if compiler is not None else 0


class _Kept:
    """Copies of some modules' statistics, and where these belong."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._owned = [(m._buffers, name, b) for m in modules for name, b in _statistics(m).items()]
        tensors = [b for _, _, b in self._owned]
        self._counts = [b for b in tensors if _is_count(b)]
        self._places = places(self._counts)
        self._pairs = [(t, [torch.empty_like(b) for b in t]) for t in _by_launch(tensors)]

    def serves_again(self) -> bool:
        """Whether the views of the counts are still views of them."""
        return places(self._counts) == self._places

    def take(self) -> None:
        """Copy what is there now."""
        for tensors, kept in self._pairs:
            torch._foreach_copy_(kept, tensors)

    def put_back(self) -> None:
        """Undo what has happened since `take`, buffers that were replaced by others included."""
        for tensors, kept in self._pairs:
            torch._foreach_copy_(tensors, kept)
        for buffers, name, tensor in self._owned:
            if buffers.get(name) is not tensor:
                buffers[name] = tensor


def _is_count(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.dtype == torch.int64 and tensor.dim() == 0


def _by_launch(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return lists of one dtype and device: what a single foreach launch can copy.

    What is copied are bits, so a count goes with the means and variances as two words of 32.
    """
    lists: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        words = tensor.view(1).view(torch.float32) if _is_count(tensor) else tensor
        lists.setdefault((words.dtype, words.device), []).append(words)
    return list(lists.values())


class RunningStatistics:
    """Holds the running statistics of all normalisation layers still during the second pass.

    Given the model, its layers are known. Without it they are noticed as they run, by a hook on all
    modules that is live between the passes only; a layer noticed once is remembered weakly.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._given = model is not None
        self.look_at(model)
        self._held: list[_Kept] = []
        self._spare = _Kept(())
        self._mark: tuple[list[Any], ...] = ()
        self._hook: Any = None
        self._watch: Any = _weakly(self)
        self._untraced = False
        self._noticed = self._warned = False
        self._compiled = _compilations()

    def look_at(self, model: nn.Module | None) -> None:
        """Find the layers of a model; again where it may have got others."""
        if model is not None:
            self._modules.update(m for m in model.modules() if _can_have_statistics(m))

    def hold(self) -> None:
        """Keep copies of what is there now; call before the second pass."""
        modules = list(self._modules)
        buffers = [b for m in modules for b in m._buffers.values()]
        mark = [m.training for m in modules], list(map(id, buffers)), list(map(type, buffers))
        if mark != self._mark or not self._spare.serves_again():  # else the copies' memory does
            self._spare = _Kept(m for m in modules if m.training)
            self._mark = mark
        self._spare.take()
        self._held = [self._spare]
        if not self._given:
            self._noticed = False
            if "torch._dynamo" in sys.modules and not self._untraced:
                # Else nothing is compiled, and importing the compiler would be slow.
                self._watch = torch.compiler.disable(self._watch)  # type: ignore[no-untyped-call]
                self._untraced = True
            hook = register_module_forward_pre_hook(self._watch)
            self._hook = weakref.finalize(self, hook.remove)

    def release(self) -> None:
        """Put everything back and stop looking; may be called twice."""
        if self._hook is not None:
            self._hook()
            self._hook = None
            self._warn_of_unseen()
        with torch.no_grad():
            for kept in self._held:
                kept.put_back()
        self._held = []  # last: whoever is interrupted comes here again

    def _notice(self, module: nn.Module, args: Any) -> None:
        if isinstance(module, torch.fx.GraphModule):
            return  # what a compiler has made of modules: it owns no statistics
        self._noticed = True
        if hasattr(module, "_orig_mod") and not self._warned:
            self._warned = True
            warn(
                "a compiled model runs under a sharpness-aware optimizer that was not told of it: "
                "pass model= so that its running statistics are protected without hooks"
            )
        if module in self._seen:
            return
        # Parts of it may be compiled and run without calling hooks: take them all now.
        for part in module.modules():
            if part not in self._seen:
                self._seen.add(part)
                self._keep(part)

    def _keep(self, module: nn.Module) -> None:
        if not _can_have_statistics(module):
            return
        self._modules.add(module)
        if module.training:
            with torch.no_grad():
                kept = _Kept((module,))
                kept.take()
            self._held.append(kept)

    def _warn_of_unseen(self) -> None:
        """Say once that compiled code may have moved statistics of modules that called no hook."""
        if _compilations() > self._compiled and not self._noticed and not self._warned:
            self._warned = True
            warn(
                "compiled code ran between the passes and no module was seen there: if it has "
                "normalisation layers, their running statistics move twice a step; pass model="
            )


def _weakly(statistics: RunningStatistics) -> Any:
    """Return a hook that dies with the optimizer, be it given up in the middle of a step."""
    reference = weakref.ref(statistics)

    def watch(module: nn.Module, args: Any) -> None:
        found = reference()
        if found is not None:
            found._notice(module, args)

    return watch


class RandomStates:
    """Lets the second pass draw the same random numbers as the first, and advances them once."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = sorted({d for d in devices if d.type == "cuda"}, key=str)

    def _generators(self) -> list[torch.Generator]:
        every = torch.cuda.default_generators
        current = torch.cuda.current_device() if self._devices else 0
        return [every[current if d.index is None else d.index] for d in self._devices]

    def read(self) -> tuple[Any, ...]:
        """Return the states of the CPU's and the devices' default generators."""
        # A device's state is a seed and a count; torch.cuda.get_rng_state makes a tensor of them.
        states = ((g.initial_seed(), g.get_offset()) for g in self._generators())
        return (torch.get_rng_state(), *states)

    def write(self, states: tuple[Any, ...]) -> None:
        """Set the generators to states that `read` returned."""
        torch.set_rng_state(states[0])
        for generator, (seed, offset) in zip(self._generators(), states[1:], strict=True):
            if generator.initial_seed() != seed:
                generator.manual_seed(seed)
            generator.set_offset(offset)


__all__ = ["RandomStates", "RunningStatistics"]
