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

from wsam.block import copies
from wsam.checks import warn

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _statistics(module: nn.Module) -> list[Tensor]:
    found = (module._buffers.get(name) for name in STATISTICS)
    return [buffer for buffer in found if buffer is not None]


def _by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """One list a dtype and device: what a single foreach launch can take."""
    lists: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        lists.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(lists.values())


class RunningStatistics:
    """Holds the running statistics of all normalisation layers still during the second pass.

    Given the model, its layers are known. Without it they are noticed as they run, by a hook on all
    modules that is live between the passes only; a layer noticed once is remembered weakly.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._given = model is not None
        if model is not None:
            # Lazy layers have no statistics yet, so take what could have them, too.
            kinds = (nn.modules.batchnorm._NormBase,)
            for module in model.modules():
                if isinstance(module, kinds) or _statistics(module):
                    self._modules.add(module)
        self._held: list[tuple[list[Tensor], list[Tensor]]] = []
        self._hook: Any = None
        self._untraced: Any = None
        self._warned = False

    def hold(self) -> None:
        """Keep copies of what is there now; call before the second pass."""
        moving = [b for module in self._modules if module.training for b in _statistics(module)]
        self._held = [(tensors, copies(tensors)) for tensors in _by_dtype(moving)]
        if not self._given:
            if self._untraced is None and "torch._dynamo" in sys.modules:
                # Else nothing is compiled, and importing the compiler would be slow.
                self._untraced = torch.compiler.disable(self._notice)  # type: ignore[no-untyped-call]
            self._hook = register_module_forward_pre_hook(self._untraced or self._notice)

    def release(self) -> None:
        """Put everything back and stop looking; may be called twice."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        held, self._held = self._held, []
        with torch.no_grad():
            for tensors, kept in held:
                torch._foreach_copy_(tensors, kept)

    def _notice(self, module: nn.Module, args: Any) -> None:
        inner = getattr(module, "_orig_mod", None)
        if isinstance(inner, nn.Module):
            # Layers inside a compiled module may run without calling hooks: take them all now.
            if not self._warned:
                self._warned = True
                warn(
                    "a compiled model runs under a sharpness-aware optimizer that was not told of "
                    "it: pass model= so that its running statistics are protected without hooks"
                )
            for part in inner.modules():
                self._keep(part)
        else:
            self._keep(module)

    def _keep(self, module: nn.Module) -> None:
        if module in self._modules or not _statistics(module):
            return
        self._modules.add(module)
        if module.training:
            with torch.no_grad():
                for tensors in _by_dtype(_statistics(module)):
                    self._held.append((tensors, copies(tensors)))


class RandomStates:
    """Lets the second pass draw the same random numbers as the first, and advances them once."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = sorted({d for d in devices if d.type == "cuda"}, key=str)

    def read(self) -> list[Tensor]:
        """Return the states of the CPU's and the devices' default generators."""
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in self._devices)]

    def write(self, states: list[Tensor]) -> None:
        """Set the generators to states that `read` returned."""
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            torch.cuda.set_rng_state(state, device)


__all__ = ["RandomStates", "RunningStatistics"]
