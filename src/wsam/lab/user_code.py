"""Code of the user's own, named as ``path/file.py:function`` or ``package.module:function``.

Such a name is the only input of the lab that executes code, and it is executed only by `load`. The
key of a run contains a digest of the file, not of the files it imports.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from wsam.lab.files import file_sha256

PREFIXES = ("folder", "table", "text", "hf", "timm", "object")
"""First words of names that are not code: ``folder:PATH``, ``timm:NAME``."""
OBJECT = "object:"
"""Prefix of objects that were passed to `wsam.lab.fit`; other processes cannot find them."""
_CODE = re.compile(r"(?P<source>[^:].*):(?P<function>[A-Za-z_]\w*)")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_OWN_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = tuple(map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
RAISED = (Exception, SystemExit)
"""What code of the user's own may raise; only Ctrl-C is not its own."""


class RunError(ValueError):
    """This run cannot be trained; others are not affected."""


class UserCodeError(RunError):
    """The user's model, data, loss, metric or method raised an exception or does not fit the others."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that the device or the host has too little memory."""
    import torch

    # The allocator of the CPU raises a plain RuntimeError.
    on_host = isinstance(error, RuntimeError) and "not enough memory" in str(error)
    return on_host or isinstance(error, torch.OutOfMemoryError | MemoryError)


def is_code(name: str) -> bool:
    """Return whether a name refers to a function in a Python file or module.

    Example:
        >>> is_code("my.py:net"), is_code("package.models:Net"), is_code("timm:resnet18")
        (True, True, False)
    """
    found = _CODE.fullmatch(name)
    if found is None or name.partition(":")[0] in PREFIXES:
        return False
    return found["source"].endswith(".py") or _MODULE.fullmatch(found["source"]) is not None


def is_user_code(name: str) -> bool:
    """Return whether a name refers to the user's code: a function, or an object given to `fit`."""
    return is_code(name) or name.startswith(OBJECT)


def split(name: str) -> tuple[str, str]:
    """Return the file or module of a name and its function."""
    source, _, function = name.rpartition(":")
    return source, function


def source_file(name: str) -> Path:
    """Return the file of a function, without executing code.

    Raises:
        FileNotFoundError: There is no such file or module.
    """
    source, _ = split(name)
    if source.endswith(".py"):
        path = Path(source)
        if not path.is_file():
            raise FileNotFoundError(f"{name}: there is no file {path.absolute()}")
        return path
    places: list[str] | None = [str(Path.cwd()), *sys.path]
    found = None
    for number, part in enumerate(parts := source.split(".")):
        # Unlike importlib.util.find_spec, this does not import the parent packages.
        found = PathFinder.find_spec(".".join(parts[: number + 1]), places)
        if found is None:
            raise FileNotFoundError(f"{name}: there is no module {source!r} ({part!r} not found)")
        places = list(found.submodule_search_locations or [])
    if found is None or found.origin is None:
        raise FileNotFoundError(f"{name}: the module {source!r} has no source file")
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
    source, function = split(name)
    with explain(f"importing {source}", path), seeded(0):
        module = _import_file(path) if source.endswith(".py") else _import_module(source)
    try:
        return getattr(module, function)
    except AttributeError as error:
        raise UserCodeError(f"{path} has no function or class {function!r}") from error


def _import_file(path: Path) -> ModuleType:
    """Import a file under a name of its own, once for each version of it."""
    path = path.resolve()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"{path.stem}_{digest}_{file_sha256(path)[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    _add_to_path(path.parent)  # as Python does for a script
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    _add_to_path(Path.cwd())
    return importlib.import_module(name)


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def spec_of(function: Callable[..., object]) -> str | None:
    """Return the ``path/file.py:function`` of a module-level function or class, else None."""
    name = getattr(function, "__qualname__", "")
    code = getattr(function, "__code__", None)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    found = getattr(code, "co_filename", None) or getattr(module, "__file__", None)
    if found is None or not name.isidentifier() or not found.endswith(".py"):
        return None
    path = Path(found)
    if not path.is_file() or getattr(module, name, None) is not function:
        return None
    path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{path}:{name}"


@contextmanager
def explain(what: str, path: Path | None = None) -> Iterator[None]:
    """Convert an exception of the user's code into a `UserCodeError` of one line.

    Args:
        what: The subject of the message, such as ``my.py:net``.
        path: The file whose line is named; None for the innermost frame.
    """
    try:
        yield
    except UserCodeError:
        raise
    except RAISED as error:
        if is_out_of_memory(error):
            raise
        raise UserCodeError(f"{what} raised {describe(error, path)}") from error


def call(function: Callable[..., Any], name: str, returns: str) -> Any:
    """Call a function of the user's own without arguments.

    Args:
        function: The function.
        name: Its name, for messages.
        returns: What it must return, for messages.

    Raises:
        UserCodeError: It has required arguments, or raises an exception.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        parameters = {}.values()
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in optional]
    if required:
        raise UserCodeError(
            f"{name} must be a function without required arguments that returns {returns}; it "
            f"requires {', '.join(required)}"
        )
    with explain(name, source_file(name) if is_code(name) else None):
        return function()


def describe(error: BaseException, path: Path | None = None) -> str:
    """Return type, message and place of an exception in one line.

    Args:
        error: The exception.
        path: The file whose line is named; None for the innermost one outside of libraries.
    """
    message = str(error).strip().partition("\n")[0]
    return type(error).__name__ + (f": {message}" if message else "") + place(error, path)


def one_line(error: BaseException) -> str:
    """Return an exception in one line; an error of this module has no type and place to add."""
    return " ".join(str(error).split()) if isinstance(error, RunError) else describe(error)


def place(error: BaseException, path: Path | None = None) -> str:
    """Return file and line where an exception was raised: `` (my.py, line 3)``.

    Lines of this package are not named: they do not show what to correct.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_wsam(f.filename)]
    own = [f for f in frames if path is not None and Path(f.filename).resolve() == path.resolve()]
    found = own or [f for f in frames if not _is_library(f.filename)] or frames
    return f" ({found[-1].filename}, line {found[-1].lineno})" if found else ""


def is_own(error: BaseException) -> bool:
    """Return whether a file outside of libraries raised an exception or called what did."""
    names = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any(not (_is_wsam(name) or _is_library(name)) for name in names)


def _is_wsam(file: str) -> bool:
    return Path(file).is_relative_to(_OWN_PACKAGE)


def _is_library(file: str) -> bool:
    return file.startswith((*_LIBRARIES, "<"))
