"""Whether there is a Triton that makes kernels here, and how they are launched."""

import functools
import importlib.util
from typing import Any

import torch

from wsam.bases import ADAM, COLUMNS, DECAY, DECOUPLED, KEPT
from wsam.block import places
from wsam.checks import warn
from wsam.plan import TILE, Plan

WARPS = 8


@functools.cache
def available() -> bool:
    """Whether Triton is there to make the kernels."""
    return importlib.util.find_spec("triton") is not None


class Launcher:
    """Launches kernels on one device.

    Triton looks at all arguments before each launch to find out which variant of a kernel they need,
    which takes the host as long as the launch itself. Here the constants tell: all tensors begin at
    addresses that are multiples of 16, and kernels do not depend on the values of other arguments.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._made: dict[tuple[Any, ...], Any] = {}
        self._directly = True

    def __call__(self, name: str, programs: int, *given: Any, **constants: Any) -> None:
        """Launch a kernel of `wsam._triton`, its constants in the order in which it takes them."""
        key = (name, *constants.values())
        made = self._made.get(key)
        if made is not None:
            try:
                made[programs, 1, 1](*given, *constants.values(), stream=self._stream())
                return
            except TypeError:  # older ones are given neither the constants again nor a stream
                self._made, self._directly = {}, False
        from wsam import _triton

        run = getattr(_triton, name)[(programs,)]
        made = run(*given, **constants, num_warps=WARPS)
        if made is not None and self._directly:
            self._made[key] = made

    def _stream(self) -> int | None:
        """Return where to launch: Triton would look for device and stream by longer ways."""
        found: Any = torch.cuda.current_stream(self._device) if self._device is not None else None
        return None if found is None else found.cuda_stream


@functools.cache
def kernels_work_on(device: torch.device) -> bool:
    """Whether Triton can make a kernel for the device: it needs a compiler and a GPU it knows."""
    if not available():
        return False
    rows, partial = torch.ones(7, 4, device=device), torch.zeros(2, device=device)
    numbers = torch.full((COLUMNS,), -0.5, dtype=torch.float64, device=device)  # whatever they are
    plan = Plan([rows[0]], device)
    table = torch.tensor(places(rows.unbind()), device=device)
    shape, launch = (plan.where, plan.offset, plan.sizes), Launcher(device)
    try:
        for first in range(2):  # made, and launched again
            launch("squares", 1, table, *shape, partial, first, 1, BLOCK=TILE)
        richest = KEPT | DECAY | ADAM | DECOUPLED
        launch("finish", 1, table, *shape, numbers, 1, BRANCHES=richest, BLOCK=TILE)
    except Exception as error:  # whatever it is, training goes on without
        warn(f"Triton is installed and cannot make kernels, so steps go without: {error}")
        return False
    return partial.tolist() == [4.0, 4.0]
