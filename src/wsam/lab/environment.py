"""What a run ran on: hardware, versions and commit, as a record tells them."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from wsam._version import __version__

Facts = dict[str, Any]
COMMIT_VARIABLE = "WSAM_COMMIT"


def facts(device: torch.device) -> Facts:
    """Return hardware, versions and commit, as every record carries them."""
    return {"hardware": hardware(device), "versions": versions(), "commit": commit()}


def with_session(sessions: list[Facts], facts: Facts, epochs: int) -> list[Facts]:
    """Return what the sessions of a run ran on, each distinct kind once, after one more session.

    Args:
        sessions: Those before, as this function returned them.
        facts: Of the session.
        epochs: How many it made. A kind's entry has the sum under this name.

    Example:
        >>> with_session([{"commit": "a", "epochs": 3}], {"commit": "a"}, 2)
        [{'commit': 'a', 'epochs': 5}]
    """
    same = [kind for kind in sessions if {**kind, "epochs": 0} == {**facts, "epochs": 0}]
    made = epochs + sum(kind["epochs"] for kind in same)
    return [*(kind for kind in sessions if kind not in same), {**facts, "epochs": made}]


def differing(sessions: list[Facts], facts: Facts) -> list[Facts]:
    """Return of each kind of session what is not as in `facts`; nothing of those that agree.

    Example:
        >>> differing([{"commit": "a", "gpu": "x", "epochs": 3}], {"commit": "b", "gpu": "x"})
        [{'commit': 'a', 'epochs': 3}]
    """
    kinds = [{n: v for n, v in kind.items() if facts.get(n) != v} for kind in sessions]
    return [kind for kind in kinds if kind.keys() != {"epochs"}]


def hardware(device: torch.device) -> dict[str, Any]:
    """Return what is worth knowing about the machine; no names of hosts or users."""
    facts: dict[str, Any] = {"cpu": cpu_name(), "cores": os.cpu_count()}
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    else:
        facts["threads"] = torch.get_num_threads()
    return facts


def cores() -> int:
    """Return how many cores this process may use: a batch system often lends it but a few."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    """Return the processor's name as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def versions() -> dict[str, str | None]:
    """Return the versions that decide what a run computes."""
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {
        "wsam": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a subclass, which a checkpoint may not hold
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
    }


def commit() -> str | None:
    """Return the commit of the source tree, ``+changes`` added where files differ from it.

    Where the tree came without its history, ``WSAM_COMMIT`` says it. None for an installed copy.
    """
    if given := os.environ.get(COMMIT_VARIABLE):
        return given
    package = Path(__file__).resolve().parents[1]
    top = _git(package, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() / "src" / "wsam" != package:
        return None  # some other project's history, around an installed copy
    head = _git(package, "rev-parse", "HEAD")
    changes = _git(package, "status", "--porcelain", "--", ".")
    return f"{head}+changes" if head and changes else head


def short_commit(commit: str) -> str:
    """Return a commit as people read it: twelve digits, and what was added to it.

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
