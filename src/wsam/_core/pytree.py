"""Tensors in nested containers: batches, and what loss functions return."""

import copy
from collections.abc import Callable, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map


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
        if isinstance(leaf, MutableMapping):
            mapping = copy.copy(leaf)
            for key, value in leaf.items():
                mapping[key] = map_tensors(function, value, kinds)
            return mapping
        if is_dataclass(leaf) and not isinstance(leaf, type):
            instance = copy.copy(leaf)
            for field in fields(leaf):
                value = map_tensors(function, getattr(leaf, field.name), kinds)
                object.__setattr__(instance, field.name, value)  # it may be frozen
            return instance
        return leaf

    return tree_map(convert, tree)


def tensors_of(tree: Any, kinds: tuple[type, ...] = (Tensor,)) -> list[Any]:
    """Return the tensors in `tree`, or leaves of `kinds`, in the order of `map_tensors`."""
    found: list[Any] = []
    map_tensors(found.append, tree, kinds)
    return found
