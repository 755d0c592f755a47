"""Train rows of the study ``cheap`` that begin as SGD, and the epochs that they share only once.

    python benchmarks/common_start.py "WSAM reuse 4, last half*" --seeds 1 2 --data-dir DATA

At the epoch where a row's option ``start`` begins, the row continues from the state that SGD has
there. With `--search`, the candidates of the rows are trained. The records equal those of
`wsam paper run cheap` and `cheap-search`: before that epoch these rows make SGD's steps, and the
training time includes that of the shared epochs. On one CPU they are bit-identical, see
tests/paper/test_common_start.py.
"""

import argparse
import copy
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from wsam.lab import records
from wsam.lab.callbacks import Callback, LogLines, Metrics
from wsam.lab.data.datasets import DataSource
from wsam.lab.distributed import init_distributed
from wsam.lab.execution import ExecutionConfig
from wsam.lab.rng import rng_states
from wsam.lab.run import Run
from wsam.lab.settings import VANILLA
from wsam.lab.trainer import Trainer
from wsam.paper.profile import Profile
from wsam.paper.registry import load

State = dict[str, Any]


class FinishedError(Exception):
    """All states were copied, and the rest of the run is not needed."""


class CopyStates(Callback):
    """Copies the state of a trainer after some epochs, and stops after the last of them."""

    def __init__(self, epochs: Iterable[int]) -> None:
        self.epochs = set(epochs)
        self.states: dict[int, State] = {}
        self.trainer: Trainer | None = None

    def on_epoch_end(self, metrics: Metrics) -> None:
        """Copy the state, if it is needed."""
        assert self.trainer is not None
        if metrics["epoch"] in self.epochs:
            state = self.trainer._state([rng_states(self.trainer.device)])
            self.states[metrics["epoch"]] = copy.deepcopy(state)
        if len(self.states) == len(self.epochs):
            raise FinishedError


def start_epoch(run: Run) -> int:
    """Return the number of epochs before a run's option ``start`` begins."""
    return round(cast(float, run.options["start"]) * run.epochs)


def common_base(runs: Sequence[Run]) -> Run:
    """Return the run of SGD that all of these equal before they start."""
    return max(runs, key=start_epoch).replace(method=VANILLA, hyper={}, options={})


def train(runs: Sequence[Run], out: Path, execution: ExecutionConfig) -> None:
    """Train runs that share their first epochs; those with a record are left out."""
    runs = [run for run in runs if records.read(out, run) is None]
    if not runs:
        return
    copies = CopyStates(map(start_epoch, runs))
    with tempfile.TemporaryDirectory() as other, init_distributed(execution.device) as found:
        context, device = found
        execution = replace(execution, device=device, checkpoint_seconds=float("inf"))
        base = common_base(runs)
        copies.trainer = Trainer(base, Path(other), execution, (LogLines(), copies), context)
        with suppress(FinishedError):
            copies.trainer.train()
        copies.trainer = None
        for run in runs:
            trainer = Trainer(run, out, execution, (LogLines(),), context)
            continue_from(copies.states[start_epoch(run)], trainer)
            trainer.train()


def continue_from(state: State, trainer: Trainer) -> None:
    """Save the state of the base's run as a checkpoint of the trainer's run."""
    optimizer = trainer.optimizer.state_dict()
    optimizer["state"] = state["optimizer"]["state"]
    epochs = len(state["curve"])
    for group in optimizer["param_groups"]:
        group["sam_step"] = epochs * trainer.feed.steps
    trainer.checkpoints.save(
        epochs, {**state, "run": trainer.run.canonical, "optimizer": optimizer}
    )


def main() -> None:
    """Train the rows that match the patterns, for each seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="+", help="names of rows, with wildcards")
    parser.add_argument("--data", default="CIFAR-10", choices=["CIFAR-10", "CIFAR-100"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--search", action="store_true", help="train the candidates of the rows")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("results"))
    arguments = parser.parse_args()
    execution = ExecutionConfig(source=DataSource(arguments.data_dir, download=False))
    for seed in arguments.seeds:
        name = "cheap-search" if arguments.search else "cheap"
        table = load(name, Profile(seeds=[seed]), arguments.out)
        groups: dict[Any, list[Run]] = {}
        for cell in table.cells:
            (run,) = cell.runs
            chosen = any(fnmatchcase(cell.row[0], one) for one in arguments.rows)
            if chosen and cell.column == arguments.data and "start" in run.options:
                groups.setdefault((run.epochs, run.decay_start is None), []).append(run)
        for runs in groups.values():
            train(runs, arguments.out, execution)


if __name__ == "__main__":
    main()
