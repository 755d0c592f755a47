"""Names of groups and experiments, and the line style of each group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wsam._format import mean_and_std
from wsam.lab.run import Run
from wsam.lab.settings import Value
from wsam.plot_style import METHOD_STYLES, SHADE_COUNT, method_title
from wsam.report.charts import LineStyle
from wsam.report.results import Group, group_key

_DASHES = tuple(dict.fromkeys(style.dashes for style in METHOD_STYLES.values()))
MAX_LINES = len(_DASHES)
"""More lines are not distinguishable without color."""
MAX_LINES_PER_METHOD = SHADE_COUNT
"""One shade for each line of a method; the rest is for other methods to compare with."""
_SHADES = {2: (1, 3), 3: (1, 2, 3), 4: (0, 1, 2, 3)}
"""Shades by number of lines. The lightest, which differs most from the color, is used last."""
GREEK = {"rho": "ρ", "gamma": "γ", "alpha": "α", "beta": "β", "eta": "η", "rho_min": "ρ min"}
Setting = Callable[[Run], object]
_SETTINGS: dict[str, Setting] = {
    "base": lambda run: run.base,
    "batch": lambda run: run.batch_size,
    "schedule": lambda run: run.schedule,
    "precision": lambda run: run.precision,
    "augment": lambda run: run.augment,
    "pretrained": lambda run: run.pretrained,
    "train images": lambda run: run.train_limit,
    "test images": lambda run: run.test_limit,
    "image size": lambda run: run.image_size,
    "block size": lambda run: run.block_size,
    "validation": lambda run: run.validation,
    "files": lambda run: ", ".join(run.digests.values()) or None,
}


@dataclass(frozen=True)
class LabeledGroup:
    """A group with its name and its line style."""

    group: Group
    name: str
    style: LineStyle

    @property
    def label(self) -> str:
        """The name and the number of failed runs, because figures exclude failed runs."""
        return ", ".join(part for part in (self.name, self.group.failures) if part)


@dataclass(frozen=True)
class Experiment:
    """Groups that can be compared: same data, same model, same label noise."""

    title: str
    groups: tuple[LabeledGroup, ...]

    @property
    def plotted(self) -> list[LabeledGroup]:
        """The groups whose curves are drawn."""
        return [item for item in self.groups if item.style.dashes is not None]


def experiments(
    groups: Sequence[Group], names: Mapping[str, str] | None = None
) -> list[Experiment]:
    """Return groups by data, model and noise, each group with a name and a line style.

    Args:
        groups: The groups of `gather`.
        names: Names that replace the generated ones, by `results.group_key`.
    """
    by_title: dict[str, list[Group]] = {}
    for group in groups:
        by_title.setdefault(experiment_title(group.run), []).append(group)
    return [
        Experiment(title, tuple(_labeled(found, names or {}))) for title, found in by_title.items()
    ]


def folder_title(folder: Path) -> str:
    """Return the name of a folder; ``runs`` is preceded by the name of its parent."""
    path = folder.resolve()
    return f"{path.parent.name}/{path.name}" if path.name == "runs" else path.name


def experiment_title(run: Run) -> str:
    """Return a title such as ``digits, cnn, 40% of the labels redrawn``."""
    noise = f", {100 * run.noise:g}% of the labels redrawn" if run.noise else ""
    metric = f", {run.metric}" if run.metric else ""
    return f"{run.data}, {run.model}{noise}{metric}"


def _labeled(groups: Sequence[Group], names: Mapping[str, str]) -> list[LabeledGroup]:
    varying = _varying_settings([group.run for group in groups])
    found = []
    for group in groups:
        method = group.run.method
        name = names.get(group_key(group.run)) or group_name(group.run, varying)
        style = LineStyle(method if method in METHOD_STYLES else "ink")
        found.append(LabeledGroup(group, name, style))
    return assign_shades(assign_dashes(found))


# ---- styles ----


def select_best(groups: Sequence[LabeledGroup], limit: int) -> list[LabeledGroup]:
    """Return the groups with the best mean metric, in their own order.

    Groups with failed runs come last: their means cover the remaining runs only.

    Args:
        groups: All groups.
        limit: How many to return; at most `MAX_LINES_PER_METHOD` of one method.
    """
    errors: dict[int, float | None] = {}
    for item in groups:
        mean, _ = mean_and_std(item.group.figures)
        higher_is_better = mean is not None and not item.group.metric["lower_is_better"]
        errors[id(item)] = -mean if higher_is_better else mean  # type: ignore[operator]
    known = [item for item in groups if errors[id(item)] is not None]
    selected: list[LabeledGroup] = []
    for item in sorted(known, key=lambda item: (bool(item.group.failures), errors[id(item)])):
        same_method = sum(other.style.color == item.style.color for other in selected)
        if len(selected) < limit and same_method < MAX_LINES_PER_METHOD:
            selected.append(item)
    wanted = set(map(id, selected))
    return [item for item in groups if id(item) in wanted]


def assign_dashes(groups: Sequence[LabeledGroup]) -> list[LabeledGroup]:
    """Give unique dashes to every group whose curves are drawn.

    The first group of a method gets the dashes of the method, the others get unused ones.
    """
    plotted = select_best(groups, MAX_LINES)
    first = {g.style.color: g for g in reversed(plotted) if g.style.color in METHOD_STYLES}
    own = {id(item): METHOD_STYLES[method].dashes for method, item in first.items()}
    unused = (dashes for dashes in _DASHES if dashes not in own.values())
    dashes = {id(item): own[id(item)] if id(item) in own else next(unused) for item in plotted}
    return [replace(g, style=replace(g.style, dashes=dashes.get(id(g)))) for g in groups]


def assign_shades(groups: Sequence[LabeledGroup]) -> list[LabeledGroup]:
    """Give groups of one method that are shown together shades of its color, light to dark."""
    by_method: dict[str, list[LabeledGroup]] = {}
    for item in select_best(groups, len(groups)):
        by_method.setdefault(item.style.color, []).append(item)
    shades: dict[int, int] = {}
    for method, items in by_method.items():
        if len(items) > 1 and method in METHOD_STYLES:
            shades |= dict(zip(map(id, items), _SHADES[len(items)], strict=True))
    return [replace(g, style=replace(g.style, shade=shades.get(id(g)))) for g in groups]


# ---- names ----


def _varying_settings(runs: Sequence[Run]) -> dict[str, Setting]:
    """Return the settings that differ between runs, other than the method's own.

    Arguments of bases and geometries are compared between runs of the same base or geometry. Epochs
    are compared between runs of a method, because the base alone often gets more of them.
    """
    found = {name: get for name, get in _SETTINGS.items() if _differ(runs, get)}
    lengths = Counter(method for method, _ in {(run.method, run.epochs) for run in runs})
    uneven = {method for method, different in lengths.items() if different > 1}
    if uneven:
        found["epochs"] = lambda run: run.epochs if run.method in uneven else None
    for name in sorted({name for run in runs for name in run.base_args}):
        if _differ(runs, _base_argument(name), lambda run: run.base):
            found[name.replace("_", " ")] = _base_argument(name)
    for name in sorted({name for run in runs for name in run.geometry or {}} - {"name"}):
        if _differ(runs, _geometry_argument(name), _geometry_argument("name")):
            found[f"geometry {GREEK.get(name, name.replace('_', ' '))}"] = _geometry_argument(name)
    return found


def _differ(runs: Sequence[Run], get: Setting, key: Setting | None = None) -> bool:
    """Return whether a setting differs between runs, or between runs with the same key."""
    values: dict[str, set[str]] = {}
    for run in runs:
        values.setdefault(str(key(run)) if key else "", set()).add(str(get(run)))
    return any(len(found) > 1 for found in values.values())


def _base_argument(name: str) -> Setting:
    return lambda run: run.base_args.get(name)


def _geometry_argument(name: str) -> Setting:
    return lambda run: (run.geometry or {}).get(name)


def group_name(run: Run, varying: Mapping[str, Setting] | None = None) -> str:
    """Return a short name: ``WSAM γ 0.88, ρ 0.2``.

    Args:
        run: Any run of the group.
        varying: Further settings to include, each as a function of a run.
    """
    name = run.base.upper() if run.method == "vanilla" else method_title(run.method)
    parts = [f"{GREEK.get(k, k)} {_text(v)}" for k, v in run.hyper.items() if v is not None]
    if run.geometry is not None:
        parts.insert(0, str(run.geometry["name"]))
    parts += [_option(k.replace("_", " "), v) for k, v in run.options.items()]
    for key, get in (varying or {}).items():
        value = get(run)
        if value is not None:
            parts.append(f"{key} {_text(value)}")
    return f"{name} {', '.join(parts)}".strip()


def _option(name: str, value: Value) -> str:
    """Return an option that is not at its default; a switch without its value."""
    return name if value is True else f"{name} {_text(value)}"


def _text(value: object | Value) -> str:
    if not isinstance(value, float):
        return str(value)
    short = f"{value:g}"
    return short if float(short) == value else str(value)
