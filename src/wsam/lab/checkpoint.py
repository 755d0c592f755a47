"""Checkpoints that survive kill -9, damage and a full disk, and that never run code.

A checkpoint is two files: ``NUMBER.pt`` (tensors and primitives) and, written after it,
``NUMBER.json``, its manifest with size and SHA-256. It exists once the manifest does. The newest
two that are whole are kept; loading takes the newest that is whole, and changes nothing: whoever
looks at a run that another process works on must not. Damaged ones go once a new one is saved.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from wsam.lab import tensors
from wsam.lab.files import TEMPORARY, quiet, sha256, sync_folder, write_atomic

State = dict[str, Any]
_KEPT = 2
"""Checkpoints of a run: one more than is loaded, for the newest may turn out to be damaged."""
_BEFORE = "falling back to the one before"
_ANEW = "none before it is left, so the run begins anew"


class DamagedError(ValueError):
    """A checkpoint that is not what was written."""


def save_state(path: Path, state: State) -> None:
    """Save tensors and primitives in `path`, then their manifest beside it (``.json``)."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    write_atomic(path, data)
    manifest = {"file": path.name, "bytes": len(data), "sha256": sha256(data)}
    write_atomic(path.with_suffix(".json"), json.dumps(manifest).encode())


def load_state(path: Path) -> State:
    """Load what `save_state` saved, to the CPU, after checking it against its manifest.

    Raises:
        DamagedError: Missing, truncated, altered, or holding anything but tensors and primitives.
    """
    try:
        # The bytes checked are the bytes loaded.
        state = tensors.load(io.BytesIO(_checked(path)))
    except tensors.NotTensorsError as error:
        raise DamagedError(f"{path} does not hold tensors and primitives alone: {error}") from error
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from error
    if not isinstance(state, dict):
        raise DamagedError(f"{path} does not hold a dictionary")
    return state


def has_manifest(path: Path) -> bool:
    """Tell whether the ``.json`` beside a file is what `save_state` writes, not anything else."""
    try:
        found = json.loads(path.with_suffix(".json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"file", "sha256"} <= found.keys()


def _checked(path: Path) -> bytes:
    """Return a file's bytes, which are what its manifest says.

    Raises:
        DamagedError: They are not.
        OSError: That cannot be told, for they cannot be read.
    """
    try:
        manifest = json.loads(path.with_suffix(".json").read_bytes())
        size, digest = manifest["bytes"], manifest["sha256"]
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"the manifest of {path} is missing or damaged") from error
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing") from error
    if len(data) != size:
        raise DamagedError(f"{path} is damaged: {len(data)} bytes instead of {size}")
    if sha256(data) != digest:
        raise DamagedError(f"{path} is damaged: its SHA-256 is not the manifest's")
    return data


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: Where they live; nobody else writes there meanwhile.
        say: Takes a message about each damaged checkpoint that is passed over.

    Example:
        >>> import tempfile
        >>> checkpoints = Checkpoints(Path(tempfile.mkdtemp()))
        >>> checkpoints.save(1, {"epoch": 1})
        >>> checkpoints.load()
        {'epoch': 1}
    """

    def __init__(self, folder: Path, say: Callable[[str], None] = quiet) -> None:
        self.folder = folder
        self.say = say
        self._whole: set[int] = set()
        self._passed: set[int] = set()

    def save(self, number: int, state: State) -> None:
        """Save a checkpoint, then remove the damaged ones and all but the newest two.

        The one just saved stays, whatever the numbers of the others. One that was passed over
        though nothing is wrong with its bytes is left: it may be readable later, or elsewhere.
        """
        save_state(self._path(number), state)
        self._whole.add(number)
        self._passed.discard(number)
        room = _KEPT - 1
        for other in self._numbers():
            if other == number:
                continue
            whole = self._is_whole(other)
            counts = whole and other not in self._passed
            if whole is False or (counts and room <= 0):
                self._remove(other)
            elif counts:
                room -= 1

    def _is_whole(self, number: int) -> bool | None:
        """Whether a checkpoint's bytes are what its manifest says; None where that cannot be told."""
        if number in self._whole:
            return True
        try:
            _checked(self._path(number))
        except DamagedError:
            return False
        except OSError:
            return None
        self._whole.add(number)
        return True

    @property
    def newest(self) -> int | None:
        """The number of the newest, whole or not; None where there is none."""
        return next(iter(self._numbers()), None)

    def load(self) -> State | None:
        """Return the newest checkpoint that is whole, or None; damaged ones are told of."""
        numbers = self._numbers()
        for number in numbers:
            try:
                state = load_state(self._path(number))
            except DamagedError as error:
                last = number == numbers[-1]
                self.say(f"{error}; {_ANEW if last else _BEFORE}")
                self._passed.add(number)
            else:
                self._whole.add(number)
                return state
        return None

    def clear(self) -> None:
        """Remove all checkpoints and whatever a killed process left half-written."""
        for number in self._numbers():
            self._remove(number)
        if self.folder.is_dir():
            for left in (*self.folder.glob("*.pt"), *self.folder.glob(f"*{TEMPORARY}")):
                left.unlink()
            with suppress(OSError):
                self.folder.rmdir()

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.pt"

    def _numbers(self) -> list[int]:
        names = (path.stem for path in self.folder.glob("*.json"))
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def _remove(self, number: int) -> None:
        # The manifest goes first: without it the data is no checkpoint, never the other way.
        self._path(number).with_suffix(".json").unlink(missing_ok=True)
        sync_folder(self.folder)
        self._path(number).unlink(missing_ok=True)
