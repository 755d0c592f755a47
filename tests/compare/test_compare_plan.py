"""Requests, searched settings, and plans that fit into a budget."""

from dataclasses import replace

import pytest
import torch
from comparing import TINY, tiny_request

from wsam.compare import Request, parse_budget
from wsam.compare.contenders import contender
from wsam.compare.plan import (
    MIN_TRIALS,
    Estimator,
    Plan,
    equal_epochs,
    fit_epochs,
    make_plan,
    wall_time,
)
from wsam.compare.state import State, open_state, read_state, write_state
from wsam.compare.timing import Timing
from wsam.lab.optimizers import make_optimizer
from wsam.methods import METHODS

TIMES = {"base": Timing(0.1, 1.0, 0.1, 1.0), "sam": Timing(0.1, 2.0, 0.1, 2.0)}
ESTIMATOR = Estimator(TIMES, {"base": 1.0, "sam": 2.0}, seeds=3, parallel=2)


# Requests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("20m", 1200), ("2h", 7200), ("1h30m", 5400), ("0.5m", 30)]
)
def test_budgets(text, seconds):
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "20", "m", "20 m", "-5m", "2d", "20mm3"])
def test_bad_budgets(text):
    with pytest.raises(ValueError, match="such as 90s, 20m or 2h"):
        parse_budget(text)


def test_the_base_is_always_compared():
    assert tiny_request("sam", "vanilla", "sam").methods == ("base", "sam")
    with pytest.raises(ValueError, match=r"unknown method 'adam'; known: base, .*cheap"):
        tiny_request("adam")


def test_requests_survive_json():
    request = tiny_request("sam", "cheap", equal="passes")
    assert Request.from_dict(request.to_dict()) == request
    old = {name: value for name, value in request.to_dict().items() if name != "equal"}
    assert Request.from_dict(old).equal == "time"


def test_methods_of_ones_own_have_styles_of_their_own():
    names = ("mine.py:A", "mine.py:B")
    own = {name: TINY.replace(method=name, digests={"method": "0" * 12}) for name in names}
    methods = Request(TINY, ("sam", "wsam", "cheap", *names), own=own).contenders.values()
    assert len({method.style for method in methods}) == 6


# Settings ---------------------------------------------------------------------------------------


def test_every_method_tries_the_same_learning_rates():
    methods = [contender(name, TINY, 5) for name in ("base", "cheap", *METHODS)]
    points = [[method.point(trial) for trial in range(8)] for method in methods]
    assert len({tuple(point["lr"] for point in mine) for mine in points}) == 1
    for method, mine in zip(methods, points, strict=True):
        assert method.at(mine[0]).key == method.run.key, "the defaults come first"
        keys = {method.at(point).key for point in mine}
        assert len(keys) == 8, f"{method.name} repeats a trial"
    lr = [point["lr"] for point in points[0]]
    assert min(lr) < 0.2 * lr[0]
    assert max(lr) > 5 * lr[0]


def test_searched_settings():
    assert contender("base", TINY, 5).axes == ("lr",)
    assert contender("sam", TINY, 5).axes == ("lr", "rho")
    assert contender("gsam", TINY, 5).axes == ("lr", "rho", "alpha")
    cheap = contender("cheap", TINY, 4)
    assert cheap.axes == ("lr", "rho", "gamma")
    assert cheap.run.method == "wsam"
    assert dict(cheap.run.options) == {"every": 4, "reuse": True}
    for name, low, high in (("sam", 0.02, 0.5), ("msam", 0.3, 30)):
        radii = [contender(name, TINY, 5).point(trial)["rho"] for trial in range(30)]
        assert low <= min(radii) < 1.2 * low
        assert 0.8 * high < max(radii) <= high
    gammas = [cheap.point(trial)["gamma"] for trial in range(30)]
    assert 0.6 < min(gammas) < 0.75
    assert 0.95 < max(gammas) < 0.98


def test_wsam_is_preconditioned_over_adaptive_bases():
    over_adamw = TINY.replace(base="adamw")
    for name in ("wsam", "cheap"):
        found = contender(name, over_adamw, 5)
        assert found.run.options["precondition"] is True
        assert found.point(0)["gamma"] == 0.5
        make_optimizer(found.run, torch.nn.Linear(2, 2))
    assert "precondition" not in contender("wsam", TINY, 5).run.options


# Plans ------------------------------------------------------------------------------------------


def test_equal_epochs():
    costs = {"base": 1.0, "sam": 2.0, "cheap": 1.2, "slow": 50.0}
    assert equal_epochs(30, costs) == {"base": 30, "sam": 15, "cheap": 25, "slow": 1}


