"""Comparisons for tests: tiny ones that train, and synthetic ones with given figures."""

import json

from wsam.compare import Comparison, Request, summarize
from wsam.compare.plan import Plan, equal_epochs
from wsam.compare.sharpness import DISTANCES, sharpness_path
from wsam.compare.state import Final, State, final_folder, search_folder, write_state
from wsam.compare.timing import Timing
from wsam.lab import records
from wsam.lab.execution import ExecutionConfig
from wsam.lab.run import Run
from wsam.sweep import InProcess

CPU = ExecutionConfig(device="cpu")
TINY = Run(
    method="vanilla",
    model="mlp",
    epochs=2,
    batch_size=50,
    train_limit=250,
    test_limit=100,
    validation=0.2,
)
ERROR = {"name": "error", "unit": "%", "lower_is_better": True, "split": "validation"}


def tiny_request(*methods, trials=2, budget=300.0, run=TINY, seeds=(0, 1), equal="time"):
    return Request(run, methods, seeds, budget, trials, equal=equal)


def tiny_comparison(out, *methods, executor=None, progress=None, **changes):
    request = tiny_request(*methods, **changes)
    return Comparison(request, out, executor or InProcess(), CPU, progress=progress)


def make_record(run, value, metric=ERROR):
    """Return a finished record with a figure; a failed one if the value is None."""
    name = metric["name"]
    row = {"epoch": 1, "train_loss": 1.0, "sharpness": None, "lr": 0.1, "seconds": 0.5}
    row |= {f"validation_{name}": value, f"test_{name}": value}
    return {
        "format": records.FORMAT,
        "key": run.key,
        "title": run.title,
        "status": records.FAILED if value is None else records.FINISHED,
        "failure": "the training loss became nan in epoch 1" if value is None else None,
        "settings": run.to_dict(),
        "final": row,
        "metric": metric,
        "curve": [row],
        "seconds": 1.0,
        "epoch_seconds": 0.5,
        "execution": {"device": "cpu"},
    }


def synthetic(out, values, metric=ERROR, costs=None, equal="time"):
    """Write a comparison whose final runs have the given figures, and return its summary.

    `values` has the figures of each method by seed; None is a run that failed.
    """
    seeds = tuple(range(len(values["base"])))
    request = Request(TINY, tuple(values), seeds, budget=60.0, trials=2, equal=equal)
    times = {name: Timing(0.1, 0.5, 0.1, 0.5 * (costs or {}).get(name, 1.0)) for name in values}
    state = State(request, times, plan=Plan(2, 20), trials=2)
    contenders = request.contenders
    seconds = {name: times[name].cost for name in values}
    epochs = equal_epochs(20, state.costs)
    chosen = {name: contenders[name].point(1) for name in values}
    state.final = Final(chosen, epochs, seconds)
    for name, method in contenders.items():
        for trial in range(2):
            run = state.trial_run(method, trial)
            records.write(search_folder(out), run, make_record(run, 10.0 - trial, metric))
        for seed in seeds:
            run = state.final_run(method, seed)
            records.write(final_folder(out), run, make_record(run, values[name][seed], metric))
            around = {"key": run.key, "value": 0.25, "samples": 1480, "slice_samples": 480}
            around["slice"] = [0.5] * len(DISTANCES)
            sharpness_path(final_folder(out), run).write_text(json.dumps(around))
    write_state(out, state)
    return summarize(out, state)
