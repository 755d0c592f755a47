"""Names of groups and experiments, and the line style of each group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wsam._utils.plot_style import METHOD_STYLES, SHADE_COUNT
from wsam._utils.text import pluralize
from wsam.lab.settings import VANILLA
from wsam.lab.titles import experiment_title, figure_name, group_names
from wsam.report.charts import LineStyle
from wsam.report.results import Group

_DASHES = tuple(dict.fromkeys(style.dashes for style in METHOD_STYLES.values()))
MAX_LINES = len(_DASHES)
"""More lines are not distinguishable without color."""
MAX_LINES_PER_METHOD = SHADE_COUNT
"""One shade for each line of a method; the rest is for other methods to compare with."""
_FALLBACK_STYLES = (
    *("friendly_sam", "gsam", "coupled_wsam", "esam", "fisher_sam"),
    *("looksam", "vasso", "asam", "msam"),
)
"""Methods whose style a method without one gets, on a page that does not show them."""
_MAX_LISTED = 3
_SHADES = {2: (1, 3), 3: (1, 2, 3), 4: (0, 1, 2, 3)}
"""Shades by number of lines. The lightest, which differs most from the color, is used last."""


@dataclass(frozen=True)
class LabeledGroup:
    """A group with its name and its line style."""

    group: Group
    name: str
    style: LineStyle

    @property
    def key(self) -> str:
        """The key of the group's first run, which identifies the group."""
        return self.group.run.key

    @property
    def label(self) -> str:
        """The name and the number of failed runs, because figures exclude failed runs."""
        return ", ".join(part for part in (self.name, self.group.failures) if part)


@dataclass(frozen=True)
class Experiment:
    """Groups that can be compared: same data, model, label noise, metric and split."""

    title: str
    groups: tuple[LabeledGroup, ...]

    @property
    def metric(self) -> dict[str, Any]:
        """Name, unit, direction and split of the metric, as in the records."""
        return self.groups[0].group.metric

    @property
    def plotted(self) -> list[LabeledGroup]:
        """The groups whose curves are drawn."""
        return [item for item in self.groups if item.style.dashes is not None]


def experiments(groups: Sequence[Group]) -> list[Experiment]:
    """Return groups by data, model, noise, metric and split, each with a name and a line style."""
    by_title: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        title = experiment_title(group.run)
        by_title.setdefault((title, figure_name(group.metric)), []).append(group)
    shown_figures = Counter(title for title, _ in by_title)
    colors = method_colors(group.variant for group in groups)
    return [
        Experiment(
            title if shown_figures[title] == 1 else f"{title}, {figure}",
            tuple(_labeled(found, colors)),
        )
        for (title, figure), found in by_title.items()
    ]


def folder_name(folder: Path) -> str:
    """Return the name of a folder; ``runs`` is preceded by the name of its parent."""
    path = folder.resolve()
    return f"{path.parent.name}/{path.name}" if path.name == "runs" else path.name


def folder_title(groups: Sequence[Group]) -> str:
    """Return what a folder contains: ``digits, cnn: 12 runs``."""
    runs = [result.run for group in groups for result in group.results]
    if not runs:
        return "No runs"
    parts = [_listed([run.data for run in runs], "data sets")]
    parts.append(_listed([run.model for run in runs], "models"))
    noisy = sum(run.noise > 0 for run in runs)
    if noisy:
        parts.append("noisy labels" if noisy == len(runs) else "partly noisy labels")
    return f"{', '.join(parts)}: {pluralize(len(runs), 'run')}"


def _listed(names: Sequence[str], noun: str) -> str:
    """Return ``a``, ``a and b``, ``a, b and c``, or a number for more."""
    distinct = list(dict.fromkeys(names))
    if len(distinct) > _MAX_LISTED:
        return f"{len(distinct)} {noun}"
    return " and ".join(filter(None, (", ".join(distinct[:-1]), distinct[-1])))


def _labeled(groups: Sequence[Group], colors: Mapping[str, str]) -> list[LabeledGroup]:
    names = group_names([group.run for group in groups])
    found = [
        LabeledGroup(group, name, LineStyle(colors[group.variant]))
        for group, name in zip(groups, names, strict=True)
    ]
    return assign_shades(assign_dashes(found))


# ---- styles ----


def method_colors(methods: Iterable[str]) -> dict[str, str]:
    """Return the color of each method of a page, as a name in `METHOD_STYLES`.

    A method without a style, such as the user's own class, gets that of a method which the page does
    not show; ``ink`` if all are used.

    Example:
        >>> method_colors(["my.py:RandomSAM", "my.py:SmallSAM"])
        {'my.py:RandomSAM': 'friendly_sam', 'my.py:SmallSAM': 'gsam'}
    """
    shown = sorted(set(methods))
    free = (name for name in _FALLBACK_STYLES if name not in shown)
    return {name: name if name in METHOD_STYLES else next(free, "ink") for name in shown}


def select_best(groups: Sequence[LabeledGroup], limit: int) -> list[LabeledGroup]:
    """Return the groups with the best mean metric, in their own order.

    The metric is that of the validation split, if there is one. Groups with failed runs come last:
    their means cover the remaining runs only. The best group of each base optimizer without a method
    is always among them, to compare with.

    Args:
        groups: All groups.
        limit: How many to return; at most `MAX_LINES_PER_METHOD` of one method.
    """
    known = [item for item in groups if item.group.objective is not None]
    ranked = sorted(known, key=lambda item: (bool(item.group.failures), item.group.objective))
    bases: dict[str, LabeledGroup] = {}
    for item in ranked:
        if item.group.run.method == VANILLA:
            bases.setdefault(item.group.run.base, item)
    first = {item.key for item in bases.values()}
    selected: list[LabeledGroup] = []
    for item in sorted(ranked, key=lambda item: item.key not in first):
        same_method = sum(other.group.variant == item.group.variant for other in selected)
        if len(selected) < limit and same_method < MAX_LINES_PER_METHOD:
            selected.append(item)
    wanted = {item.key for item in selected}
    return [item for item in groups if item.key in wanted]


def assign_dashes(groups: Sequence[LabeledGroup]) -> list[LabeledGroup]:
    """Give unique dashes to every group whose curves are drawn.

    The first group of a method gets the dashes of the method, the others get unused ones.
    """
    plotted = select_best(groups, MAX_LINES)
    first = {g.style.color: g for g in reversed(plotted) if g.style.color in METHOD_STYLES}
    own = {item.key: METHOD_STYLES[method].dashes for method, item in first.items()}
    unused = (dashes for dashes in _DASHES if dashes not in own.values())
    dashes = {item.key: own[item.key] if item.key in own else next(unused) for item in plotted}
    return [replace(g, style=replace(g.style, dashes=dashes.get(g.key))) for g in groups]


def assign_shades(groups: Sequence[LabeledGroup]) -> list[LabeledGroup]:
    """Give groups of one method that are shown together shades of its color, light to dark."""
    by_method: dict[str, list[LabeledGroup]] = {}
    for item in select_best(groups, len(groups)):
        by_method.setdefault(item.style.color, []).append(item)
    shades: dict[str, int] = {}
    for method, items in by_method.items():
        if len(items) > 1 and method in METHOD_STYLES:
            keys = (item.key for item in items)
            shades |= dict(zip(keys, _SHADES[len(items)], strict=True))
    return [replace(g, style=replace(g.style, shade=shades.get(g.key))) for g in groups]