def test_costs_are_measured_or_counted():
    times = {name: Timing(0, 9.0, 0.1, cost) for name, cost in (("base", 2.0), ("cheap", 3.4))}
    request = tiny_request("cheap")
    assert State(request, times).costs == {"base": 1.0, "cheap": 1.7}
    counted = State(replace(request, equal="passes"), times)
    assert counted.costs == {"base": 1.0, "cheap": 1.5}, "two passes on every second step"


def test_wall_time_is_an_upper_bound():
    assert wall_time([1.0] * 4, 2) == 2.5
    assert wall_time([3.0], 1) == 3.0
    assert wall_time([], 4) == 0.0


@pytest.mark.parametrize(
    ("available", "trials", "epochs"),
    [(1e6, 8, 30), (320.0, 5, 30), (200.0, MIN_TRIALS, 24), (40.0, MIN_TRIALS, 4)],
)
def test_fewer_trials_then_fewer_epochs(available, trials, epochs):
    plan = make_plan(ESTIMATOR, 8, 30, available, available)
    assert (plan.trials, plan.epochs) == (trials, epochs)
    assert ESTIMATOR.total(plan) <= available


def test_too_small_a_budget_names_the_one_that_is_needed():
    with pytest.raises(ValueError, match="takes about") as caught:
        make_plan(ESTIMATOR, 8, 30, 10.0, 10.0)
    words = str(caught.value)
    assert "a budget of 10s is too small" in words
    needed = parse_budget(words.partition("takes about ")[2].partition(";")[0].replace(" ", ""))
    assert make_plan(ESTIMATOR, 8, 30, needed, needed) == Plan(MIN_TRIALS, 2)


def test_final_epochs_fit_into_the_time_left():
    assert fit_epochs(ESTIMATOR, 30, 1e6) == 30
    fewer = fit_epochs(ESTIMATOR, 30, 60.0)
    assert ESTIMATOR.final(fewer) <= 60.0 < ESTIMATOR.final(fewer + 1)
    assert fit_epochs(ESTIMATOR, 30, 0.0) == 2, "as many as one epoch of the slowest method takes"


# The state --------------------------------------------------------------------------------------


def test_times_of_methods_that_did_not_change_are_kept(tmp_path):
    request = tiny_request("sam", "cheap")
    write_state(tmp_path, State(request, dict.fromkeys(request.methods, TIMES["sam"])))
    more = open_state(tmp_path, tiny_request("cheap", run=TINY.replace(epochs=9)))
    assert more.timing.keys() == {"base", "cheap"}
    rarer = open_state(tmp_path, replace(request, every=9))
    assert rarer.timing.keys() == {"base", "sam"}


def test_a_changed_file_is_another_problem(tmp_path):
    first, second = (
        TINY.replace(data="mine.py:data", digests={"data": digit * 12}) for digit in "01"
    )
    write_state(tmp_path, State(Request(first, ("sam",)), dict(TIMES), plan=Plan(3, 2)))
    with pytest.raises(ValueError, match=r"another problem \(it differs in your code\): use"):
        open_state(tmp_path, Request(second, ("sam",)))


def test_state_continues_or_plans_again(tmp_path):
    request = tiny_request("sam", budget=60.0)
    state = State(request, dict(TIMES), plan=Plan(3, 2), trials=3, spent=5.0)
    write_state(tmp_path, state)
    assert open_state(tmp_path, request) == state
    more = open_state(tmp_path, tiny_request("sam", budget=120.0))
    assert (more.plan, more.spent, more.timing) == (None, 0.0, TIMES)
    by_passes = open_state(tmp_path, tiny_request("sam", budget=60.0, equal="passes"))
    assert (by_passes.plan, by_passes.timing) == (None, TIMES), "the times are kept as measured"
    for other, names in (
        (TINY.replace(batch_size=10), "batch_size"),
        (TINY.replace(test_limit=None), "test_limit"),
        (TINY.replace(base_args={"lr": 0.3}), "the arguments of the base"),
    ):
        with pytest.raises(ValueError, match=rf"another problem \(it differs in {names}\): use"):
            open_state(tmp_path, tiny_request("sam", run=other))
    unplanned = State(request, dict(TIMES), spent=5.0)
    write_state(tmp_path, unplanned)
    assert open_state(tmp_path, request).spent == 0.0, "time of refused calls does not add up"
    other = tiny_request("sam", run=TINY.replace(batch_size=10))
    assert open_state(tmp_path, other) == State(other), "nothing was made of the problem before"
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ValueError, match="is damaged; remove it"):
        read_state(tmp_path)
