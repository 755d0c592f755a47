"""FSDP2 and tensor parallelism: one global norm over all shards, weights restored in the shards."""

from typing import Any

import pytest
from helpers import LEAN, METHODS, ONE_PASS, REUSED, RULES, VARIANTS, covering, gap, same
from workers import sharded
from workers.problem import expected_weights
from workers.process_group import process_group

import wsam
from wsam.rule import Reuse

pytestmark = pytest.mark.slow  # the processes take seconds to start
ROUNDING = 1e-12


def assert_close(results: list[Any], expected: Any, rounding: float = ROUNDING) -> None:
    """All ranks are bitwise equal, and equal to the reference up to rounding."""
    for result in results:
        assert same(result, results[0])
    assert gap(results[0], expected) < rounding


@covering(name=VARIANTS, style=["closure", "phases"])
def test_fsdp2_parity(name: str, style: str) -> None:
    results = process_group().run(sharded.train, name, style=style)
    assert_close(results, expected_weights(name))


@pytest.mark.parametrize("name", RULES)
def test_fsdp2_adam_and_clipping(name: str) -> None:
    results = process_group().run(sharded.train, name, base="adamw", max_norm=0.5)
    assert_close(results, expected_weights(name, base="adamw", max_norm=0.5))


@pytest.mark.parametrize("base", ["adam", "nadam", "radam", "rmsprop", "adagrad", "adadelta"])
def test_fsdp2_preconditioned(base: str) -> None:
    results = process_group().run(sharded.train, "wsam", base=base)
    rounding = 1e-8 if base == "nadam" else ROUNDING  # torch keeps its mu_product in float32
    assert_close(results, expected_weights("wsam", base=base), rounding)


def test_fsdp2_per_layer_geometry() -> None:
    for found, single in process_group().run(sharded.geometry, wsam.PerLayer(), "adamw"):
        assert gap(found, single) < ROUNDING


def test_fsdp2_preconditioned_geometry() -> None:
    for found, single in process_group().run(sharded.geometry, wsam.Preconditioned(), "adamw"):
        assert gap(found, single) < ROUNDING


@pytest.mark.parametrize("name", METHODS)
def test_fsdp2_restores_bitwise(name: str) -> None:
    for moved, restored, same_storages in process_group().run(sharded.restored, name):
        assert moved
        assert restored
        assert same_storages == 5


@pytest.mark.parametrize("name", RULES)
def test_fsdp2_evaluation_at_both_points(name: str) -> None:
    """A forward pass without backward leaves gathered weights, which must not be used at w + d."""
    for found, single in process_group().run(sharded.evaluated, name):
        assert found == pytest.approx(single, rel=ROUNDING)
        assert found[1] > found[0] == found[2]


@covering(name=[*RULES, *ONE_PASS], reason=["after an evaluation", "after backward"])
def test_fsdp2_gathered_weights(name: str, reason: str) -> None:
    for found, single in process_group().run(sharded.gathered, name, reason):
        assert gap(found, single) < ROUNDING


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (REUSED, {}),
        (REUSED, {"reuse": Reuse(scale_by_norm=True, average=0.5)}),
        ("looksam", {"n": 2}),
        ("looksam", {"n": 2, "per_tensor": True}),
    ],
)
def test_fsdp2_kept_vectors(name: str, options: dict[str, Any]) -> None:
    """Norms of the kept vector, of all tensors or of each, are over all shards."""
    for found, single in process_group().run(sharded.gathered, name, "", **options):
        assert gap(found, single) < ROUNDING


@pytest.mark.parametrize("name", RULES)
def test_fsdp2_inf_one_rank_only(name: str) -> None:
    assert process_group().run(sharded.overflow_on_one_rank, name) == [(1, True, False)] * 2


@pytest.mark.parametrize("name", ["wsam", LEAN])
def test_fsdp2_accumulation(name: str) -> None:
    assert_close(process_group().run(sharded.accumulated, name), expected_weights(name))


@pytest.mark.parametrize("name", RULES)
def test_fsdp2_micro_perturbation(name: str) -> None:
    for found, single in process_group().run(sharded.micro_batches, name):
        assert gap(found, single) < ROUNDING


@covering(name=VARIANTS, kind=["plain", "ignored", "replicated"])
def test_fsdp2_mixed_with_plain(name: str, kind: str) -> None:
    assert_close(process_group().run(sharded.mixed, name, kind), expected_weights(name))


@pytest.mark.parametrize("name", RULES)
def test_fsdp2_mixed_precision(name: str) -> None:
    for difference, distance in process_group().run(sharded.low_precision, name):
        assert difference < 0.02 * distance


@covering(name=[*VARIANTS, *ONE_PASS, REUSED], style=["closure", "phases"])
def test_tensor_parallel_parity(name: str, style: str) -> None:
    for found, single, kinds in process_group().run(sharded.tensor_parallel, name, style):
        assert gap(found, single) < ROUNDING
        assert any("Partial" in kind for kind in kinds), "no gradient was a partial sum"


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_fsdp2_over_tensor_parallel(name: str) -> None:
    results = process_group(4).run(sharded.two_dimensions, name)
    assert_close([w for w, _ in results], expected_weights(name, hidden=8))
    assert "StridedShard" in str(results[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_hsdp_parity(name: str) -> None:
    assert_close(process_group(4).run(sharded.hybrid, name), expected_weights(name))


@pytest.mark.parametrize("whole", [False, True])
def test_fsdp1_is_refused(whole: bool) -> None:
    for message in process_group().run(sharded.fsdp1_error, whole):
        assert "fully_shard" in message
