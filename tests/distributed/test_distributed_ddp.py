"""DistributedDataParallel: one process's numbers, replicas alike to the last bit, and clear refusals.

Two processes live through all tests of a file and run the tasks of `workers`.
"""

from typing import Any

import pytest
import reference
import torch
from helpers import MEMBERS, gap, same
from workers import ddp
from workers.pair import team
from workers.problem import STEPS, judged, net

import wsam

pytestmark = pytest.mark.slow

ROUNDING = 1e-12
LATE_AND_LEAN = [(name, False) for name in MEMBERS] + [
    (name, True) for name in MEMBERS if reference.MEMBERS[name].rule == "wsam"
]
KEEPING = [name for name in MEMBERS if reference.MEMBERS[name].rule != "sam"]


def close(results: list[Any], expected: Any) -> None:
    """Both ranks have the same bits, and these are the judge's to rounding."""
    assert same(results[0], results[1])
    assert gap(results[0], expected) < ROUNDING


@pytest.mark.parametrize("buckets", ddp.VIEWS)
@pytest.mark.parametrize("style", ["closure", "phases"])
@pytest.mark.parametrize(("name", "lean"), LATE_AND_LEAN)
def test_ddp_parity(name: str, lean: bool, style: str, buckets: str) -> None:
    results = team().run(ddp.train, name, lean=lean, style=style, buckets=buckets)
    close(results, judged(name))


@pytest.mark.parametrize("buckets", ["copies", "views of one"])
@pytest.mark.parametrize("style", ["closure", "phases"])
@pytest.mark.parametrize("name", MEMBERS)
def test_ddp_local(name: str, style: str, buckets: str) -> None:
    results = team().run(ddp.train, name, local=True, style=style, buckets=buckets)
    close(results, judged(name, local=True))
    assert gap(results[0], judged(name)) > 1e-6, "it is not the synchronised perturbation"


@pytest.mark.parametrize("local", [False, True], ids=["together", "local"])
@pytest.mark.parametrize("name", MEMBERS)
def test_ddp_adam_and_clipping(name: str, local: bool) -> None:
    results = team().run(ddp.train, name, local=local, base="adamw", max_norm=0.5)
    close(results, judged(name, local=local, base="adamw", max_norm=0.5))


@pytest.mark.parametrize("local", [False, True], ids=["together", "local"])
@pytest.mark.parametrize("name", MEMBERS)
def test_replicas_bit_identical(name: str, local: bool) -> None:
    base = "adamw" if name in KEEPING else "momentum"
    one, other = team().run(ddp.long_run, name, local, base, 100)
    assert same(one, other)
    assert one["groups"][0]["sam_step"] == 100
    assert all(w.isfinite().all() for w in one["weights"])


@pytest.mark.parametrize("local", [False, True], ids=["together", "local"])
def test_frozen(local: bool) -> None:
    one, other = team().run(ddp.frozen, local)
    assert same(one, other)
    still = [torch.equal(u, v) for u, v in zip(one[0], net().parameters(), strict=True)]
    assert still == [False, False, False, True, False]
    assert not one[1]


@pytest.mark.parametrize("where", [1, 2])
@pytest.mark.parametrize("local", [False, True], ids=["together", "local"])
@pytest.mark.parametrize("name", MEMBERS)
def test_inf_one_rank_only(name: str, local: bool, where: int) -> None:
    for result in (results := team().run(ddp.poisoned, name, local, where, "skip")):
        assert result["skipped"] == 1
        assert same(result["before"], result["after"])
        assert not same(result["after"]["weights"], result["end"]["weights"])
    assert same(results[0]["end"], results[1]["end"])


@pytest.mark.parametrize("where", [1, 2])
@pytest.mark.parametrize("local", [False, True], ids=["together", "local"])
def test_inf_one_rank_raises_on_all(local: bool, where: int) -> None:
    for result in team().run(ddp.poisoned, "wsam", local, where, "raise"):
        assert "NaN or infinite" in result["raised"]
        assert same(result["before"], result["after"])


@pytest.mark.parametrize("local", [False, True], ids=["together", "local"])
def test_scaler_inf_one_rank_only(local: bool) -> None:
    one, other = team().run(ddp.scaled, local)
    assert same(one, other)
    assert one["scale"] == 512.0
    assert one["skipped"] == 1
    assert same(one["weights"][0], one["weights"][1])
    assert not same(one["weights"][1], one["weights"][2])


