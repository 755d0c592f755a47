"""What must not move between the two passes: running statistics and spectral norms.

Statistics that the second pass pollutes with activations at w + d ruin a network silently. They are
put back by copy, which is right for every kind of module and momentum, NaN activations included;
torch's own batch norms are told to keep none besides, which is faster (see `wsam.switches`). The power
iteration of a spectral norm is stopped: g0 and g1 are then gradients of the same function.
"""

import sys
import threading
import weakref
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from wsam.block import places
from wsam.checks import warn
from wsam.spectral import PowerIterations, spectral_norms
from wsam.switches import Switches, compilations

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
Slot = tuple[Any, str, Tensor]
"""A module's buffers, the name of one, and the tensor that is found there."""
_COMPILER = "torch._dynamo"


def _statistics(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's running statistics; those of a lazy layer that has not run are none yet."""
    buffers = module._buffers  # of a scripted module no dict, and without `get`
    found = ((name, buffers[name]) for name in STATISTICS if name in buffers)
    return {name: b for name, b in found if b is not None and not is_lazy(b)}


def _can_have_statistics(module: nn.Module) -> bool:
    """Whether the module has running statistics; a lazy layer has none yet, but will."""
    return isinstance(module, nn.modules.batchnorm._NormBase) or bool(_statistics(module))


def _unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor that a transform of torch.func has wrapped: the wrapper ends with it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _versions(module: nn.Module) -> list[int]:
    """Return how often statistics were written to; those made in inference mode cannot be."""
    found = _statistics(module).values()
    return [-1 if buffer.is_inference() else buffer._version for buffer in found]


class _Parts:
    """What modules are made of: other modules, and so many hooks before a pass."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        own = [(m._modules, m._forward_pre_hooks) for m in modules]
        self._children, self._hooks = [c for c, _ in own], [h for _, h in own]
        self._found = self._look()

    def _look(self) -> tuple[list[Any], list[int]]:
        parts = chain.from_iterable([children.values() for children in self._children])
        return list(parts), list(map(len, self._hooks))

    def changed(self) -> bool:
        """Whether they are made of others now."""
        return self._look() != self._found


def _slots(modules: Iterable[nn.Module]) -> list[Slot]:
    """Return where modules have their statistics, and which."""
    return [(m._buffers, name, b) for m in modules for name, b in _statistics(m).items()]


def _fill(slots: Iterable[Slot]) -> None:
    """Give modules those buffers again that they had, where they have made others."""
    for buffers, name, tensor in slots:
        try:
            is_there = buffers[name] is tensor
        except KeyError:
            is_there = False
        if not is_there:
            buffers[name] = tensor


class _Kept:
    """Copies of some modules' statistics, and where these belong."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.slots = _slots(modules)
        tensors = [_unwrapped(b) for _, _, b in self.slots]
        self.ids = set(map(id, tensors))
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
        """Undo what has been written into the statistics since `take`."""
        for tensors, kept in self._pairs:
            torch._foreach_copy_(tensors, kept)


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

    Given the model, its layers are known, and no others are held: the model has to contain all that
    runs in the passes. Without it layers are noticed as they run, by a hook on all modules that is
    live between the passes only; a layer noticed once is remembered weakly. What runs in threads
    other than the one that holds is left alone, for they may train models of their own; a warning
    says so where nothing has run in ours. What DataParallel runs in threads is noticed all the same:
    it is itself called in ours, and all its parts are taken.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._graphs: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._iterations = PowerIterations()
        # Layers in eval mode: how often each was written to, those of this step, those that move.
        self._versions: weakref.WeakKeyDictionary[nn.Module, list[int]]
        self._versions = weakref.WeakKeyDictionary()
        self._still: list[nn.Module] = []
        self._restless: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._model = model
        self._parts = _Parts(())
        self.look_at(model)
        self._held: list[_Kept] = []
        self.spare = _Kept(())  # whose memory a CUDA graph goes on using
        self._switches = Switches()
        self._mark: tuple[list[Any], ...] = ()
        # What was found after `hold`: tensors, by their ids, and the parts of callers they were in.
        self._late_ids: set[int] = set()
        self._late_callers: dict[nn.Module, list[nn.Module]] = {}
        self._running: dict[nn.Module, list[Slot]] = {}
        self._hooks: list[Any] = []
        self._watch: Any = _hook(self._notice)
        self._untraced = _COMPILER in sys.modules
        self._noticed = self._elsewhere = self._warned = False
        self._compiled = compilations()
        self._thread = threading.get_ident()

    def look_at(self, model: nn.Module | None) -> None:
        """Find the layers of a model; again where it may have got others."""
        if model is None:
            return
        tree = list(model.modules())
        self._parts = _Parts(tree)
        self._modules.update(filter(_can_have_statistics, tree))
        self._iterations.look_at(tree)
        self._seen.update(tree)
        for module in self._modules:
            self._versions.setdefault(module, _versions(module))

    def hold(self, switch: bool = False) -> None:
        """Keep copies of what is there now; call before the second pass.

        With `switch` batch norms are told to keep no statistics. Whoever looks at the model in the
        second pass sees switches that are off.
        """
        self._still = []
        if self._model is not None and self._parts.changed():
            self.look_at(self._model)
        modules = [m for m in self._modules if m.training or self._moves(m)]
        buffers = [b for m in modules for b in m._buffers.values()]
        mark = list(map(id, buffers)), list(map(type, buffers))
        if mark != self._mark or not self.spare.serves_again():  # else the copies' memory does
            # Of some in eval mode, too: a closure may call train() itself.
            self.spare = _Kept(modules)
            self._mark = mark
        self.spare.take()
        self._held = [self.spare]
        if switch:
            self._switches.throw(modules)
        self._iterations.stop()
        if self._model is None:
            self._late_ids.clear()
            self._thread = threading.get_ident()
            self._noticed = self._elsewhere = False
            if _COMPILER in sys.modules and not self._untraced:
                self._watch = _hook(self._notice)
                self._untraced = True
            begin = register_module_forward_pre_hook(self._watch)
            self._hooks.append(weakref.finalize(self, begin.remove))

    def _moves(self, module: nn.Module) -> bool:
        """Whether a layer in eval mode has moved since we last looked: its closure calls train().

        Others in that mode stand still by themselves, or are moved by somebody who means it.
        """
        if module not in self._restless:
            now = _versions(module)
            if self._versions.setdefault(module, now) == now:
                self._still.append(module)
                return False
            self._restless.add(module)
        return True

    def release(self) -> None:
        """Put everything back and stop looking; may be called twice."""
        looked = bool(self._hooks)
        if looked:
            for remove in self._hooks:
                remove()
            self._hooks.clear()
            self._late_callers.clear()
            self._running.clear()
        self._iterations.resume()
        self._switches.back()
        with torch.no_grad():
            for kept in reversed(self._held):  # of a tensor that was copied twice the older
                kept.put_back()
        if self._held:
            _fill(self.spare.slots)
        for module in self._still:
            self._versions[module] = _versions(module)
        self._held = []  # whoever is interrupted before comes here again
        if looked:
            self._warn_of_unseen()

    def _notice(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            if module.training and (_can_have_statistics(module) or spectral_norms(module)):
                self._elsewhere = True
            return
        if isinstance(module, torch.fx.GraphModule) and not self._owns_statistics(module):
            return  # what a compiler has made of modules
        self._noticed = True
        if "_orig_mod" in module._modules and not self._warned:
            self._warned = True
            warn(
                "a compiled model runs under a sharpness-aware optimizer that was not told of it: "
                "pass model= so that its running statistics are protected without hooks"
            )
        if module not in self._seen:
            # Parts of it may be compiled and run without calling hooks: take them all now.
            self._meet(module, [part for part in module.modules() if part not in self._seen])
        elif module in self._modules and module.training and not self._holds(module):
            self._keep(module, [module])  # torch.func.functional_call has lent it buffers
        if module in self._late_callers:
            self._running[module] = _slots(self._late_callers[module])

    def _owns_statistics(self, graph: nn.Module) -> bool:
        """Whether a graph has statistics: torch.export's has, a compiler's is handed them."""
        if graph not in self._graphs:
            self._graphs[graph] = any(map(_can_have_statistics, graph.modules()))
        return self._graphs[graph]

    def _meet(self, caller: nn.Module, parts: list[nn.Module]) -> None:
        normalising = [part for part in parts if _can_have_statistics(part)]
        self._modules.update(normalising)
        self._iterations.look_at(parts)
        self._iterations.stop()
        moving = [part for part in normalising if part.training]
        if moving:
            self._keep(caller, moving)
        self._seen.update(parts)

    def _keep(self, caller: nn.Module, modules: list[nn.Module]) -> None:
        """Copy statistics that are found in the middle of a pass, at the beginning of a call.

        They may be lent to the modules for that call. If a module makes buffers of its own instead
        of them, then those found can be put in place again only before the call has ended.
        """
        with torch.no_grad():
            kept = _Kept(modules)
            kept.take()
        self._held.append(kept)
        self._late_ids |= kept.ids
        if not self._late_callers:
            end = register_module_forward_hook(_hook(self._end_call), always_call=True)
            self._hooks.append(weakref.finalize(self, end.remove))
        self._late_callers[caller] = modules

    def _end_call(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread:
            _fill(self._running.pop(module, ()))

    def _holds(self, module: nn.Module) -> bool:
        for found in _statistics(module).values():
            if id(found) not in self.spare.ids and id(_unwrapped(found)) not in self._late_ids:
                return False
        return True

    def _warn_of_unseen(self) -> None:
        """Say once that statistics may have moved that are not held: no module was seen."""
        if self._noticed or self._warned:
            return
        if compilations() > self._compiled:
            self._warned = True
            warn(
                "compiled code ran between the passes and no module was seen there: if it has "
                "normalisation layers, their running statistics move twice a step; pass model="
            )
        elif self._elsewhere:
            self._warned = True
            warn(
                "modules ran in another thread between the passes, and none in that of the "
                "optimizer: their running statistics and spectral norms move twice a step; pass "
                "model="
            )


def _hook(method: Any) -> Any:
    """Return a hook that dies with the optimizer, be it given up in the middle of a step."""
    reference, function = weakref.ref(method.__self__), method.__func__

    def watch(*arguments: Any) -> None:
        found = reference()
        if found is not None:
            function(found, *arguments)

    if _COMPILER in sys.modules:  # else nothing is compiled, and importing it would be slow
        return torch.compiler.disable(watch)  # type: ignore[no-untyped-call]
    return watch
