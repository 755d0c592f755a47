"""Other people's optimizers in `wsam bench`: which files serve, and what a record says of them."""

from pathlib import Path

import pytest
import torch
from torch import nn

from wsam.bench import peers
from wsam.bench.run import Settings, origin_of
from wsam.bench.timing import Visits


@pytest.mark.parametrize(
    ("text", "message"),
    [("x = 1", "no class SAM"), ("import nowhere_at_all", "import"), ("def", "does not import")],
)
def test_useless_peers_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "peer.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        peers.by_path([f"x={path}"], ["eager"])


def test_a_record_says_which_files_peers_are_of(tmp_path: Path) -> None:
    path = tmp_path / "peer.py"
    path.write_text("class SAM: ...")
    (before,) = peers.digests([f"x={path}"]).items()
    path.write_text("class SAM: pass")
    (after,) = peers.digests([f"x={path}"]).items()
    assert before[0] == after[0] == "x"
    assert before[1] != after[1]
    settings = Settings(device=torch.device("cpu"), peers=(f"x={path}",))
    assert origin_of(settings, Visits(1, 0.0))["peers"] == dict([after])


def test_statistics_pause_and_go_on() -> None:
    norm = nn.BatchNorm1d(3, momentum=0.3)
    peers.resume_statistics(norm)
    for _ in range(2):  # pausing twice must not forget the momentum
        peers.pause_statistics(norm)
        assert norm.momentum == 0
    peers.resume_statistics(norm)
    assert norm.momentum == 0.3
