"""What a run may name: data, models, methods, geometries, base optimizers, and their arguments.

Methods and geometries are read from the library itself, so that a newly registered member can be
trained at once. The bases' arguments are written out here with their defaults: a record then says
all that was used, and its key does not depend on the version of torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from wsam import checks

if TYPE_CHECKING:
    from wsam.geometry import Geometry

Value = float | int | bool | str | None | tuple[float, ...]
"""What an argument of a method, geometry or base may be: all of it is plain JSON."""

DATA = ("digits", "cifar10", "cifar100", "fashion", "imagenet")
MODELS = ("cnn", "mlp", "resnet18", "wrn-28-10", "deit-base")
SCHEDULES = ("cosine", "constant")
PRECISIONS = ("fp32", "bf16")
VANILLA = "vanilla"

_ADAM: dict[str, Value] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
}
BASES: dict[str, dict[str, Value]] = {
    "sgd": {
        "lr": 0.05,
        "momentum": 0.9,
        "dampening": 0.0,
        "nesterov": False,
        "weight_decay": 1e-3,
    },
    "adam": _ADAM | {"amsgrad": False},
    "adamw": _ADAM | {"weight_decay": 0.01, "amsgrad": False},
    "nadam": _ADAM | {"lr": 2e-3, "momentum_decay": 4e-3},
    "radam": dict(_ADAM),
    "adamax": _ADAM | {"lr": 2e-3},
    "rmsprop": {"lr": 0.01, "alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "weight_decay": 0.0},
    "adagrad": {"lr": 0.01, "lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0},
    "adadelta": {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0},
}
BASE_CLASSES = {
    "sgd": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
    "nadam": "NAdam",
    "radam": "RAdam",
    "adamax": "Adamax",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
    "adadelta": "Adadelta",
}

SEED = "seed"
"""An argument of some methods and geometries that is no hyperparameter: it is the run's own."""
OPTIONS: dict[str, Value] = {"lean": False, "max_norm": None}
"""The common options that a run may set, with the values that mean "off"."""


def listed(names: Iterable[str]) -> str:
    """Join names for a message: ``a, b, c``."""
    return ", ".join(names) or "none"


def methods() -> dict[str, dict[str, Value]]:
    """Return every method with its own hyperparameters and their defaults.

    Example:
        >>> methods()["wsam"]
        {'rho': 0.05, 'gamma': 0.9}
    """
    from wsam.methods import METHODS

    own: dict[str, dict[str, Value]] = {VANILLA: {}}
    for name, member in METHODS.items():
        parameters = inspect.signature(member).parameters.values()
        own[name] = {
            p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != SEED
        }
    return own


def takes_geometry(method: str) -> bool:
    """Tell whether a method leaves the choice of geometry to its user."""
    from wsam.methods import METHODS

    return method != VANILLA and "geometry" not in METHODS[method].fixes


def geometries() -> dict[str, dict[str, Value]]:
    """Return every geometry a run may ask for, with its arguments and their defaults."""
    return {
        name: {f.name: cast(Value, f.default) for f in dataclasses.fields(kind) if f.name != SEED}
        for name, kind in geometry_classes().items()
    }


def geometry_classes() -> dict[str, type[Geometry]]:
    """Return the class of every geometry a run may ask for."""
    from wsam.geometry import Adaptive, Fisher, Masked

    return {"adaptive": Adaptive, "fisher": Fisher, "masked": Masked}


def chosen(what: str, name: str, known: Iterable[str]) -> str:
    """Return `name` if it is known, else say which names are.

    Raises:
        ValueError: The name is not known.
    """
    names = tuple(known)
    if name not in names:
        raise ValueError(f"unknown {what} {name!r}; known: {listed(names)}")
    return name


def word(name: str, value: Any) -> str:
    """Return `value` if it is a word, or raise."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a word, got {value!r}")
    return value


def mapping(name: str, value: Any) -> Mapping[str, Value]:
    """Return `value` if it holds names with their values, or raise."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must hold names and values, got {value!r}")
    return value


def filled(
    owner: str, given: Mapping[str, Value], defaults: Mapping[str, Value]
) -> dict[str, Value]:
    """Complete the given arguments by the defaults, every value in its default's type.

    Args:
        owner: Whose arguments they are, for the message.
        given: What the user asked for.
        defaults: All arguments there are.

    Raises:
        ValueError: An argument that its owner does not take.
        TypeError: A value of the wrong kind.
    """
    for name in given:
        if name not in defaults:
            raise ValueError(f"{owner} does not take {name!r}; it takes: {listed(defaults)}")
    return {
        name: _like(f"{name} of {owner}", given.get(name, default), default)
        for name, default in sorted(defaults.items())
    }


def _like(name: str, value: object, default: Value) -> Value:
    """Bring a value to the type of its default: ``1`` and ``1.0`` must name one run."""
    if isinstance(default, bool):
        return checks.flag(name, value)
    if isinstance(default, int):
        if isinstance(value, Integral) and not isinstance(value, bool):
            return int(value)
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if isinstance(default, str):
        return word(name, value)
    if isinstance(default, tuple):
        if isinstance(value, list | tuple) and len(value) == len(default):
            return tuple(_number(name, item) for item in value)
        raise TypeError(f"{name} must be {len(default)} numbers, got {value!r}")
    if value is None and default is None:
        return None
    return _number(name, value)


def is_number(value: object) -> TypeGuard[int | float]:
    """Tell whether a value is a number; true and false are none, though Python counts them in."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):  # numpy's are real numbers too
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        found = float(value)
    except OverflowError:  # a whole number of more than 308 digits
        found = math.inf
    if not math.isfinite(found):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return found
