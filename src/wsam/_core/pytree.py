"""Tensors in nested containers: batches, and what loss functions return."""

import copy
from collections.abc import Callable, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map


def map_tensors(
    function: Callable[[Any], Any], tree: Any, kinds: tuple[type, ...] = (Tensor,)
) -> Any:
    """Return a copy of `tree` with each tensor, or leaf of `kinds`, replaced by `function(leaf)`.

    Besides the containers of `torch.utils._pytree`, other mappings (Hugging Face's ModelOutput and
    BatchEncoding) and dataclasses are traversed. Containers keep their types.
    """
    if isinstance(tree, kinds):  # a plain tensor, as the usual loss, needs no traversal
        return function(tree)

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, kinds):
            return function(leaf)
        entries = _entries(leaf)
        if entries is None:
            return leaf
        found = copy.copy(leaf)
        for name, value in map_tensors(function, entries, kinds).items():
            if isinstance(leaf, MutableMapping):
                found[name] = value
            else:
                object.__setattr__(found, name, value)  # it may be frozen
        return found

    return tree_map(convert, tree)


def tensors_of(tree: Any, kinds: tuple[type, ...] = (Tensor,)) -> list[Any]:
    """Return the tensors in `tree`, or leaves of `kinds`, in the order of `map_tensors`."""
    found: list[Any] = []
    map_tensors(found.append, tree, kinds)
    return found


def structure_of(tree: Any, describe: Callable[[Any], Any]) -> Any:
    """Return the containers of `tree` and `describe(leaf)` of each leaf, to compare it with others."""

    def convert(leaf: Any) -> Any:
        entries = _entries(leaf)
        return describe(leaf) if entries is None else structure_of(entries, describe)

    leaves, containers = tree_flatten(tree)
    return containers, [convert(leaf) for leaf in leaves]


def _entries(leaf: Any) -> dict[str, Any] | None:
    """Return the entries of a container that `torch.utils._pytree` does not know; None of others."""
    if isinstance(leaf, MutableMapping):
        return dict(leaf)
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return {field.name: getattr(leaf, field.name) for field in fields(leaf)}
    return None
