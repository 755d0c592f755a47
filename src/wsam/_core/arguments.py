"""Errors about constructor arguments that do not exist, with what to write instead."""

import inspect
from typing import Any, Self


class CheckedArguments:
    """Checks the names of arguments in `__new__`, so that `__init__` and its signature stay plain."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Raise a `TypeError` that shows a call if `__init__` does not take the arguments."""
        if args or options:  # copying and unpickling pass none
            try:
                inspect.signature(cls).bind(*args, **options)
            except TypeError as error:
                example = f"{cls.__name__}(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05)"
                raise TypeError(f"{cls.__name__}() {error}; write {example}") from None
        return super().__new__(cls)
