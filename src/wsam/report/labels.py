"""What people read: names of groups and of experiments, and how each is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from wsam.lab.names import Value
from wsam.lab.run import Run
from wsam.report.gather import Group, group_key
from wsam.report.svg import Look

METHODS = {
    "sam": "SAM",
    "wsam": "WSAM",
    "coupled_wsam": "Coupled-WSAM",
    "gsam": "GSAM",
    "esam": "ESAM",
    "asam": "ASAM",
    "fisher_sam": "Fisher SAM",
}
GREEK = {"rho": "ρ", "gamma": "γ", "alpha": "α", "beta": "β", "eta": "η", "rho_min": "ρ min"}
Setting = Callable[[Run], object]
_VARYING: dict[str, Setting] = {
    "base": lambda run: run.base,
    "batch": lambda run: run.batch_size,
    "schedule": lambda run: run.schedule,
    "precision": lambda run: run.precision,
    "augment": lambda run: run.augment,
    "pretrained": lambda run: run.pretrained,
    "train images": lambda run: run.train_limit,
    "test images": lambda run: run.test_limit,
}


@dataclass(frozen=True)
class Line:
    """A group with its name and its look."""

    group: Group
    name: str
    look: Look


@dataclass(frozen=True)
class Experiment:
    """Groups that may be compared: same data, same model, same noise."""

    title: str
    lines: tuple[Line, ...]


def experiments(
    groups: Sequence[Group], names: Mapping[str, str] | None = None
) -> list[Experiment]:
    """Sort groups by data, model and noise, and give each a name and a look.

    Args:
        groups: As `gather` returns them.
        names: Names of one's own for some groups, by `gather.group_key`.
    """
    by_place: dict[str, list[Group]] = {}
    for group in groups:
        by_place.setdefault(experiment_title(group.run), []).append(group)
    return [Experiment(title, tuple(_lines(mine, names or {}))) for title, mine in by_place.items()]


def named(folder: Path) -> str:
    """Return a folder's name; of one named ``runs``, as many are, with what it lies in."""
    path = folder.resolve()
    return f"{path.parent.name}/{path.name}" if path.name == "runs" else path.name


def experiment_title(run: Run) -> str:
    """Return ``digits, cnn, 40% of the labels redrawn``."""
    noise = f", {100 * run.noise:g}% of the labels redrawn" if run.noise else ""
    return f"{run.data}, {run.model}{noise}"


def _lines(groups: Sequence[Group], names: Mapping[str, str]) -> list[Line]:
    seen: dict[str, int] = {}
    varying = _varying([group.run for group in groups])
    made = []
    for group in groups:
        method = group.run.method
        name = names.get(group_key(group.run)) or label(group.run, varying)
        made.append(Line(group, name, Look(_color(method), seen.get(method, 0))))
        seen[method] = seen.get(method, 0) + 1
    return made


def _color(method: str) -> str:
    return method if method == "vanilla" or method in METHODS else "ink"


def _varying(runs: Sequence[Run]) -> dict[str, Setting]:
    """Return the settings, beside method and epochs, in which some runs differ."""
    settings = dict(_VARYING)
    arguments = {name for run in runs for name in run.base_args}
    if len({run.base for run in runs}) == 1:
        for name in sorted(arguments):
            settings[name.replace("_", " ")] = _argument(name)
    return {name: get for name, get in settings.items() if len({str(get(r)) for r in runs}) > 1}


def _argument(name: str) -> Setting:
    return lambda run: run.base_args.get(name)


def label(run: Run, varying: Mapping[str, Setting] | None = None) -> str:
    """Return a short name: ``WSAM γ 0.88, ρ 0.2``.

    Args:
        run: Any run of the group.
        varying: Further settings to name, each by a function of a run.
    """
    method = METHODS.get(run.method, run.method)
    name = run.base.upper() if run.method == "vanilla" else method
    parts = [f"{GREEK.get(k, k)} {_text(v)}" for k, v in run.hyper.items() if v is not None]
    if run.geometry is not None:
        parts.insert(0, str(run.geometry["name"]))
    parts += [k.replace("_", " ") for k, v in run.options.items() if v]
    for key, get in (varying or {}).items():
        value = get(run)
        if value is not None:
            parts.append(f"{key} {_text(value)}")
    return f"{name} {', '.join(parts)}".strip()


def _text(value: object | Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
