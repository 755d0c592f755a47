"""Names of runs that are shown together. A name contains what differs between the runs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from wsam._utils.plot_style import method_title, variant_name
from wsam.lab.run import Run
from wsam.lab.settings import BASE_CLASSES, MODEL_ARGS, VANILLA, method_defaults
from wsam.lab.user_code import is_code, split_name

GREEK = {"rho": "ρ", "gamma": "γ", "alpha": "α", "beta": "β", "eta": "η", "rho_min": "ρ min"}
Setting = Callable[[Run], object]
_PROBLEM = ("data", "target", "model")
_SPECIAL = (
    *(*_PROBLEM, "noise", "noise_seed", "seed", "epochs", "digests"),
    *("method", "hyper", "geometry", "base", "base_args", "options", "model_args"),
)
"""Settings that names do not contain as they are: each has code of its own."""
_FIELD_NAMES = {
    "batch_size": "batch",
    "train_limit": "train samples",
    "test_limit": "test samples",
}


def experiment_title(run: Run) -> str:
    """Return data, target, model and label noise: ``digits, cnn, 40% of the labels redrawn``."""
    target = f", target {run.target}" if run.target else ""
    noise = f", {100 * run.noise:g}% of the labels redrawn" if run.noise else ""
    return f"{run.data}{target}, {run.model}{noise}"


def group_names(runs: Sequence[Run]) -> list[str]:
    """Return a name for each of some runs on the same data with the same model, without seeds.

    A name has the method, its hyperparameters and all other settings that differ.

    Example:
        >>> sgd = Run(method="sam", hyper={"rho": 0.2})
        >>> group_names([sgd, sgd.replace(base="adamw")])
        ['SAM (SGD) ρ 0.2, lr 0.05', 'SAM (AdamW) ρ 0.2, lr 0.001']
    """
    varying = _varying_settings(runs)
    show_base = _differ(runs, attrgetter("base"))
    short = [_group_name(run, varying, show_base, "{:.4g}".format) for run in runs]
    exact = [_group_name(run, varying, show_base, repr) for run in runs]
    return short if len(set(short)) == len(set(exact)) else exact


def run_titles(runs: Iterable[Run]) -> dict[str, str]:
    """Return a title for each run by its key. Data, target, model and seeds only if they differ.

    Example:
        >>> runs = [Run(method="sam", seed=seed) for seed in (0, 1)]
        >>> list(run_titles(runs).values())
        ['SAM ρ 0.05, seed 0', 'SAM ρ 0.05, seed 1']
    """
    distinct = list({run.key: run for run in runs}.values())
    settings = (*_PROBLEM, "noise", "seed")
    varying = [name for name in settings if _differ(distinct, attrgetter(name))]
    titles = {}
    for run, name in zip(distinct, group_names(distinct), strict=True):
        target = f"target {run.target}" if run.target else ""
        problem = {"data": run.data, "target": target, "model": run.model}
        words = [*(word for setting, word in problem.items() if setting in varying), name]
        parts = []
        if "noise" in varying:
            parts.append(f"noise {run.noise:g}")
        if "seed" in varying:
            parts.append(f"seed {run.seed}")
        if run.noise and run.noise_seed != run.seed:
            parts.append(f"noise seed {run.noise_seed}")
        titles[run.key] = ", ".join([" ".join(filter(None, words)), *parts])
    return titles


def figure_name(metric: Mapping[str, Any]) -> str:
    """Return the figure that a search improves: ``validation error``.

    Args:
        metric: Entry ``metric`` of a record.
    """
    return f"{metric['split']} {metric['name']}"


def metric_label(metric: Mapping[str, Any], split: str) -> str:
    """Return the name of a metric on a split, with its unit: ``test error (%)``."""
    unit = f" ({metric['unit']})" if metric["unit"] else ""
    return f"{split} {metric['name']}{unit}"


def figure_column(metric: Mapping[str, Any], split: str) -> str:
    """Return the name of a metric on a split in the rows of a curve: ``validation_macro_f1``."""
    return f"{split}_{metric['name']}".replace("-", "_")


def figure_splits(metric: Mapping[str, Any]) -> list[str]:
    """Return the splits on which a record has its metric; the one that decides first."""
    return list(dict.fromkeys((metric["split"], "test")))


def format_figure(value: float | None, unit: str) -> str:
    """Return a metric as text: two decimals of a percentage, else six digits.

    Example:
        >>> format_figure(4.2, "%"), format_figure(0.0123456, "")
        ('4.20%', '0.0123456')
    """
    if value is None:
        return "none"
    return f"{value:.2f}%" if unit == "%" else f"{value:.6g}{unit}"


# ---- what differs ----


def _varying_settings(runs: Sequence[Run]) -> dict[str, Setting]:
    """Return the settings that differ between runs, other than the method's own.

    Arguments of bases and geometries are compared between runs of the same base or geometry, the
    learning rate between all. Epochs are compared between runs of a method, because the base alone
    often gets more of them.
    """
    found: dict[str, Setting] = {}
    for name in (f.name for f in dataclasses.fields(Run)):
        if name not in _SPECIAL and _differ(runs, attrgetter(name)):
            found[_FIELD_NAMES.get(name, name.replace("_", " "))] = attrgetter(name)
    lengths = Counter(method for method, _ in {(run.method, run.epochs) for run in runs})
    uneven = {method for method, different in lengths.items() if different > 1}
    if uneven:
        found["epochs"] = lambda run: run.epochs if run.method in uneven else None
    for name in sorted({name for run in runs for name in run.base_args}):
        same = None if name == "lr" else attrgetter("base")
        if _differ(runs, _entry("base_args", name), same):
            found[name.replace("_", " ")] = _entry("base_args", name)
    for name in sorted({name for run in runs for name in run.model_args}):
        if _differ(runs, _model_argument(name)):
            found[name.replace("_", " ")] = _model_argument(name)
    for name in sorted({name for run in runs for name in run.geometry or {}} - {"name"}):
        if _differ(runs, _entry("geometry", name), _entry("geometry", "name")):
            words = GREEK.get(name, name.replace("_", " "))
            found[f"geometry {words}"] = _entry("geometry", name)
    # Classes of the same name in different files:
    if _differ(runs, attrgetter("method"), lambda run: method_title(run.method)):
        found["file"] = lambda run: split_name(run.method)[0] if is_code(run.method) else None
    for what in sorted({what for run in runs for what in run.digests}):
        if _differ(runs, _entry("digests", what), attrgetter(what)):
            found[f"version of {what}"] = _version(runs, what)
    return found


def _differ(runs: Iterable[Run], get: Setting, key: Setting | None = None) -> bool:
    """Return whether a setting differs between runs, or between runs with the same key."""
    values: dict[str, set[str]] = {}
    for run in runs:
        values.setdefault(str(key(run)) if key else "", set()).add(str(get(run)))
    return any(len(found) > 1 for found in values.values())


def _entry(mapping: str, name: str) -> Setting:
    """Return a function for an entry of a run's mapping; it returns None if there is none."""
    return lambda run: (getattr(run, mapping) or {}).get(name)


