"""Where kernels find weights, gradients and the base's state, and what they are not to walk over."""

import weakref

import pytest
import torch
from torch import Tensor

from wsam.plan import Plan

CPU = torch.device("cpu")


class Elsewhere(Tensor):
    """A tensor of a class of its own, which may keep its numbers elsewhere."""


def test_weights_of_a_class_of_their_own_are_left_alone() -> None:
    plan = Plan([torch.ones(4).as_subclass(Elsewhere)], CPU)
    assert plan.gradients([torch.ones(4)]) is None
    plan = Plan([torch.ones(4)], CPU)
    assert plan.gradients([torch.ones(4)]) is not None
    plan.follow([torch.ones(4).as_subclass(Elsewhere)])
    assert plan.gradients([torch.ones(4)]) is None


def test_another_tensor_in_the_same_place_is_looked_at() -> None:
    weight = torch.ones(4)
    plan = Plan([weight], CPU)
    assert plan.follow([weight])
    assert not plan.follow([weight.view(2, 2)])


# --- where the base's state lies -------------------------------------------------------------------


def planned() -> tuple[Plan, list[Tensor]]:
    weights = [torch.zeros(4, 4), torch.zeros(16)]
    state = [torch.ones(4, 4), torch.ones(16)]
    plan = Plan(weights, CPU)
    assert plan.addresses(state) == [t.data_ptr() for t in state]
    return plan, state


def test_state_that_was_found_right_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, state = planned()
    other = [torch.ones(4, 4), torch.ones(16)]
    plan.addresses(other)  # Adam has two lists

    def look(tensors: object) -> None:
        raise AssertionError

    monkeypatch.setattr(plan, "gradients", look)
    for tensors in (state, other, state):
        assert plan.addresses(tensors) == [t.data_ptr() for t in tensors]


def test_state_that_is_gone_moved_or_replaced_is_looked_at() -> None:
    plan, state = planned()
    state[0].data = torch.ones(4, 4).t()[:]  # elsewhere, and otherwise laid out
    assert plan.addresses(state) is None
    plan, state = planned()
    assert plan.addresses([state[0], state[1].double()]) is None
    plan, state = planned()
    state.clear()
    assert plan.addresses([None, None]) is None
    fresh = [torch.ones(4, 4), torch.ones(16)]
    assert plan.addresses(fresh) == [t.data_ptr() for t in fresh]


def test_a_plan_holds_no_state() -> None:
    plan, state = planned()
    seen = [weakref.ref(t) for t in state]
    state.clear()
    assert plan.addresses([None, None]) is None
    assert [ref() for ref in seen] == [None, None]
