"""Errors about constructor arguments that do not exist, with what to write instead."""

import difflib
import inspect
from typing import Any, Self

from torch.optim import SGD, AdamW

_OF_BASE = {*inspect.signature(SGD).parameters, *inspect.signature(AdamW).parameters}
_SYNONYMS = {
    **dict.fromkeys(("optimizer", "base_optimizer"), "base"),
    **dict.fromkeys(("max_grad_norm", "clip_grad_norm", "gradient_clip_val"), "max_norm"),
}
"""Names of arguments in other libraries."""


class CheckedArguments:
    """Checks the names of arguments in `__new__`, so that `__init__` and its signature stay plain."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Raise a `TypeError` that suggests what to write if `__init__` does not take the arguments."""
        if args or options:  # copying and unpickling pass none
            signature, name = inspect.signature(cls), cls.__name__
            try:
                signature.bind(*args, **options)
            except TypeError as error:
                known = list(signature.parameters)
                unknown = next((option for option in options if option not in known), None)
                if unknown is None:
                    problem = str(error)
                    function = f"where a function is expected, lambda base: {name}(base, ...)"
                    hint = f"{_example(name)}, or, {function}"
                else:
                    problem = f"got an unexpected keyword argument {unknown!r}"
                    hint = _hint(name, unknown, known)
                raise TypeError(f"{name}() {problem}: {hint}") from None
        return super().__new__(cls)


def _example(method: str) -> str:
    return f"write {method}(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05)"


def _hint(method: str, name: str, known: list[str]) -> str:
    if name in _OF_BASE:
        return f"it is an argument of the base optimizer, which comes first; {_example(method)}"
    if name == "adaptive":
        geometry = f"{method}(base, geometry=wsam.Adaptive()) or " if "geometry" in known else ""
        return f"write {geometry}wsam.ASAM(base)"
    close = [_SYNONYMS[name]] if name in _SYNONYMS else difflib.get_close_matches(name, known)
    return f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
