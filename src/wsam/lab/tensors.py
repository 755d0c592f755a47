"""Files of tensors, opened without ever running code, whatever the file turns out to be."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

_ARCHIVE, _PICKLE = b"PK", b"\x80"
_CHUNK = 1 << 20
_CODE = re.compile(r"Unsupported (?:global: GLOBAL|class) (\S+)")


class NotTensorsError(ValueError):
    """A file that cannot be loaded without running code, or at all; the message says why."""


def load(source: Path | IO[bytes]) -> Any:
    """Load what `torch.save` wrote, to the CPU: tensors and primitives alone.

    Raises:
        NotTensorsError: Something else. The message is a part of a sentence, after a colon.
        OSError: The file cannot be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has advice beside what is raised
            return torch.load(source, map_location="cpu", weights_only=True)
    except MemoryError:  # which says nothing of what the file holds
        raise
    # Whatever bytes may make of an unpickler: IndexError, KeyError, struct.error and others. An
    # OSError too: in an archive that was cut, torch looks for bytes where there are none.
    except Exception as error:
        if isinstance(error, OSError):
            _read_through(source)
        raise NotTensorsError(_why(error, _start(source))) from error


def unusual(tensor: Tensor) -> str | None:
    """Say in a word why a tensor is no array of real numbers; None where it is one.

    Example:
        >>> unusual(torch.eye(2).to_sparse()), unusual(torch.eye(2))
        ('sparse', None)
    """
    if tensor.is_meta:
        return "meta"
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_nested:
        return "nested"
    if tensor.layout is not torch.strided:
        return "sparse"
    return "complex" if tensor.is_complex() else None


def _read_through(source: Path | IO[bytes]) -> None:
    """Raise the error of a file that cannot be read: one that can is to blame for what it holds."""
    if isinstance(source, Path):
        with source.open("rb") as file:
            while file.read(_CHUNK):
                pass


def _start(source: Path | IO[bytes]) -> bytes:
    if isinstance(source, Path):
        with source.open("rb") as file:
            return file.read(2)
    source.seek(0)
    return source.read(2)


def _why(error: Exception, start: bytes) -> str:
    """Say it in our words: torch's own advise to switch the guard against code off."""
    if not start:
        return "it is empty"
    if not start.startswith((_ARCHIVE, _PICKLE)):
        return "it was not written by torch.save"
    message = str(error)
    if "TorchScript" in message:
        return "it is a TorchScript archive; save the model's state_dict() instead"
    if found := _CODE.search(message):
        return f"it holds {found.group(1).rstrip('.,')}, and to load that means to run code"
    return "it is damaged, or was not written by torch.save"
