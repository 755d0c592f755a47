"""torch.distributed.checkpoint: a state saved on two ranks continues on two ranks, or on one."""

from pathlib import Path
from typing import Any

import pytest
from helpers import ALL, AVERAGING, REUSED, covering, gap, same
from workers import checkpoints
from workers.process_group import process_group

import wsam

ROUNDING = 1e-12
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def on(kind: str, task: Any, *args: Any, **options: Any) -> Any:
    """Run the task on two ranks, whose results must be equal, or in this process."""
    if kind == "alone":
        return task(*args, **options)
    one, other = process_group().run(task, *args, **options)
    assert same(one, other)
    return one


def check(mine: Any, saved: Any, exact: bool) -> None:
    """The loaded state is bitwise the saved one; so is the end if both are of the same kind."""
    assert same(mine[0], saved[0])
    assert mine[1]["step"] == saved[1]["step"] == 2 * checkpoints.HALF
    assert mine[1]["rho"] == saved[1]["rho"]
    if exact:
        assert same(mine[1], saved[1])
    assert gap(mine[1]["weights"], saved[1]["weights"]) < ROUNDING


@covering(
    2,
    base=["momentum", "adamw"],
    kind=["ddp", "fsdp2"],
    to=["alone", "ddp", "fsdp2"],
    used=[False, True],
)
def test_dcp_save_on_two_load_on_one_or_two(
    base: str, kind: str, to: str, used: bool, tmp_path: Path
) -> None:
    setting = (str(tmp_path), "wsam", base)
    saved = on(kind, checkpoints.save, *setting, kind, False)
    mine = on(to, checkpoints.resume, *setting, to, False, used)
    check(mine, saved, exact=kind == to)


@covering(name=[*ALL, REUSED], flatten=[False, True])
def test_dcp_every_method(name: str, flatten: bool, tmp_path: Path) -> None:
    setting = (str(tmp_path), name, "adamw")
    saved = on("fsdp2", checkpoints.save, *setting, "fsdp2", flatten)
    check(on("fsdp2", checkpoints.resume, *setting, "fsdp2", flatten, False), saved, exact=True)
    check(on("alone", checkpoints.resume, *setting, "alone", flatten, True), saved, exact=False)


@covering(name=[*AVERAGING, "looksam", REUSED], base=["momentum", "adagrad"], flatten=[False, True])
def test_dcp_before_the_first_perturbed_step(
    name: str, base: str, flatten: bool, tmp_path: Path
) -> None:
    """What the method keeps between steps has no value yet, but a place in the checkpoint."""
    setting = (str(tmp_path), name, base)
    options = {"when": wsam.schedule.Between(checkpoints.HALF + 1)}
    saved = on("fsdp2", checkpoints.save, *setting, "fsdp2", flatten, **options)
    mine = on("fsdp2", checkpoints.resume, *setting, "fsdp2", flatten, False, **options)
    check(mine, saved, exact=True)


@pytest.mark.parametrize("flatten", [False, True])
def test_dcp_of_a_base_that_creates_its_state_at_construction(
    flatten: bool, tmp_path: Path
) -> None:
    """torch.distributed.checkpoint then makes no step to create the rest of the state."""
    setting = (str(tmp_path), REUSED, "adagrad")
    saved = on("fsdp2", checkpoints.save, *setting, "fsdp2", flatten)
    check(on("fsdp2", checkpoints.resume, *setting, "fsdp2", flatten, False), saved, exact=True)


def test_zero_redundancy_optimizer_resumes_bitwise() -> None:
    """The state is divided among the ranks, and consolidated on rank 0."""
    assert process_group().run(checkpoints.resume_zero_redundancy) == [[True, True]] * 2
