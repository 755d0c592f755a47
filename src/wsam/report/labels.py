"""What people read: names of groups and of experiments, and how each is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wsam._format import mean_and_std
from wsam.lab.run import Run
from wsam.lab.settings import Value
from wsam.plot_style import METHOD_STYLES, SHADE_COUNT, method_title
from wsam.report.gather import Group, group_key
from wsam.report.svg import Look

_DASHES = tuple(dict.fromkeys(look.dashes for look in METHOD_STYLES.values()))
MOST_LINES = len(_DASHES)
"""More lines than this cannot be told apart without colours."""
MOST_OF_ONE = SHADE_COUNT
"""As many lines of one method have shades of their own, and leave room for others to compare."""
_TONES_OF = {2: (1, 3), 3: (1, 2, 3), 4: (0, 1, 2, 3)}
"""Which shades so many lines of a method have: the faintest, far from its colour, where need be."""
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

    @property
    def told(self) -> str:
        """Its name and, where runs failed, how many: figures beside it are of the others alone."""
        return ", ".join(part for part in (self.name, self.group.failures) if part)


@dataclass(frozen=True)
class Experiment:
    """Groups that may be compared: same data, same model, same noise."""

    title: str
    lines: tuple[Line, ...]

    @property
    def drawn(self) -> list[Line]:
        """Those whose curves are drawn."""
        return [line for line in self.lines if line.look.dashes is not None]


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
    varying = _varying([group.run for group in groups])
    made = []
    for group in groups:
        method = group.run.method
        name = names.get(group_key(group.run)) or label(group.run, varying)
        made.append(Line(group, name, Look(method if method in METHOD_STYLES else "ink")))
    return toned(dashed(made))


def best(lines: Sequence[Line], most: int) -> list[Line]:
    """Return the lines with the smallest mean error, in their own order.

    Those with failed runs come after those without: their means are of the survivors alone.

    Args:
        lines: All there are.
        most: How many; of one method at most `MOST_OF_ONE`.
    """
    errors = {id(line): mean_and_std(line.group.values("test_error"))[0] for line in lines}
    known = [line for line in lines if errors[id(line)] is not None]
    kept: list[Line] = []
    for line in sorted(known, key=lambda line: (bool(line.group.failures), errors[id(line)])):
        alike = sum(other.look.color == line.look.color for other in kept)
        if len(kept) < most and alike < MOST_OF_ONE:
            kept.append(line)
    wanted = {id(line) for line in kept}
    return [line for line in lines if id(line) in wanted]


def dashed(lines: Sequence[Line]) -> list[Line]:
    """Give each line that is to be drawn dashes that no other has.

    The first of a method has the method's own, further ones what is left over.
    """
    drawn = best(lines, MOST_LINES)
    own = {line.look.color: line for line in reversed(drawn) if line.look.color in METHOD_STYLES}
    taken = {METHOD_STYLES[method].dashes for method in own}
    free = (dashes for dashes in _DASHES if dashes not in taken)
    given = {
        id(line): METHOD_STYLES[line.look.color].dashes
        if own.get(line.look.color) is line
        else next(free)
        for line in drawn
    }
    return [replace(line, look=replace(line.look, dashes=given.get(id(line)))) for line in lines]


def toned(lines: Sequence[Line]) -> list[Line]:
    """Give lines of one method that are shown together shades of its colour, from faint to strong."""
    by_method: dict[str, list[Line]] = {}
    for line in best(lines, len(lines)):
        by_method.setdefault(line.look.color, []).append(line)
    shades: dict[int, int] = {}
    for method, mine in by_method.items():
        if len(mine) > 1 and method in METHOD_STYLES:
            chosen = _TONES_OF[len(mine)]
            shades |= {id(line): tone for line, tone in zip(mine, chosen, strict=True)}
    return [replace(line, look=replace(line.look, tone=shades.get(id(line)))) for line in lines]


def _varying(runs: Sequence[Run]) -> dict[str, Setting]:
    """Return the settings, beside the method's own, in which some runs differ.

    Bases and geometries have arguments of their own, so that these are compared among runs of the
    same one; and epochs among runs of a method, and named for those alone: the base by itself often
    gets more of them.
    """
    found = {name: get for name, get in _VARYING.items() if _differ(runs, get)}
    lengths = Counter(method for method, _ in {(run.method, run.epochs) for run in runs})
    uneven = {method for method, different in lengths.items() if different > 1}
    if uneven:
        found["epochs"] = lambda run: run.epochs if run.method in uneven else None
    for name in sorted({name for run in runs for name in run.base_args}):
        if _differ(runs, _argument(name), lambda run: run.base):
            found[name.replace("_", " ")] = _argument(name)
    for name in sorted({name for run in runs for name in run.geometry or {}} - {"name"}):
        if _differ(runs, _of_geometry(name), _of_geometry("name")):
            found[f"geometry {GREEK.get(name, name.replace('_', ' '))}"] = _of_geometry(name)
    return found


def _differ(runs: Sequence[Run], get: Setting, kind: Setting | None = None) -> bool:
    """Tell whether a setting has several values among the runs of some kind, or among all."""
    values: dict[str, set[str]] = {}
    for run in runs:
        values.setdefault(str(kind(run)) if kind else "", set()).add(str(get(run)))
    return any(len(found) > 1 for found in values.values())


def _argument(name: str) -> Setting:
    return lambda run: run.base_args.get(name)


def _of_geometry(name: str) -> Setting:
    return lambda run: (run.geometry or {}).get(name)


def label(run: Run, varying: Mapping[str, Setting] | None = None) -> str:
    """Return a short name: ``WSAM γ 0.88, ρ 0.2``.

    Args:
        run: Any run of the group.
        varying: Further settings to name, each by a function of a run.
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
    """Return an option that is not at its default: a switch by its name, others with their value."""
    return name if value is True else f"{name} {_text(value)}"


def _text(value: object | Value) -> str:
    if not isinstance(value, float):
        return str(value)
    short = f"{value:g}"
    return short if float(short) == value else str(value)
