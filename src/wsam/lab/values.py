"""Values of settings: checks with messages that list what is allowed, and casts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, TypeGuard

from wsam._core import validation

Value = float | int | bool | str | None | tuple[float, ...]
"""Value of an argument of a method, geometry or base optimizer; can be stored as JSON."""


def join_names(names: Iterable[str]) -> str:
    """Return ``a, b, c`` for an error message."""
    return ", ".join(names) or "none"


def check_choice(what: str, name: str, known: Iterable[str]) -> str:
    """Return `name` if it is one of `known`.

    Raises:
        ValueError: It is not; the message lists `known`.
    """
    names = tuple(known)
    if name not in names:
        raise ValueError(f"unknown {what} {name!r}; known: {join_names(names)}")
    return name


def check_flag(name: str, value: object) -> bool:
    """Return `value` if it is True or False, else raise TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def check_str(name: str, value: Any) -> str:
    """Return `value` if it is a string, else raise TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {value!r}")
    return value


def check_mapping(name: str, value: Any) -> Mapping[str, Value]:
    """Return `value` if it is a mapping, else raise TypeError."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping, got {value!r}")
    return value


def with_defaults(
    owner: str, given: Mapping[str, Value], defaults: Mapping[str, Value]
) -> dict[str, Value]:
    """Return the given arguments completed by defaults, each cast to the type of its default.

    Args:
        owner: What takes the arguments, for the message.
        given: The arguments given.
        defaults: All arguments with their defaults.

    Raises:
        ValueError: An unknown argument.
        TypeError: A value of the wrong type.
    """
    for name in given:
        if name not in defaults:
            raise ValueError(f"{owner} does not take {name!r}; it takes: {join_names(defaults)}")
    return {
        name: _cast_like(f"{name} of {owner}", given.get(name, default), default)
        for name, default in sorted(defaults.items())
    }


def _cast_like(name: str, value: object, default: Value) -> Value:
    """Cast a value to the type of its default: ``1`` and ``1.0`` must give the same key."""
    if isinstance(default, bool):
        return check_flag(name, value)
    if isinstance(default, int):
        if isinstance(value, Integral) and not isinstance(value, bool):
            return int(value)
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if isinstance(default, str):
        return check_str(name, value)
    if isinstance(default, tuple):
        if isinstance(value, list | tuple) and len(value) == len(default):
            return tuple(_float(name, item) for item in value)
        raise TypeError(f"{name} must be {len(default)} numbers, got {value!r}")
    if value is None and default is None:
        return None
    return _float(name, value)


def is_value(value: object) -> TypeGuard[Value]:
    """Return whether a value can be an argument in a run: see `Value`."""
    if isinstance(value, tuple):
        return all(map(is_number, value))
    return value is None or isinstance(value, bool | str) or is_number(value)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is an int or float; bool does not count."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _float(name: str, value: object) -> float:
    return validation.number(name, value, -math.inf, low_open=True)
