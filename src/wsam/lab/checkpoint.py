"""Checkpoints that survive ``kill -9``, damage and a full disk. Loading them never executes code.

A checkpoint is two files: ``NUMBER.pt`` (tensors and primitives) and its manifest ``NUMBER.json``
with size and SHA-256, written after it. A checkpoint without a manifest is ignored. The newest two
intact checkpoints are kept. `Checkpoints.load` returns the newest intact one and changes no files,
so another process may read the folder of a running job. `Checkpoints.save` removes all others.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from wsam.lab.files import (
    TEMPORARY,
    fsync_folder,
    no_op,
    read_regular,
    sha256,
    write_atomic,
)
from wsam.lab.records import read_json
from wsam.lab.tensor_files import NotTensorsError, load_tensors

State = dict[str, Any]


# One checkpoint ---------------------------------------------------------------------------------


class DamagedError(ValueError):
    """A checkpoint is missing, truncated, altered or not a checkpoint."""


def save_state(path: Path, state: State) -> None:
    """Save tensors and primitives to `path`, then a manifest with the suffix ``.json``.

    Only one process may write to the folder at a time: temporary files of killed processes are
    removed.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    for temporary in path.parent.glob(f"*{TEMPORARY}"):
        temporary.unlink()
    write_atomic(path, data)
    manifest = {"file": path.name, "bytes": len(data), "sha256": sha256(data)}
    write_atomic(path.with_suffix(".json"), json.dumps(manifest).encode())


def load_state(path: Path) -> State:
    """Load a file written by `save_state` to the CPU, after checking it against its manifest.

    Raises:
        DamagedError: The file is missing, truncated or altered, or does not hold tensors and
            primitives.
    """
    try:
        return load_tensors(_verified_bytes(path))  # type: ignore[no-any-return]
    except NotTensorsError as error:
        raise DamagedError(
            f"{path} does not contain tensors and primitives only: {error}"
        ) from error
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from error


def has_manifest(path: Path) -> bool:
    """Return whether a file has a manifest as written by `save_state`."""
    try:
        manifest = read_json(path.with_suffix(".json"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and {"file", "sha256"} <= manifest.keys()


def _verified_bytes(path: Path) -> bytes:
    """Return a file's contents after checking them against the manifest.

    Raises:
        DamagedError: The contents do not match, a file is missing, or the manifest is damaged.
        OSError: A file cannot be read.
    """
    try:
        digest = read_json(path.with_suffix(".json"))["sha256"]
        data = read_regular(path)
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path} or its manifest is missing or damaged") from error
    if sha256(data) != digest:
        raise DamagedError(f"{path} is damaged: its SHA-256 does not match the manifest")
    return data


# The checkpoints of a run -----------------------------------------------------------------------


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: Where they are stored. Only one process may write there at a time.
        log: Called with a message for each damaged checkpoint that `load` skips.

    Example:
        >>> import tempfile
        >>> checkpoints = Checkpoints(Path(tempfile.mkdtemp()))
        >>> checkpoints.save(1, {"epoch": 1})
        >>> checkpoints.load()
        {'epoch': 1}
    """

    def __init__(self, folder: Path, log: Callable[[str], None] = no_op) -> None:
        self.folder = folder
        self.log = log
        self._intact: set[int] = set()  # saved or loaded here, so not read again

    def save(self, number: int, state: State) -> None:
        """Save a checkpoint; keep it and the newest other intact one, and remove the rest."""
        save_state(self._path(number), state)
        self._intact.add(number)
        others = [other for other in self._numbers() if other != number]
        previous = next(filter(self._is_intact, others), None)
        for other in others:
            if other != previous:
                self._remove(other)

    def _is_intact(self, number: int) -> bool:
        if number in self._intact:
            return True
        try:
            load_state(self._path(number))
        except DamagedError:
            return False
        return True

    @property
    def newest(self) -> int | None:
        """The number of the newest checkpoint, intact or not; None if there is none."""
        return next(iter(self._numbers()), None)

    def load(self) -> State | None:
        """Return the newest intact checkpoint, or None; log a message for each skipped one."""
        numbers = self._numbers()
        for number in numbers:
            try:
                state = load_state(self._path(number))
            except DamagedError as error:
                is_last = number == numbers[-1]
                instead = "restarting the run" if is_last else "falling back to the previous one"
                self.log(f"{error}; {instead}")
            else:
                self._intact.add(number)
                return state
        return None

    def clear(self) -> None:
        """Remove all checkpoints and temporary files, and the folder if it is then empty."""
        for number in self._numbers():
            self._remove(number)
        for path in (*self.folder.glob("*.pt"), *self.folder.glob(f"*{TEMPORARY}")):
            path.unlink()
        with suppress(OSError):
            self.folder.rmdir()

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.pt"

    def _numbers(self) -> list[int]:
        names = (path.stem for path in self.folder.glob("*.json"))
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def _remove(self, number: int) -> None:
        # Manifest first: data without a manifest is ignored, a manifest without data is damage.
        self._path(number).with_suffix(".json").unlink()
        fsync_folder(self.folder)
        self._path(number).unlink(missing_ok=True)
