"""Tables of addresses, and how kernels are launched that were made once."""

from array import array
from types import SimpleNamespace
from typing import Any

import emulated
import pytest
import torch
from torch import Tensor

from wsam import launch, tables

CPU = torch.device("cpu")


def test_a_table_that_was_interrupted_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    held, own = tables.Tables(CPU), tables.upload
    held.begin(recording=False)
    held.table([[1, 2]])

    def interrupted(into: Tensor, numbers: "array[int]") -> None:
        own(into, numbers)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tables, "upload", interrupted)
        held.begin(recording=False)
        with pytest.raises(KeyboardInterrupt):
            held.table([[3, 4]])
    held.begin(recording=False)
    assert held.table([[1, 2]]).tolist() == [1, 2]


def test_addresses_that_recur_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    held, own, written = tables.Tables(CPU), tables.upload, []

    def upload(into: Tensor, numbers: "array[int]") -> None:
        written.append(list(numbers))
        own(into, numbers)

    monkeypatch.setattr(tables, "upload", upload)

    def ask(*addresses: int) -> list[int]:
        held.begin(recording=False)
        return held.table([list(addresses)]).tolist()

    for turn in range(6):  # every other step another
        assert ask(1 + turn % 2, 5) == [1 + turn % 2, 5]
    assert written == [[1, 5], [2, 5]]
    for other in range(10, 10 + tables.PATTERNS):  # which are too many to keep
        assert ask(other, 5) == [other, 5]
    assert ask(1, 5) == [1, 5]
    assert written[-1] == [1, 5]
    assert ask(3) == [3], "a shorter one gets memory of its own"


def test_a_recording_keeps_its_table_and_no_other() -> None:
    held = tables.Tables(CPU)
    for addresses in ([1, 2], [3, 4], [7]):
        held.begin(recording=False)
        held.table([addresses])
    held.begin(recording=True)
    recorded = held.table([[5, 6]])
    held.recorded()
    assert recorded.tolist() == [5, 6]
    held.begin(recording=False)
    assert held.table([[5, 6]]) is recorded
    held.begin(recording=False)
    assert held.table([[3, 4]]).tolist() == [3, 4]
    assert recorded.tolist() == [5, 6], "a graph reads it"


class Made:
    """A kernel that Triton has made: launched without keywords."""

    def __init__(self, takes: int) -> None:
        self.takes, self.launched, self.attempts = takes, [], 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*given: Any, stream: Any) -> None:
            self.attempts, self.stream = self.attempts + 1, stream
            if len(given) != self.takes:
                raise TypeError(f"function takes exactly {self.takes} arguments")
            self.launched.append((grid, given))

        return run


@pytest.mark.parametrize("takes", [5, 3])
def test_a_kernel_that_was_made_is_launched_directly(
    takes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, found = Made(takes), emulated.install(monkeypatch)
    searched = []

    def search(*given: Any, **constants: Any) -> Made:
        searched.append((given, constants))
        return made

    monkeypatch.setattr(found, "finish", {(7,): search})
    run = launch.Launcher(torch.device("cpu"))
    for _ in range(3):
        run("finish", 7, "table", "numbers", 62, BRANCHES=3, BLOCK=16)
    constants = {"BRANCHES": 3, "BLOCK": 16, "num_warps": launch.WARPS}
    wanted = [(("table", "numbers", 62), constants)]
    if takes == 5:  # the constants come again
        assert searched == wanted
        assert made.launched == [((7, 1, 1), ("table", "numbers", 62, 3, 16))] * 2
    else:  # an older Triton: never again
        assert searched == wanted * 3
        assert (made.attempts, made.launched) == (1, [])


def test_a_kernel_is_launched_where_torch_works_now(monkeypatch: pytest.MonkeyPatch) -> None:
    made, found = Made(0), emulated.install(monkeypatch)
    monkeypatch.setattr(found, "finish", {(7,): lambda **constants: made})
    streams = {torch.device("cuda", 1): SimpleNamespace(cuda_stream=42)}
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    run = launch.Launcher(torch.device("cuda", 1))
    for _ in range(2):
        run("finish", 7)
    assert made.stream == 42


def test_another_variant_of_a_kernel_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    found, searched = emulated.install(monkeypatch), []
    monkeypatch.setattr(
        found, "squares", {(1,): lambda **constants: searched.append(constants) or Made(1)}
    )
    run = launch.Launcher(torch.device("cpu"))
    for block in (16, 32, 16):
        run("squares", 1, BLOCK=block)
    assert [constants["BLOCK"] for constants in searched] == [16, 32]
