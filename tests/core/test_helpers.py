"""The parameter lists of the tests: `covering` keeps all values, or all pairs, in the fast tier."""

import itertools

import pytest
from helpers import covering


@pytest.mark.parametrize("strength", [1, 2])
def test_covering(strength: int) -> None:
    factors = {"a": "xyz", "b": range(4), "c": [True, False]}
    cases = covering(strength, **factors).args[1]
    assert len(cases) == 24
    fast = [case.values for case in cases if not case.marks]
    for chosen in itertools.combinations(range(3), strength):
        wanted = set(itertools.product(*(list(factors.values())[i] for i in chosen)))
        assert {tuple(row[i] for i in chosen) for row in fast} == wanted
    assert len(fast) == {1: 4, 2: 12}[strength], "the smallest possible array"
