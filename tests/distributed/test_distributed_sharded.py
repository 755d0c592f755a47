"""FSDP2 and tensor parallelism: one global norm over all shards, weights restored on the shards."""

from typing import Any

import pytest
import reference
from helpers import MEMBERS, gap, same
from workers import sharded
from workers.pair import team
from workers.problem import judged

pytestmark = pytest.mark.slow

ROUNDING = 1e-12
LATE_AND_LEAN = [(name, False) for name in MEMBERS] + [
    (name, True) for name in MEMBERS if reference.MEMBERS[name].rule == "wsam"
]


def close(results: list[Any], expected: Any) -> None:
    """All ranks have the same bits, and these are the judge's to rounding."""
    for result in results:
        assert same(result, results[0])
    assert gap(results[0], expected) < ROUNDING


@pytest.mark.parametrize("style", ["closure", "phases"])
@pytest.mark.parametrize(("name", "lean"), LATE_AND_LEAN)
def test_fsdp2_parity(name: str, lean: bool, style: str) -> None:
    close(team().run(sharded.train, name, lean=lean, style=style), judged(name))


@pytest.mark.parametrize("name", MEMBERS)
def test_fsdp2_adam_and_clipping(name: str) -> None:
    results = team().run(sharded.train, name, base="adamw", max_norm=0.5)
    close(results, judged(name, base="adamw", max_norm=0.5))


@pytest.mark.parametrize("name", MEMBERS)
def test_fsdp2_restores_bitwise(name: str) -> None:
    for moved, back, same_memory in team().run(sharded.restored, name):
        assert moved
        assert back
        assert same_memory == 5


@pytest.mark.parametrize("name", MEMBERS)
def test_fsdp2_inf_one_rank_only(name: str) -> None:
    assert team().run(sharded.poisoned, name) == [(1, True, False)] * 2


@pytest.mark.parametrize("lean", [False, True])
def test_fsdp2_accumulation(lean: bool) -> None:
    close(team().run(sharded.accumulated, "wsam", lean), judged("wsam"))


@pytest.mark.parametrize("name", ["sam", "wsam", "gsam"])
def test_fsdp2_micro_perturbation(name: str) -> None:
    for mine, alone in team().run(sharded.micro_batches, name):
        assert gap(mine, alone) < ROUNDING


@pytest.mark.parametrize("kind", ["plain", "ignored", "replicated"])
@pytest.mark.parametrize(("name", "lean"), LATE_AND_LEAN)
def test_fsdp2_mixed_with_plain(name: str, lean: bool, kind: str) -> None:
    close(team().run(sharded.mixed, name, lean, kind), judged(name))


@pytest.mark.parametrize("name", MEMBERS)
def test_fsdp2_mixed_precision(name: str) -> None:
    for apart, travelled in team().run(sharded.low_precision, name):
        assert apart < 0.02 * travelled


@pytest.mark.parametrize("style", ["closure", "phases"])
@pytest.mark.parametrize(("name", "lean"), LATE_AND_LEAN)
def test_tensor_parallel_parity(name: str, lean: bool, style: str) -> None:
    for mine, alone, kinds in team().run(sharded.tensor_parallel, name, lean, style):
        assert gap(mine, alone) < ROUNDING
        assert any("Partial" in kind for kind in kinds), "gradients that are still to be summed"


@pytest.mark.parametrize(("name", "lean"), LATE_AND_LEAN)
def test_fsdp2_over_tensor_parallel(name: str, lean: bool) -> None:
    results = team(4).run(sharded.two_dimensions, name, lean)
    close([w for w, _ in results], judged(name, hidden=8))
    assert "StridedShard" in str(results[0][1])


@pytest.mark.parametrize(("name", "lean"), LATE_AND_LEAN)
def test_hsdp_parity(name: str, lean: bool) -> None:
    close(team(4).run(sharded.hybrid, name, lean), judged(name))


@pytest.mark.parametrize("whole", [False, True])
def test_fsdp1_is_refused(whole: bool) -> None:
    for said in team().run(sharded.first_version, whole):
        assert "fully_shard" in said
