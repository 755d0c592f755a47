"""torch.distributed.checkpoint: what two ranks saved goes on on two ranks, or on one."""

from pathlib import Path
from typing import Any

import pytest
from helpers import MEMBERS, gap, same
from workers import saving
from workers.pair import team

ROUNDING = 1e-12
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def on(kind: str, task: Any, *args: Any) -> Any:
    """Run the task on two ranks that must agree, or in this process."""
    if kind == "alone":
        return task(*args)
    one, other = team().run(task, *args)
    assert same(one, other)
    return one


def check(mine: Any, saved: Any, exact: bool) -> None:
    """The middle is what was saved, to the bit; the end to the bit on ranks of the same kind."""
    assert same(mine[0], saved[0])
    assert mine[1]["step"] == saved[1]["step"] == 2 * saving.HALF
    assert mine[1]["rho"] == saved[1]["rho"]
    if exact:
        assert same(mine[1], saved[1])
    assert gap(mine[1]["weights"], saved[1]["weights"]) < ROUNDING


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("to", ["alone", "ddp", "fsdp2"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("base", ["momentum", "adamw"])
def test_dcp_save_on_two_load_on_one_or_two(
    base: str, kind: str, to: str, used: bool, tmp_path: Path
) -> None:
    setting = (str(tmp_path), "wsam", base)
    saved = on(kind, saving.save, *setting, kind, False)
    mine = on(to, saving.resume, *setting, to, False, used)
    check(mine, saved, exact=kind == to)


@pytest.mark.parametrize(
    ("name", "flatten"), [*((name, False) for name in MEMBERS), ("wsam", True), ("sam", True)]
)
def test_dcp_every_member(name: str, flatten: bool, tmp_path: Path) -> None:
    setting = (str(tmp_path), name, "adamw")
    saved = on("fsdp2", saving.save, *setting, "fsdp2", flatten)
    check(on("fsdp2", saving.resume, *setting, "fsdp2", flatten, False), saved, exact=True)
    check(on("alone", saving.resume, *setting, "alone", flatten, True), saved, exact=False)