def _model_argument(name: str) -> Setting:
    return lambda run: run.model_args.get(name, MODEL_ARGS.get(run.model, {}).get(name))


def _version(runs: Sequence[Run], what: str) -> Setting:
    """Return a number for each content of a file, because its digest means nothing to a reader."""
    numbers: dict[str, dict[str, int]] = {}  # for each name, those of its digests
    for run in runs:
        if what in run.digests:
            known = numbers.setdefault(getattr(run, what), {})
            known.setdefault(run.digests[what], len(known) + 1)

    def version(run: Run) -> int | None:
        known = numbers.get(getattr(run, what), {})
        return known[run.digests[what]] if len(known) > 1 else None

    return version


# ---- texts ----


def _group_name(
    run: Run, varying: Mapping[str, Setting], show_base: bool, number: Callable[[float], str]
) -> str:
    def part(name: str, value: object) -> str:
        """Return a setting as text; a switch without its value, nothing if it is off."""
        if value is None or value is False:
            return ""
        text = number(value) if isinstance(value, float) else str(value)
        return name if value is True else f"{name} {text}"

    base = BASE_CLASSES[run.base]
    variant = variant_name(run.method, run.options)
    if run.method == VANILLA:
        title = base
    else:
        title = method_title(variant) + (f" ({base})" if show_base else "")
    parts = [] if run.geometry is None else [str(run.geometry["name"])]
    known = method_defaults()
    for name, value in run.hyper.items():
        if name in GREEK or run.method not in known or value != known[run.method][name]:
            parts.append(part(GREEK.get(name, name.replace("_", " ")), value))
    for name, value in run.options.items():
        if f"{run.method}_{name}" != variant:  # the title names this option
            parts.append(part(name.replace("_", " "), value))
    for key, get in varying.items():
        parts.append(f"no {key}" if get(run) is False else part(key, get(run)))
    return f"{title} {', '.join(filter(None, parts))}".strip()
