"""DistributedDataParallel: equal to one process, bitwise equal replicas, and clear errors."""

from typing import Any

import pytest
import torch
from helpers import (
    AVERAGING,
    LEAN,
    METHODS,
    ONE_PASS,
    REUSED,
    RULES,
    VARIANTS,
    covering,
    full,
    gap,
    same,
)
from workers import ddp
from workers.problem import STEPS, expected_weights, net
from workers.process_group import process_group

import wsam

pytestmark = pytest.mark.slow  # the processes take seconds to start
ROUNDING = 1e-12
LOCAL = [False, True]


def assert_close(results: list[Any], expected: Any) -> None:
    """Both ranks are bitwise equal, and equal to the reference up to rounding."""
    assert same(results[0], results[1])
    assert gap(results[0], expected) < ROUNDING


@covering(name=VARIANTS, style=["closure", "phases"], buckets=list(ddp.VIEWS))
def test_ddp_parity(name: str, style: str, buckets: str) -> None:
    results = process_group().run(ddp.train, name, style=style, buckets=buckets)
    assert_close(results, expected_weights(name))


@covering(
    name=[name for name in METHODS if name not in AVERAGING],
    style=["closure", "phases"],
    buckets=["copies", "views of one"],
)
def test_ddp_local(name: str, style: str, buckets: str) -> None:
    results = process_group().run(ddp.train, name, local=True, style=style, buckets=buckets)
    assert_close(results, expected_weights(name, local=True))
    assert gap(results[0], expected_weights(name)) > 1e-6, "not the synchronized perturbation"


@pytest.mark.parametrize(
    ("name", "local"), [*((name, False) for name in (*ONE_PASS, REUSED)), (REUSED, True)]
)
def test_ddp_one_pass_steps(name: str, local: bool) -> None:
    results = process_group().run(ddp.against_one_process, name, local)
    for found, single in results:
        assert gap(found, single) < ROUNDING
    assert same(results[0][0], results[1][0])


@pytest.mark.parametrize("name", RULES)
def test_ddp_local_ascent_steps(name: str) -> None:
    """Only the last pass is synchronized."""
    results = process_group().run(ddp.train, name, local=True, ascent_steps=3)
    assert_close(results, expected_weights(name, local=True, ascent_steps=3))
    assert gap(results[0], expected_weights(name, local=True)) > 1e-6


@covering(name=METHODS, local=LOCAL)
def test_ddp_adam_and_clipping(name: str, local: bool) -> None:
    if local and name in AVERAGING:
        pytest.skip("its average would differ between ranks")
    options = {"local": True} if local else {}
    results = process_group().run(ddp.train, name, **options, base="adamw", max_norm=0.5)
    assert_close(results, expected_weights(name, local=local, base="adamw", max_norm=0.5))


@covering(2, name=RULES, local=LOCAL, base=["adamw", "momentum"])
def test_replicas_bit_identical(name: str, local: bool, base: str) -> None:
    one, other = process_group().run(ddp.long_run, name, local, base, 100)
    assert same(one, other)
    assert one["groups"][0]["sam_step"] == 100
    assert all(w.isfinite().all() for w in one["weights"])


@full(local=LOCAL)
def test_frozen(local: bool) -> None:
    one, other = process_group().run(ddp.frozen, local)
    assert same(one, other)
    unchanged = [torch.equal(u, v) for u, v in zip(one[0], net().parameters(), strict=True)]
    assert unchanged == [False, False, False, True, False]
    assert not one[1]


@covering(2, name=RULES, local=LOCAL, bad_pass=[1, 2])
def test_inf_one_rank_only(name: str, local: bool, bad_pass: int) -> None:
    results = process_group().run(ddp.overflow_on_one_rank, name, local, bad_pass, "skip")
    for result in results:
        assert result["skipped"] == 1
        assert same(result["before"], result["after"])
        assert not same(result["after"]["weights"], result["end"]["weights"])
    assert same(results[0]["end"], results[1]["end"])


@full(local=LOCAL, bad_pass=[1, 2])
def test_inf_one_rank_raises_on_all(local: bool, bad_pass: int) -> None:
    for result in process_group().run(ddp.overflow_on_one_rank, "wsam", local, bad_pass, "raise"):
        assert "NaN or infinite" in result["raised"]
        assert same(result["before"], result["after"])


