"""Files of tensors, which `torch.save` wrote. Loading them never executes code."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from wsam.lab.files import require_regular

_ZIP, _PICKLE = b"PK", b"\x80"
_DISALLOWED_GLOBAL = re.compile(r"Unsupported (?:global: GLOBAL|class) (\S+)")


class NotTensorsError(ValueError):
    """A file that cannot be loaded without executing code, or at all."""


def load_tensors(source: Path | IO[bytes]) -> Any:
    """Load a file written by `torch.save` to the CPU: tensors and primitives only.

    Raises:
        NotTensorsError: The file is damaged or holds other objects. The message gives the reason
            as a clause that follows a colon.
        OSError: The file cannot be read.
    """
    if isinstance(source, Path):
        try:
            require_regular(source)
        except ValueError as error:
            raise NotTensorsError(f"it {error}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error raised below covers them
            return torch.load(source, map_location="cpu", weights_only=True)
    except MemoryError:  # does not depend on the file's contents
        raise
    # Arbitrary bytes make the unpickler raise IndexError, KeyError, struct.error and others. A
    # truncated archive makes torch seek out of bounds, which raises OSError.
    except Exception as error:
        if isinstance(error, OSError) and isinstance(source, Path):
            source.read_bytes()  # raises if the file is unreadable rather than damaged
        raise NotTensorsError(_reason(error, _first_bytes(source))) from error


def unsupported_layout(tensor: Tensor) -> str | None:
    """Return the kind of a tensor that is not a dense array of real numbers, else None.

    Example:
        >>> unsupported_layout(torch.eye(2).to_sparse()), unsupported_layout(torch.eye(2))
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


def _first_bytes(source: Path | IO[bytes]) -> bytes:
    if isinstance(source, Path):
        with source.open("rb") as file:
            return file.read(2)
    source.seek(0)
    return source.read(2)


def _reason(error: Exception, start: bytes) -> str:
    """Return why loading failed. torch's own messages suggest ``weights_only=False``."""
    if not start:
        return "it is empty"
    if not start.startswith((_ZIP, _PICKLE)):
        return "it was not written by torch.save"
    message = str(error)
    if "TorchScript" in message:
        return "it is a TorchScript archive; save the model's state_dict() instead"
    if found := _DISALLOWED_GLOBAL.search(message):
        return f"it contains {found.group(1).rstrip('.,')}, which cannot be loaded safely"
    return "it is damaged, or was not written by torch.save"
