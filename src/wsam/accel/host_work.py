"""Find what a loss function does on the host, which a CUDA graph would not repeat."""

import contextlib
import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch

_SYNCHRONIZED = "called a synchronizing CUDA operation"
"""The warning of torch's synchronization debug mode."""


@contextlib.contextmanager
def find_host_work(found: list[str]) -> Iterator[None]:
    """Append a sentence to `found` for what code in the `with` block does on the host.

    Found are synchronizations with the device, as by `item()`, and random numbers drawn by the CPU's
    generators. A CUDA graph cannot record the first and would repeat the second unchanged.
    """
    draws = _generator_states()
    with warnings.catch_warnings(record=True) as caught, _warn_about_synchronization():
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if _SYNCHRONIZED in str(warning.message):
            line = f"{warning.filename}, line {warning.lineno}"
            found.append(f"loss_fn synchronizes with the device ({line})")
        elif "Synchronization debug mode" not in str(warning.message):
            text, kind = warning.message, warning.category
            warnings.warn_explicit(text, kind, warning.filename, warning.lineno)
    after = _generator_states()
    found += [
        f"loss_fn draws random numbers from {name} on the host, which a CUDA graph would repeat"
        for name, state in draws.items()
        if state != after[name]
    ]


@contextlib.contextmanager
def _warn_about_synchronization() -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("warn")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _generator_states() -> dict[str, Any]:
    states: dict[str, Any] = {
        "torch": torch.get_rng_state().tolist(),
        "random": random.getstate(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *position = numpy.random.get_state()
        states["numpy"] = (name, keys.tobytes(), *position)
    return states
