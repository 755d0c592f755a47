"""Tensors in nested containers."""

from collections import UserDict, namedtuple
from dataclasses import dataclass

import torch

from wsam._core.pytree import map_tensors, tensors_of

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str


def test_containers_keep_their_types_and_are_copied():
    one, two = torch.ones(2), torch.full((2,), 2.0)
    tree = {
        "pair": Pair(one, [two, None]),
        "mapping": UserDict({"x": one, "inner": (two, "text")}),
        "data": Frozen(two, "name"),
    }
    found = map_tensors(lambda x: 2 * x, tree)
    assert type(found["pair"]) is Pair
    assert type(found["mapping"]) is UserDict
    assert type(found["data"]) is Frozen
    assert [float(x[0]) for x in tensors_of(found)] == [2.0, 4.0, 2.0, 4.0, 4.0]
    assert [float(x[0]) for x in tensors_of(tree)] == [1.0, 2.0, 1.0, 2.0, 2.0], "unchanged"
    assert found["mapping"]["inner"][1] == "text"
    assert found["data"].name == "name"
    assert found["pair"].y[1] is None
