"""Optimizers of other libraries in `wsam bench`: loading files, and their digests in a record."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from wsam.bench import third_party
from wsam.bench.run import Settings, all_cases, provenance
from wsam.bench.timing import TimingPlan


@pytest.mark.parametrize(
    ("text", "message"),
    [("x = 1", "class 'SAM'"), ("import nowhere_at_all", "No module"), ("def", "SyntaxError")],
)
def test_unsuitable_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "peer.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        third_party.file_cases([f"x={path}"], ["eager"])


@pytest.mark.parametrize("names", [["SAM"], ["mine", "mine"]])
def test_names_of_files_are_unique(names: list[str], tmp_path: Path) -> None:
    """Times are kept by name."""
    path = tmp_path / "peer.py"
    path.write_text("class SAM: ...")
    peers = tuple(f"{name}={path}" for name in names)
    with pytest.raises(ValueError, match=f"--peer {names[0]}: another case has this name"):
        all_cases(Settings(device=torch.device("cpu"), peers=peers))


def test_record_has_digests_of_files(tmp_path: Path) -> None:
    path = tmp_path / "peer.py"
    path.write_text("class SAM: ...")
    (before,) = third_party.file_digests([f"x={path}"]).items()
    path.write_text("class SAM: pass")
    (after,) = third_party.file_digests([f"x={path}"]).items()
    assert before[0] == after[0] == "x"
    assert before[1] != after[1]
    settings = Settings(device=torch.device("cpu"), peers=(f"x={path}",))
    assert provenance(settings, TimingPlan(1, 0.0))["peers"] == dict([after])


def test_a_step_that_moves_the_weights_is_found() -> None:
    """A CUDA graph would read them at the old address."""
    p = nn.Parameter(torch.ones(2))

    def move() -> None:
        p.data = p.data.clone()

    third_party.check_addresses(lambda: p.data.add_(1.0), [p])
    with pytest.raises(third_party.NotCapturableError, match="moves the weights"):
        third_party.check_addresses(move, [p])


@pytest.mark.parametrize("period", [1, 5])
def test_graphs_begin_with_the_first_step_of_a_period(
    period: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def capture(run: Callable[[], object], warm: int) -> Callable[[], object]:
        run()
        kind = (len(made) - 1) % period
        return lambda: made.append(kind)

    def repeat(run: Callable[[], object], count: int) -> None:
        for _ in range(count):
            run()

    monkeypatch.setattr(third_party, "capture_graph", capture)
    monkeypatch.setattr(third_party, "warm_up", repeat)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    modes: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    step = third_party.capture_peer(lambda: made.append(-1), nn.Linear(2, 1), period)
    assert len(made) == 5 * period, "four eager steps of each kind, and a capture"
    made.clear()
    for _ in range(period):
        step()
    assert made == list(range(period))
    assert modes == ["error", 0]


def test_a_step_that_synchronizes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forbidden: list[bool] = []

    def step() -> None:
        if forbidden:
            raise RuntimeError("called a synchronizing CUDA operation\nand more")

    def repeat(run: Callable[[], object], count: int) -> None:
        run()

    monkeypatch.setattr(third_party, "warm_up", repeat)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: forbidden.append(True))
    reason = r"synchronizes with the host \(called a synchronizing CUDA operation\)$"
    with pytest.raises(third_party.NotCapturableError, match=reason):
        third_party.capture_peer(step, nn.Linear(2, 1))


def test_graphs_of_a_period_are_replayed_in_turn() -> None:
    calls: list[int] = []
    steps = third_party.in_turn([lambda: calls.append(0), lambda: calls.append(1)])
    for _ in range(5):
        steps()
    assert calls == [0, 1, 0, 1, 0]


def test_running_stats_are_disabled_and_enabled() -> None:
    norm = nn.BatchNorm1d(3, momentum=0.3)
    third_party.enable_running_stats(norm)
    for _ in range(2):  # the second call must keep the saved momentum
        third_party.disable_running_stats(norm)
        assert norm.momentum == 0
    third_party.enable_running_stats(norm)
    assert norm.momentum == 0.3
