"""Work plans, weight buffers, and tables of addresses."""

import weakref
from array import array

import pytest
import torch
from torch import Tensor

from wsam.accel import tensor_table
from wsam.accel.tensor_table import PATTERNS, AddressTables, WorkPlan, no_overlap

CPU = torch.device("cpu")


class Subclass(Tensor):
    """A tensor of another class, which may store its elements elsewhere."""


# Which tensors kernels can process ------------------------------------------------------------------


def fits(planned: Tensor, other: Tensor) -> bool:
    return WorkPlan([planned], planned.device).state_addresses([other]) == [other.data_ptr()]


def test_no_overlap() -> None:
    assert no_overlap([100, 0, 50], [8, 50, 50])
    assert not no_overlap([0, 0], [4, 4])
    assert not no_overlap([0, 8, 90], [100, 0, 8]), "an empty range is between the two"


def test_tensors_must_have_the_layout_of_the_weights() -> None:
    a = torch.zeros(4, 6)
    assert fits(a, a.clone())
    assert fits(a.t(), a.clone().t())
    assert not fits(a, a.t().contiguous().t())  # other strides
    assert not fits(a, torch.zeros(8, 3))
    assert not fits(a[:, :3], a[:, 3:])  # not dense
    assert not fits(a, a.double())
    assert not fits(torch.zeros(8), torch.zeros(4))
    assert not fits(torch.zeros(8), torch.zeros(9)[1:])  # not aligned
    assert not fits(torch.zeros(0), torch.zeros(0))  # no program to launch
    plan = WorkPlan([a], CPU)
    assert plan.state_addresses([None]) is None
    assert plan.state_addresses([torch.zeros(4, 6, device="meta")]) is None
    assert plan.state_addresses([torch.zeros(4, 6).as_subclass(Subclass)]) is None


def test_weights_of_a_subclass_are_not_processed() -> None:
    plan = WorkPlan([torch.ones(4).as_subclass(Subclass)], CPU)
    assert plan.gradient_addresses([torch.ones(4)]) is None
    plan = WorkPlan([torch.ones(4)], CPU)
    assert plan.gradient_addresses([torch.ones(4)]) is not None
    assert plan.fits([torch.ones(4).as_subclass(Subclass)])
    assert plan.gradient_addresses([torch.ones(4)]) is None


def test_weights_of_another_layout_are_not_processed() -> None:
    weight = torch.ones(4)
    plan = WorkPlan([weight], CPU)
    assert plan.fits([weight])
    for other in (torch.ones(2, 2), torch.ones(5), torch.ones(4).double()):
        for _ in range(2):
            assert not plan.fits([other])
    view = weight.view(2, 2)  # at the same address
    assert not plan.fits([view]) or plan.gradient_addresses([torch.ones_like(view)]) is None


def test_a_weight_buffer_has_the_layout_of_the_weights() -> None:
    weights = [torch.zeros(3), torch.zeros(4, 6).t(), torch.zeros(())]
    buffer = WorkPlan(weights, CPU).buffer()
    assert len(buffer) == 3
    for value, (copy, weight) in enumerate(zip(buffer, weights, strict=True)):
        assert (copy.shape, copy.stride()) == (weight.shape, weight.stride())
        copy.fill_(value)
    assert [t.data_ptr() for t in buffer] == buffer.addresses()
    assert [bool((t == i).all()) for i, t in enumerate(buffer)] == [True] * 3
    buffer.restore(weights)
    assert [float(w.sum()) for w in weights] == [0, 24, 2]


# The base's state -----------------------------------------------------------------------------------


def planned() -> tuple[WorkPlan, list[Tensor]]:
    plan = WorkPlan([torch.zeros(4, 4), torch.zeros(16)], CPU)
    state = [torch.ones(4, 4), torch.ones(16)]
    assert plan.state_addresses(state) == [t.data_ptr() for t in state]
    return plan, state


def test_state_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, state = planned()
    other = [torch.ones(4, 4), torch.ones(16)]
    plan.state_addresses(other)  # Adam has two lists

    def check(tensors: object) -> None:
        raise AssertionError

    monkeypatch.setattr(plan, "gradient_addresses", check)
    for tensors in (state, other, state):
        assert plan.state_addresses(tensors) == [t.data_ptr() for t in tensors]


def test_moved_or_replaced_state_is_checked_again() -> None:
    plan, state = planned()
    state[0].data = torch.ones(4, 4).t()[:]
    assert plan.state_addresses(state) is None
    plan, state = planned()
    assert plan.state_addresses([state[0], state[1].double()]) is None
    plan, state = planned()
    state.clear()
    assert plan.state_addresses([None, None]) is None
    fresh = [torch.ones(4, 4), torch.ones(16)]
    assert plan.state_addresses(fresh) == [t.data_ptr() for t in fresh]


def test_a_plan_does_not_keep_state_alive() -> None:
    plan, state = planned()
    refs = [weakref.ref(t) for t in state]
    state.clear()
    assert plan.state_addresses([None, None]) is None
    assert [ref() for ref in refs] == [None, None]


# Tables ---------------------------------------------------------------------------------------------


def test_interrupted_uploads_of_tables_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, own = AddressTables(CPU), tensor_table.upload
    tables.begin(recording=False)
    tables.table([[1, 2]])

    def interrupted(into: Tensor, numbers: "array[int]") -> None:
        own(into, numbers)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tensor_table, "upload", interrupted)
        tables.begin(recording=False)
        with pytest.raises(KeyboardInterrupt):
            tables.table([[3, 4]])
    for addresses in ([1, 2], [3, 4]):
        tables.begin(recording=False)
        assert tables.table([addresses]).tolist() == addresses


def test_recurring_addresses_are_uploaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, own, uploaded = AddressTables(CPU), tensor_table.upload, []

    def upload(into: Tensor, numbers: "array[int]") -> None:
        uploaded.append(list(numbers))
        own(into, numbers)

    monkeypatch.setattr(tensor_table, "upload", upload)

    def request(*addresses: int) -> list[int]:
        tables.begin(recording=False)
        return tables.table([list(addresses)]).tolist()

    for step in range(6):  # two patterns take turns
        assert request(1 + step % 2, 5) == [1 + step % 2, 5]
    assert uploaded == [[1, 5], [2, 5]]
    for other in range(10, 10 + PATTERNS):  # more patterns than are kept
        assert request(other, 5) == [other, 5]
    assert request(1, 5) == [1, 5]
    assert uploaded[-1] == [1, 5]
    assert request(3) == [3], "a shorter table gets its own memory"


def test_a_recorded_table_is_not_overwritten() -> None:
    tables = AddressTables(CPU)
    for addresses in ([1, 2], [3, 4], [7]):
        tables.begin(recording=False)
        tables.table([addresses])
    tables.begin(recording=True)
    recorded = tables.table([[5, 6]])
    tables.recorded()
    assert recorded.tolist() == [5, 6]
    tables.begin(recording=False)
    assert tables.table([[5, 6]]) is recorded
    tables.begin(recording=False)
    assert tables.table([[3, 4]]).tolist() == [3, 4]
    assert recorded.tolist() == [5, 6], "the graph reads it"
