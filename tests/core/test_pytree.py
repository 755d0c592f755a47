"""Tensors in nested containers."""

from collections import UserDict, namedtuple
from dataclasses import dataclass

import torch

from wsam._core.pytree import map_tensors, structure_of, tensors_of

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


def test_structures_can_be_compared():
    def structure(tree):
        return structure_of(tree, lambda leaf: isinstance(leaf, torch.Tensor))

    one, two = torch.ones(2), torch.ones(3)
    assert structure([one, {"a": two}]) == structure([two, {"a": one}])
    assert structure(UserDict(a=one)) == structure(UserDict(a=two))
    assert structure(Frozen(one, "x")) == structure(Frozen(two, "y"))
    different = [one, [one], [one, one], {"a": one}, {"b": one}, UserDict(a=None), Frozen(one, "x")]
    for i, tree in enumerate(different):
        assert [structure(tree) == structure(other) for other in different].index(True) == i
