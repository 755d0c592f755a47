"""Files of tensors, opened without ever running code, whatever the file turns out to be."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import IO, Any

import torch

_ARCHIVE, _PICKLE = b"PK", b"\x80"
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
    except (OSError, MemoryError):  # which say nothing of what the file holds
        raise
    # Whatever bytes may make of an unpickler: IndexError, KeyError, struct.error and others.
    except Exception as error:
        raise NotTensorsError(_why(error, _start(source))) from error


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
