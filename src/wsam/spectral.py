"""Spectral norms between the two passes: their power iteration moves with the first pass only."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm


def spectral_norms(module: nn.Module) -> list[Any]:
    """Return a module's spectral norms: hooks of the old kind, or itself one of the new."""
    if isinstance(module, _SpectralNorm):
        return [module] if module._buffers else []  # a vector's has none
    return [h for h in module._forward_pre_hooks.values() if isinstance(h, SpectralNorm)]


class _Stopped(int):
    """No iterations, in the place of a number of them, which a copy or a pickle of it is again."""

    iterations: int
    holders: set[int]

    def __new__(cls, iterations: int) -> "_Stopped":
        none = super().__new__(cls, 0)
        none.iterations, none.holders = iterations, set()
        return none

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (self.iterations,)


class PowerIterations:
    """Stops the iterations by which torch's two spectral norms follow their weight.

    With vectors u and v that stand still both passes divide by the same function <u, W v> of W. A
    norm that two optimizers have stopped goes on when both let it.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stopped: dict[Any, _Stopped] = {}
        # An optimizer that is given up in the middle of a step leaves no norm stopped.
        weakref.finalize(self, _resume, self._stopped).atexit = False

    def look_at(self, modules: Iterable[nn.Module]) -> None:
        """Find the spectral norms of modules."""
        for module in modules:
            self._known.update(spectral_norms(module))

    def stop(self) -> None:
        """Let no iteration happen; may be called again where others have been found."""
        for norm in list(self._known) if self._known else ():
            found = norm.n_power_iterations
            none = found if isinstance(found, _Stopped) else _Stopped(found)
            self._stopped[norm] = none
            none.holders.add(id(self._stopped))
            norm.n_power_iterations = none

    def resume(self) -> None:
        """Let them happen as before."""
        if self._stopped:
            _resume(self._stopped)


def _resume(stopped: dict[Any, _Stopped]) -> None:
    for norm, none in stopped.items():
        none.holders.discard(id(stopped))
        if not none.holders and norm.n_power_iterations is none:  # else somebody has set another
            norm.n_power_iterations = none.iterations
    stopped.clear()