@full(local=LOCAL)
def test_scaler_inf_one_rank_only(local: bool) -> None:
    one, other = process_group().run(ddp.scaled, local)
    assert same(one, other)
    assert one["scale"] == 512.0
    assert one["skipped"] == 1
    assert same(one["weights"][0], one["weights"][1])
    assert not same(one["weights"][1], one["weights"][2])


@covering(name=RULES, initial=[False, True])
def test_join_uneven(name: str, initial: bool) -> None:
    one, other = process_group().run(ddp.uneven, name, local=False, initial=initial)
    assert (one[0], other[0]) == ("", "")
    assert same(one[1], other[1]), "the rank that has finished gets the weights of the other"
    alone = expected_weights(name, idle_after=2, halved=initial)
    assert gap(one[1], alone) < ROUNDING


def test_join_uneven_local_is_refused() -> None:
    for message, _ in process_group().run(ddp.uneven, "sam", local=True, initial=True):
        assert "local=True inside join()" in message
        assert "as many batches" in message


LEFT = [[True, False], [True, True], [False, True], [False, False], [True, False]]


@covering(name=RULES, alternating=[False, True])
def test_find_unused_parameters(name: str, alternating: bool) -> None:
    results = process_group().run(ddp.branches, name, alternating, LEFT)
    for found, single in results:
        assert gap(found, single) < ROUNDING
    assert same(results[0][0], results[1][0])


@pytest.mark.parametrize("name", RULES)
def test_static_graph(name: str) -> None:
    results = process_group().run(ddp.train, name, ddp={"static_graph": True})
    assert_close(results, expected_weights(name))


@pytest.mark.parametrize("kind", ["plain", "fsdp2", "find_unused_parameters", "static_graph"])
def test_local_is_refused(kind: str) -> None:
    wanted = "DistributedDataParallel" if kind in {"plain", "fsdp2"} else f"set {kind}=False"
    for message in process_group().run(ddp.local_error, kind):
        assert "local=True" in message
        assert wanted in message


@covering(name=RULES, local=LOCAL)
def test_plain_steps(name: str, local: bool) -> None:
    when = wsam.schedule.Every(2, offset=1)
    results = process_group().run(ddp.train, name, local=local, when=when)
    assert_close(results, expected_weights(name, local=local, base_steps=(0, 2)))


@covering(name=["sam", "wsam"], local=LOCAL)
def test_radius_zero(name: str, local: bool) -> None:
    results = process_group().run(ddp.train, name, local=local, rho=0.0)
    assert_close(results, expected_weights(name, local=local, base_steps=tuple(range(STEPS))))


@pytest.mark.parametrize("name", ["sam", "wsam"])
def test_ranks_agree_on_an_interval(name: str) -> None:
    when = wsam.schedule.NormAbove(factor=0.0)
    one, other = process_group().run(ddp.train, name, local=True, when=when, steps=12)
    assert same(one, other)
    all_perturbed = expected_weights(name, local=True, steps=12)
    none_perturbed = expected_weights(name, local=True, steps=12, base_steps=tuple(range(12)))
    assert gap(one, all_perturbed) > 1e-6
    assert gap(one, none_perturbed) > 1e-6


@covering(2, name=RULES, local=LOCAL, buckets=["copies", "views of one"])
def test_micro_perturbation(name: str, local: bool, buckets: str) -> None:
    for found, single in process_group().run(ddp.micro_batches, name, local, buckets):
        assert gap(found, single) < ROUNDING


@pytest.mark.parametrize(("name", "local"), [("wsam", False), ("wsam", True), (LEAN, False)])
def test_accumulation(name: str, local: bool) -> None:
    results = process_group().run(ddp.accumulated, name, local)
    assert_close(results, expected_weights("wsam", local=local))


def test_accumulation_by_flag() -> None:
    results = process_group().run(ddp.accumulated, "wsam", local=False, by_flag=True)
    assert_close(results, expected_weights("wsam"))


@pytest.mark.parametrize("kind", ["flag", "forward outside", "by hand"])
def test_averaged_first_pass_is_refused(kind: str) -> None:
    for message in process_group().run(ddp.averaged_first_pass, kind):
        assert "with model.no_sync()" in message


@pytest.mark.parametrize("buckets", ddp.VIEWS)
def test_perturbed_keeps_gradients(buckets: str) -> None:
    assert process_group().run(ddp.perturbed_with_backward, buckets) == [(True, True)] * 2


@full(local=LOCAL)
def test_statistics_advance_once(local: bool) -> None:
    for found, plain in process_group().run(ddp.statistics, local):
        assert same(found, plain)
        assert int(found[-1]) == 3
