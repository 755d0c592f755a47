"""Files of tensors, which `torch.save` wrote. Loading them never executes code."""

from __future__ import annotations

import io
import re
import warnings
from typing import Any

import torch

_DISALLOWED_GLOBAL = re.compile(r"Unsupported (?:global: GLOBAL|class) (\S+)")


class NotTensorsError(ValueError):
    """A file that cannot be loaded without executing code, or at all."""


def load_tensors(data: bytes) -> Any:
    """Load the contents of a file written by `torch.save` to the CPU: tensors and primitives only.

    Raises:
        NotTensorsError: The file is damaged or holds other objects. The message gives the reason
            as a clause that follows a colon.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error raised below covers them
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except MemoryError:  # does not depend on the file's contents
        raise
    # Arbitrary bytes make the unpickler raise IndexError, KeyError, struct.error and others; a
    # truncated archive OSError. torch's own messages suggest `weights_only=False`.
    except Exception as error:
        reason = "it is damaged, or was not written by torch.save"
        if found := _DISALLOWED_GLOBAL.search(str(error)):
            reason = f"it contains {found.group(1).rstrip('.,')}, which cannot be loaded safely"
        raise NotTensorsError(reason) from error