@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("name", ["sam", "wsam", "gsam"])
def test_join_uneven(name: str, initial: bool) -> None:
    one, other = team().run(ddp.uneven, name, local=False, initial=initial)
    assert (one[0], other[0]) == ("", "")
    assert same(one[1], other[1]), "the rank that was through has the others' weights"
    alone = judged(name, idle_after=2, halved=initial)
    assert gap(one[1], alone) < ROUNDING


def test_join_uneven_local_is_refused() -> None:
    for said, _ in team().run(ddp.uneven, "sam", local=True, initial=True):
        assert "local=True inside join()" in said
        assert "as many batches" in said


WAYS = [[True, False], [True, True], [False, True], [False, False], [True, False]]


@pytest.mark.parametrize("plain", [False, True], ids=["all steps", "every second"])
@pytest.mark.parametrize("name", ["sam", "wsam", "gsam"])
def test_find_unused_parameters(name: str, plain: bool) -> None:
    for mine, judges in (results := team().run(ddp.branches, name, plain, WAYS)):
        assert gap(mine, judges) < ROUNDING
    assert same(results[0][0], results[1][0])


@pytest.mark.parametrize("name", MEMBERS)
def test_static_graph(name: str) -> None:
    close(team().run(ddp.train, name, ddp={"static_graph": True}), judged(name))


@pytest.mark.parametrize("kind", ["plain", "fsdp2", "find_unused_parameters", "static_graph"])
def test_local_is_refused(kind: str) -> None:
    wanted = "DistributedDataParallel" if kind in {"plain", "fsdp2"} else f"set {kind}=False"
    for said in team().run(ddp.refused, kind):
        assert "local=True" in said
        assert wanted in said


@pytest.mark.parametrize("local", [False, True], ids=["together", "local"])
@pytest.mark.parametrize("name", MEMBERS)
def test_plain_steps(name: str, local: bool) -> None:
    when = wsam.schedule.Every(2, offset=1)
    results = team().run(ddp.train, name, local=local, when=when)
    close(results, judged(name, local=local, plain=(0, 2)))


@pytest.mark.parametrize("local", [False, True], ids=["together", "local"])
@pytest.mark.parametrize("name", ["sam", "wsam"])
def test_radius_zero(name: str, local: bool) -> None:
    results = team().run(ddp.train, name, local=local, rho=0.0)
    close(results, judged(name, local=local, plain=tuple(range(STEPS))))


@pytest.mark.parametrize("name", ["sam", "wsam"])
def test_ranks_agree_on_an_interval(name: str) -> None:
    when = wsam.schedule.NormAbove(factor=0.0)
    one, other = team().run(ddp.train, name, local=True, when=when, steps=12)
    assert same(one, other)
    assert gap(one, judged(name, local=True, steps=12)) > 1e-6, "some steps were the base's"
    assert gap(one, judged(name, local=True, steps=12, plain=tuple(range(12)))) > 1e-6


@pytest.mark.parametrize("buckets", ["copies", "views of one"])
@pytest.mark.parametrize("local", [False, True], ids=["together", "local"])
@pytest.mark.parametrize("name", ["sam", "wsam", "gsam"])
def test_micro_perturbation(name: str, local: bool, buckets: str) -> None:
    for mine, judges in team().run(ddp.micro_batches, name, local, buckets):
        assert gap(mine, judges) < ROUNDING


@pytest.mark.parametrize(("local", "lean"), [(False, False), (True, False), (False, True)])
def test_accumulation(local: bool, lean: bool) -> None:
    close(team().run(ddp.accumulated, "wsam", local, lean), judged("wsam", local=local))


@pytest.mark.parametrize("buckets", ddp.VIEWS)
def test_looking_leaves_gradients(buckets: str) -> None:
    assert team().run(ddp.looked_at, buckets) == [(True, True)] * 2


@pytest.mark.parametrize("local", [False, True], ids=["together", "local"])
def test_statistics_advance_once(local: bool) -> None:
    for mine, plain in team().run(ddp.statistics, local):
        assert same(mine, plain)
        assert int(mine[-1]) == 3
