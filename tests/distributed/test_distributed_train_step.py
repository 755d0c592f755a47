"""`train_step` on several processes: equal to one process, with one reduction for each pass."""

from typing import Any

import pytest
from helpers import LEAN, RULES, gap, same
from workers import train_step
from workers.problem import STEPS, expected_weights
from workers.process_group import process_group

import wsam

pytestmark = pytest.mark.slow  # the processes take seconds to start


def check(results: Any, expected: Any, reductions: int) -> None:
    (one, count), (other, _) = results
    assert same(one, other)
    assert gap(one, expected) < 1e-12
    assert count == [reductions] * STEPS


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", [*RULES, LEAN])
def test_ddp(name: str, micro_batches: int) -> None:
    results = process_group().run(train_step.ddp, name, micro_batches=micro_batches)
    check(results, expected_weights(name), reductions=2)


@pytest.mark.parametrize("scaled", [False, True])
def test_ddp_local(scaled: bool) -> None:
    results = process_group().run(
        train_step.ddp, "wsam", local=True, micro_batches=2, scaled=scaled
    )
    check(results, expected_weights("wsam", local=True), reductions=1)


@pytest.mark.parametrize("ascent_steps", [1, 2])
def test_ddp_local_scaler_base_steps(ascent_steps: int) -> None:
    """A GradScaler checks a second pass at w in these steps, which must be reduced."""
    options = {"when": wsam.schedule.Between(0, 0), "ascent_steps": ascent_steps}
    results = process_group().run(train_step.ddp, "wsam", local=True, scaled=True, method=options)
    check(results, expected_weights("wsam", base_steps=tuple(range(STEPS))), reductions=1)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_ddp_scaler(micro_batches: int) -> None:
    results = process_group().run(train_step.ddp, "wsam", scaled=True, micro_batches=micro_batches)
    check(results, expected_weights("wsam"), reductions=2)


def test_ddp_reduces_for_each_perturbation() -> None:
    options = {"micro_batches": 3, "perturb_per_micro_batch": True}
    (one, count), (other, _) = process_group().run(train_step.ddp, "wsam", **options)
    assert same(one, other)
    assert gap(one, expected_weights("wsam")) > 1e-6, "not one perturbation"
    assert count == [6] * STEPS


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", [*RULES, LEAN])
def test_fsdp2(name: str, micro_batches: int) -> None:
    results = process_group().run(train_step.fsdp2, name, micro_batches=micro_batches)
    check(results, expected_weights(name), reductions=2)
