"""Hardware, library versions and commit of a run, as stored in its record."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from wsam._version import __version__

Environment = dict[str, Any]
"""Hardware, versions and commit; in the list of a checkpoint also ``execution`` and ``epochs``."""
COMMIT_VARIABLE = "WSAM_COMMIT"
MPS_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"


def describe_environment(device: torch.device) -> Environment:
    """Return hardware, versions and commit."""
    return {"hardware": hardware(device), "versions": versions(), "commit": commit()}


def add_epochs(
    environments: list[Environment], current: Environment, epochs: int
) -> list[Environment]:
    """Return the environments a run was trained in, with the number of epochs in each.

    Args:
        environments: The previous return value of this function.
        current: The environment of this process.
        epochs: How many epochs this process trained.

    Example:
        >>> add_epochs([{"commit": "a", "epochs": 3}], {"commit": "a"}, 2)
        [{'commit': 'a', 'epochs': 5}]
    """
    same = [known for known in environments if {**known, "epochs": 0} == {**current, "epochs": 0}]
    total = epochs + sum(known["epochs"] for known in same)
    return [*(known for known in environments if known not in same), {**current, "epochs": total}]


def differences(environments: list[Environment], current: Environment) -> list[Environment]:
    """Return the entries of each environment that differ from `current`; equal ones are left out.

    Example:
        >>> differences([{"commit": "a", "gpu": "x", "epochs": 3}], {"commit": "b", "gpu": "x"})
        [{'commit': 'a', 'epochs': 3}]
    """
    found = [{n: v for n, v in known.items() if current.get(n) != v} for known in environments]
    return [entries for entries in found if entries.keys() != {"epochs"}]


def hardware(device: torch.device) -> dict[str, Any]:
    """Return processor, cores and GPU or threads; no host or user names.

    ``shared`` is True under CUDA's Multi-Process Service, which runs several programs on a GPU at the
    same time: the times of such a run are not comparable with others.
    """
    found: dict[str, Any] = {"cpu": cpu_name(), "cores": os.cpu_count()}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        if MPS_VARIABLE in os.environ:
            found["shared"] = True
    else:
        found["threads"] = torch.get_num_threads()
    return found


def available_cores() -> int:
    """Return how many cores this process may use; batch systems often restrict them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def versions() -> dict[str, str | None]:
    """Return the versions of wsam, Python, torch, CUDA and cuDNN."""
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {
        "wsam": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a subclass of str, which weights_only refuses to load
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
    }


def commit() -> str | None:
    """Return the commit of the source tree, with ``+changes`` if files differ from it.

    The environment variable ``WSAM_COMMIT`` takes precedence, for copies without git history. None
    for an installed package.
    """
    if given := os.environ.get(COMMIT_VARIABLE):
        return given
    package = Path(__file__).resolve().parents[1]
    top = _git(package, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() / "src" / "wsam" != package:
        return None  # installed inside the repository of another project
    head = _git(package, "rev-parse", "HEAD")
    changes = _git(package, "status", "--porcelain", "--", ".")
    return f"{head}+changes" if head and changes else head


def short_commit(commit: str) -> str:
    """Return a commit shortened to twelve digits, with its suffix.

    Example:
        >>> short_commit("0123456789abcdef+changes")
        '0123456789ab+changes'
    """
    head, plus, changes = commit.partition("+")
    return head[:12] + plus + changes


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
