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
        """Raise a `TypeError` with a suggestion for an argument that `__init__` does not have."""
        known = inspect.signature(cls).parameters
        kinds = [p.kind for p in known.values()]
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            for name in (name for name in options if name not in known):
                raise TypeError(
                    f"{cls.__name__}() got an unexpected keyword argument {name!r}: "
                    f"{_hint(cls.__name__, name, list(known))}"
                )
        takes_base = (
            kinds.count(inspect.Parameter.KEYWORD_ONLY) == len(kinds) - 1 and "base" in known
        )
        # Copying and unpickling call `__new__` without any arguments.
        if takes_base and (len(args) > 1 or (options and not args and "base" not in options)):
            raise TypeError(
                f"{cls.__name__}() takes one positional argument, the base optimizer, got {len(args)}: "
                f"{_example(cls.__name__)}, or, where a function is expected, "
                f"lambda base: {cls.__name__}(base, ...)"
            )
        return super().__new__(cls)


def _example(method: str) -> str:
    return f"write {method}(torch.optim.SGD(model.parameters(), lr=0.1), ...)"


def _hint(method: str, name: str, known: list[str]) -> str:
    if name in _OF_BASE:
        return f"it is an argument of the base optimizer, which comes first; {_example(method)}"
    if name == "adaptive":
        geometry = f"{method}(base, geometry=wsam.Adaptive()) or " if "geometry" in known else ""
        return f"write {geometry}wsam.ASAM(base)"
    close = [_SYNONYMS[name]] if name in _SYNONYMS else difflib.get_close_matches(name, known)
    return f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
