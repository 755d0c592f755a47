"""Which options a run may set: their ranges, and whether they have an effect."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from wsam._core import validation
from wsam.lab.settings import OPTIONS, VANILLA, accepts, has_preconditioner
from wsam.lab.user_code import is_code
from wsam.lab.values import Value, with_defaults

_NEEDS = {
    "reuse": "every",
    "reuse_scaled": "reuse",
    "reuse_average": "reuse",
    "reuse_weight": "reuse",
    "gamma_warmup": "gamma",
    "rho_warmup": "rho",
    "rho_follows_lr": "rho",
}
"""Options that have an effect with another option, or with a hyperparameter, only."""


def checked_options(
    method: str, hyper: Collection[str], base: str, given: Mapping[str, Value]
) -> dict[str, Value]:
    """Return the options that are not off, each cast to the type of its default.

    Args:
        method: Name of the method.
        hyper: Names of its hyperparameters.
        base: Name of the base optimizer.
        given: The options.

    Raises:
        ValueError: An option is unknown or out of range, or has no effect with the method, the base or
            another option.
        TypeError: A value of the wrong type.
    """
    if method == VANILLA:
        return with_defaults(method, given, {})
    options = with_defaults(method, given, OPTIONS)
    validation.count("every", options["every"], 1)
    for name in ("start", "ascent_share", "gamma_warmup", "rho_warmup"):
        validation.number(name, options[name], 0, 1, high_open=False)
    changed = {name: value for name, value in options.items() if value != OPTIONS[name]}
    _check_effects(method, hyper, base, changed)
    return changed


def require_argument(method: str, argument: str) -> None:
    """Raise an error unless a method has an argument.

    The user's own methods are checked when the optimizer is created.
    """
    if not (is_code(method) or accepts(method, argument)):
        raise ValueError(f"{method} does not take {argument!r}")


def _check_effects(
    method: str, hyper: Collection[str], base: str, options: Collection[str]
) -> None:
    """Raise an error if an option has no effect."""
    for name in {"lean", "reuse", "precondition"} & set(options):
        require_argument(method, name)
    for name, needed in _NEEDS.items():
        if name in options and needed not in (*options, *hyper):
            raise ValueError(f"{name} needs {needed}, which is off or not part of {method}")
    if "precondition" in options and not has_preconditioner(base):
        raise ValueError(f"precondition needs an adaptive base such as adamw, not {base}")
    if "gamma_warmup" in options and method == "esam":
        raise ValueError("gamma_warmup needs the weight gamma; esam's is a share of samples")
    if "every" in options and "n" in hyper:
        raise ValueError(f"{method} makes two passes on every n-th step: set n, not every")
    if "gather" in options and method != "esam":
        raise ValueError(f"gather applies to esam, which selects samples, not to {method}")
    if "threshold" in options and {"every", "start", "reuse"} & set(options):
        raise ValueError("threshold chooses the two-pass steps, so every and start do not apply")
    if {"rho_follows_lr", "rho_warmup"} <= set(options):
        raise ValueError("rho_follows_lr and rho_warmup exclude each other")
