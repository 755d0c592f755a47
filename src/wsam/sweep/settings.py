"""Settings of a run by name: find them, and change them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields

from wsam.lab.run import Run
from wsam.lab.settings import (
    DATA_SETTINGS,
    OPTIONAL_COUNTS,
    OPTIONS,
    VANILLA,
    accepts,
    default_model,
    has_preconditioner,
)
from wsam.lab.values import Value, join_names

SEEDS = ("seed", "noise_seed")
"""Settings that cannot be varied: every point of a grid is run with the same seeds."""
DECISIVE = (
    *("data", "model", "method", "base", "geometry"),
    *("every", "options.every", "reuse", "options.reuse"),
)
"""Settings that decide which others a run has. They are applied before the others."""
_MAPPINGS = ("hyper", "base_args", "options")
_FIELDS = tuple(f.name for f in fields(Run) if f.name not in (*SEEDS, "digests", *_MAPPINGS))


def with_value(run: Run, name: str, value: Value) -> Run:
    """Return the run with one setting changed.

    Args:
        run: The run.
        name: A hyperparameter of its method, an argument of its base optimizer, an option such as
            ``max_norm``, or a field of `Run` such as ``method`` or ``epochs``, searched in this order.
            ``hyper.alpha``, ``base_args.alpha``, ``options.lean`` and ``geometry.eta`` name the mapping
            too. Seeds cannot be varied: every point of a grid is run with the same seeds.
        value: The new value. A geometry is given by its name, or None.

    Raises:
        ValueError: The run has no such setting.

    Example:
        >>> run = with_value(Run(method="wsam"), "gamma", 0.8)
        >>> with_value(run, "method", "sam").title
        'digits cnn sam rho=0.05 seed=0'
    """
    found = _find(run, name)
    if found is None:
        known = [*run.hyper, *run.base_args, *_options(run), *_FIELDS]
        raise ValueError(f"a {run.method} run has no setting {name!r}; it has: {join_names(known)}")
    mapping, key = found
    if mapping:
        return run.replace(**{mapping: {**(getattr(run, mapping) or {}), key: value}})
    if key == "geometry" and isinstance(value, str):
        return run.replace(geometry={"name": value})
    if key == "data":
        return _with_data(run, str(value))
    return run.replace(**{key: value})


def _with_data(run: Run, data: str) -> Run:
    """Return the run on other data, without settings of the old. A default model stays a default."""
    dropped = {n: None for n, kinds in DATA_SETTINGS.items() if not data.startswith(kinds)}
    is_default = run.model == default_model(run.data)
    return run.replace(data=data, model="" if is_default else run.model, **dropped)


def has_setting(run: Run, name: str) -> bool:
    """Return whether a run has a setting: SAM has no gamma, and only some methods have a geometry."""
    return _find(run, name) is not None


def is_integer_setting(run: Run, name: str) -> bool:
    """Return whether a setting is an integer.

    Example:
        >>> is_integer_setting(Run(), "epochs"), is_integer_setting(Run(hyper={"rho": 1}), "rho")
        (True, False)
    """
    mapping, key = _find(run, name) or ("", name)
    if mapping == "options":  # a run does not contain those that are off
        value = run.options.get(key, OPTIONS[key])
    else:
        value = getattr(run, mapping).get(key) if mapping else getattr(run, key)
    return key in OPTIONAL_COUNTS or (isinstance(value, int) and not isinstance(value, bool))


def in_order(names: Iterable[str]) -> list[str]:
    """Return names of settings, those first that decide which others a run has."""
    return sorted(names, key=lambda n: DECISIVE.index(n) if n in DECISIVE else len(DECISIVE))


def _find(run: Run, name: str) -> tuple[str, str] | None:
    """Return mapping and key of a setting, with an empty mapping for a field; None if it has none."""
    mapping, dot, key = name.partition(".")
    if dot:
        known = mapping in (*_MAPPINGS, "geometry") and key in _arguments(run, mapping)
        return (mapping, key) if known else None
    for mapping in _MAPPINGS:
        if name in _arguments(run, mapping):
            return mapping, name
    return ("", name) if name in _FIELDS and _applies(run, name) else None


def _arguments(run: Run, mapping: str) -> Collection[str]:
    """Return the names of the settings in a mapping of a run."""
    if mapping == "options":
        return _options(run)
    names: Mapping[str, Value] = getattr(run, mapping) or {}
    return names.keys() - {"name"}


def _options(run: Run) -> list[str]:
    """Return the options that a run of this method and base may have."""
    if run.method == VANILLA:
        return []
    refused = {
        "lean": not accepts(run.method, "lean"),
        "precondition": not (accepts(run.method, "precondition") and has_preconditioner(run.base)),
        "every": "n" in run.hyper,
        "reuse": not accepts(run.method, "reuse") or "every" not in run.options,
        "gather": run.method != "esam",
        "gamma_warmup": "gamma" not in run.hyper or run.method == "esam",
    }
    refused |= {name: "reuse" not in run.options for name in OPTIONS if name.startswith("reuse_")}
    return [name for name in OPTIONS if not refused.get(name)]


def _applies(run: Run, field: str) -> bool:
    """Return whether a run of this method and data may have a field."""
    if field == "geometry":
        return accepts(run.method, "geometry")
    return field not in DATA_SETTINGS or run.data.startswith(DATA_SETTINGS[field])
