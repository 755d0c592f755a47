"""Examples in the docstrings of `wsam.lab` and `wsam.sweep`."""

import doctest
import pkgutil
from importlib import import_module

import wsam.lab
import wsam.sweep


def test_docstring_examples():
    attempted = 0
    for package in (wsam.lab, wsam.sweep):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            result = doctest.testmod(import_module(module.name))
            assert result.failed == 0, module.name
            attempted += result.attempted
    assert attempted > 20
