"""Code of the user's own, named as ``path/file.py:function`` or ``package.module:function``.

Such a name is the only input of the lab that executes code, and it is executed only by `load`. The
key of a run contains a digest of the file, not of the files it imports.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from wsam.lab.errors import UserCodeError, explain
from wsam.lab.files import sha256

_NOT_CODE = ("folder", "table", "text", "hf", "timm", "object")
"""Prefixes of names that are not code: ``folder:PATH``, ``timm:NAME``."""
OBJECT = "object:"
"""Prefix of objects that were passed to `wsam.lab.fit`; other processes cannot find them."""
_CODE = re.compile(r"(?P<source>[^:].*):(?P<function>[A-Za-z_]\w*)")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_code(name: str) -> bool:
    """Return whether a name refers to a function in a Python file or module.

    Example:
        >>> is_code("my.py:net"), is_code("package.models:Net"), is_code("timm:resnet18")
        (True, True, False)
    """
    found = _CODE.fullmatch(name)
    if found is None or name.partition(":")[0] in _NOT_CODE:
        return False
    return found["source"].endswith(".py") or _MODULE.fullmatch(found["source"]) is not None


def is_code_or_object(name: str) -> bool:
    """Return whether a name refers to the user's code, or to an object that `fit` was called with."""
    return is_code(name) or name.startswith(OBJECT)


def split_name(name: str) -> tuple[str, str]:
    """Return the file or module of a name and its function."""
    source, _, function = name.rpartition(":")
    return source, function


def source_file(name: str) -> Path:
    """Return the file of a function, without executing code.

    Raises:
        FileNotFoundError: There is no such file or module.
    """
    source, _ = split_name(name)
    if source.endswith(".py"):
        path = Path(source)
        if not path.is_file():
            raise FileNotFoundError(f"{name}: there is no file {path.absolute()}")
        return path
    search_path = [str(Path.cwd()), *sys.path]
    found = None
    parts = source.split(".")
    for number in range(1, len(parts) + 1):
        # Unlike importlib.util.find_spec, this does not import the parent packages.
        found = PathFinder.find_spec(".".join(parts[:number]), search_path)
        search_path = list(found.submodule_search_locations or []) if found else []
    if found is None or found.origin is None:
        raise FileNotFoundError(f"{name}: there is no module {source!r}")
    return Path(found.origin)


def load(name: str) -> Any:
    """Import a file or module and return the function or class.

    The random number generators are seeded during the import, which may create data.

    Args:
        name: ``path/file.py:function`` or ``package.module:function``.

    Raises:
        FileNotFoundError: There is no such file or module.
        UserCodeError: The file raises an exception, or has no such function.
    """
    from wsam.lab.rng import seeded

    path = source_file(name)
    source, function = split_name(name)
    is_file = source.endswith(".py")
    _add_to_path(path.resolve().parent if is_file else Path.cwd())  # as Python does for a script
    with explain(f"importing {source}", path), seeded(0):
        module = _import_file(path) if is_file else importlib.import_module(source)
    try:
        return getattr(module, function)
    except AttributeError as error:
        raise UserCodeError(f"{path} has no function or class {function!r}") from error


def _import_file(path: Path) -> ModuleType:
    """Import a file under a name of its own, once for each version of it."""
    path = path.resolve()
    code = path.read_bytes()
    name = f"{path.stem}_{sha256(str(path).encode())[:8]}_{sha256(code)[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # Not by the loader: its bytecode cache may be that of another version of the same second.
        exec(compile(code, path, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def spec_of(function: Callable[..., object]) -> str | None:
    """Return the ``path/file.py:function`` of a module-level function or class, else None."""
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    found = getattr(module, "__file__", None)
    if found is None or not name.isidentifier() or not found.endswith(".py"):
        return None
    path = Path(found)
    if not path.is_file() or getattr(module, name, None) is not function:
        return None
    path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{path}:{name}"
