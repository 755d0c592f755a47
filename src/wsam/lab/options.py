"""Which options a run may set: their ranges, and whether they apply to its method and base."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from wsam._core import validation
from wsam.lab.settings import BASES, OPTIONS, VANILLA, accepts, has_preconditioner, method_defaults
from wsam.lab.user_code import is_code
from wsam.lab.values import Value, join_names, with_defaults


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
        ValueError: An option is unknown or out of range, does not apply to the method or base, or has
            no effect together with another one.
        TypeError: A value of the wrong type.
    """
    if method == VANILLA:
        return with_defaults(method, given, {})
    options = with_defaults(method, given, OPTIONS)
    validation.count("every", options["every"], 1)
    for name in ("start", "ascent_share", "gamma_warmup", "rho_warmup"):
        validation.number(name, options[name], 0, 1, high_open=False)
    changed = {name: value for name, value in options.items() if value != OPTIONS[name]}
    _check_method(method, hyper, base, changed)
    _check_combination(changed)
    return changed


def require_argument(method: str, argument: str, refusal: str) -> None:
    """Raise an error that names the methods with an argument, unless the method has it.

    The user's own methods are checked when the optimizer is created.

    Args:
        method: Name of the method.
        argument: The argument.
        refusal: The error after the method's name and before the names of the others.
    """
    if is_code(method) or accepts(method, argument):
        return
    others = [other for other in method_defaults() if accepts(other, argument)]
    raise ValueError(f"{method} {refusal}: {join_names(others)}")


def _check_method(method: str, hyper: Collection[str], base: str, options: Collection[str]) -> None:
    """Raise an error if an option has no effect on the method, or the base does not support it."""
    if "lean" in options:
        refusal = "passes the second gradient to its base, so lean saves nothing; methods with lean"
        require_argument(method, "lean", refusal)
    if "reuse" in options:
        require_argument(method, "reuse", "does not take reuse; methods with reuse")
    if "precondition" in options:
        refusal = "has no decoupled term to precondition; methods with precondition"
        require_argument(method, "precondition", refusal)
        if not has_preconditioner(base):
            adaptive = join_names(base for base in BASES if has_preconditioner(base))
            raise ValueError(f"precondition needs an adaptive base, not {base}: {adaptive}")
    if "every" in options and "n" in hyper:
        raise ValueError(f"{method} makes two passes on every n-th step: set n, not every")
    if "gather" in options and method != "esam":
        raise ValueError(f"gather applies to esam, which selects samples, not to {method}")
    if "gamma_warmup" in options and ("gamma" not in hyper or method == "esam"):
        raise ValueError(f"gamma_warmup needs the weight gamma, which {method} does not have")
    for name in ("rho_follows_lr", "rho_warmup"):
        if name in options and "rho" not in hyper:
            raise ValueError(f"{name} needs the radius rho, which {method} does not have")


def _check_combination(options: Collection[str]) -> None:
    """Raise an error if an option has no effect together with another one, or without it."""
    for name in ("reuse_scaled", "reuse_average", "reuse_weight"):
        if name in options and "reuse" not in options:
            raise ValueError(f"{name} needs reuse, which is off")
    if "threshold" in options and {"every", "start", "reuse"} & set(options):
        raise ValueError("threshold chooses the two-pass steps, so every and start do not apply")
    if "reuse" in options and "every" not in options:
        raise ValueError("reuse applies to the steps between two-pass steps: set every above 1")
    if "rho_follows_lr" in options and "rho_warmup" in options:
        raise ValueError("rho_follows_lr and rho_warmup exclude each other")
