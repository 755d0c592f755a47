"""The training of one run in one process: epochs, checkpoints and the record."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median_high
from typing import Any

import torch

from wsam._utils.text import json_safe
from wsam.lab import environment, models, records
from wsam.lab.callbacks import Callback, Metrics
from wsam.lab.checkpoint import Checkpoints, save_state
from wsam.lab.checks import check_problem, describe_nonfinite
from wsam.lab.data.datasets import default_folder
from wsam.lab.data.image_folder import find_root
from wsam.lab.data.loader_feed import LoaderFeed
from wsam.lab.distributed import DistributedContext
from wsam.lab.errors import explain
from wsam.lab.evaluation import evaluate
from wsam.lab.execution import ExecutionConfig
from wsam.lab.files import no_op
from wsam.lab.loaded_model import load_weights
from wsam.lab.metrics import cross_entropy
from wsam.lab.optimizers import can_capture, learning_rate, make_optimizer, set_learning_rate
from wsam.lab.problem import NO_OBJECTS, Objects, make_problem, uses_own_code
from wsam.lab.records import Record
from wsam.lab.rng import RngStates, rank_states, rng_states, seed_generators, set_rng_states
from wsam.lab.run import Run
from wsam.lab.settings import DATA, TEST, TRAIN, VALIDATION
from wsam.lab.step import Objective, Stepper, cudnn_settings
from wsam.lab.user_code import is_code

_LIVE_SECONDS = 0.5
_NOT_FINAL = ("lr", "seconds")


class Trainer:
    """Trains one run in this process.

    Args:
        run: What to train.
        out: The results folder.
        execution: How to execute it.
        callbacks: Called during training.
        context: Rank and world size.
        objects: Python objects that replace the names of model and data.
    """

    def __init__(
        self,
        run: Run,
        out: Path,
        execution: ExecutionConfig,
        callbacks: Sequence[Callback],
        context: DistributedContext,
        objects: Objects = NO_OBJECTS,
    ) -> None:
        self.run, self.out, self.execution, self.callbacks = run, out, execution, callbacks
        self.context = context
        self.start_time = self.last_save_time = time.monotonic()
        self.curve: list[Metrics] = []
        # Of the processes that trained this run before:
        self.previous_seconds = 0.0
        self.previous_epochs = 0
        self.previous_environments: list[environment.Environment] = []
        self.resumed = 0
        own = uses_own_code(run) or is_code(run.method)  # exceptions elsewhere are bugs
        self.explain: Callable[[], AbstractContextManager[None]] = (
            partial(explain, f"training {run.title}") if own else nullcontext
        )
        self.device = execution.resolve_device()
        self.compiled, self.captured = _choose_acceleration(
            run, execution, self.device, context.world_size
        )
        self.problem = make_problem(run, execution, objects, out)
        self.feed, self.model = self.problem.feed, self.problem.model
        if self.feed.batch_size % context.world_size or (
            context.world_size > 1 and self.feed.has_loader
        ):
            raise ValueError(
                f"{context.world_size} processes need a dataset, not a loader, and a batch size that "
                f"they can divide, not {self.feed.batch_size}"
            )
        self.split = VALIDATION if VALIDATION in self.feed.counts else TEST
        batch = self.feed.example(min(2, self.feed.batch_size // context.world_size))
        output = check_problem(run, self.problem, batch)
        if isinstance(self.feed, LoaderFeed) and self.feed.loss is cross_entropy:
            self.feed.classes = output.shape[1]
        self.optimizer = make_optimizer(run, self.model, run.epochs * self.feed.steps)
        self.environment = {
            "execution": {
                "device": self.device.type,
                "compiled": self.compiled,
                "captured": self.captured,
                "processes": context.world_size,
            },
            **environment.describe_environment(self.device),
        }
        self.checkpoints = run_checkpoints(run, out, self._log)

    def train(self) -> Record:
        """Train from the last checkpoint, or from the start, and return the record."""
        run, feed = self.run, self.feed
        seed_generators(run.seed + self.context.rank)  # dropout masks differ between processes
        self._resume()
        stepper = self._make_stepper()
        for callback in self.callbacks:
            callback.on_train_start(run, feed.steps, len(self.curve), feed.batch_size)
        if feed.has_loader and feed.batch_size != run.batch_size:
            self._log(
                f"the training loader of {run.data} has batches of {feed.batch_size} samples: the "
                f"batch size {run.batch_size} is not used"
            )
        elif feed.batch_size < run.batch_size:
            self._log(
                f"a step uses all {feed.batch_size} training samples: there are fewer than the batch "
                f"size {run.batch_size}"
            )
        if self.compiled:
            self._log("compiling the model in the first steps, which takes about a minute")
        failure = None
        with cudnn_settings(self.device):
            while len(self.curve) < run.epochs and failure is None:
                failure = self._epoch(stepper)
                continues = failure is None and len(self.curve) < run.epochs
                if continues and self.context.run_on_main(self._checkpoint_due):
                    self._save_checkpoint()
        if failure is None and self.split != TEST:
            failure = self._evaluate(TEST, self.curve[-1])
        return self.context.run_on_main(lambda: self._write_record(failure))

    def _make_stepper(self) -> Stepper:
        model = self.context.wrap_model(self.model)
        if self.compiled:  # each size of a batch by itself: there are at most two
            model = torch.compile(model, dynamic=False)  # type: ignore[assignment]
        select = getattr(self.optimizer, "select", torch.mean)
        precision, problem = self.run.precision, self.problem
        objective = Objective(
            model, select, precision, self.device, problem.loss, problem.classifies
        )
        return Stepper(self.optimizer, objective, self.captured, self.run.options)

    def _epoch(self, stepper: Stepper) -> str | None:
        """Train and evaluate one epoch; return the reason if the loss is not finite."""
        metrics = self._train_epoch(stepper)
        if math.isfinite(metrics["train_loss"]):
            failure = self._evaluate(self.split, metrics)
        else:
            columns = {"loss", "error"} if self.problem.classifies else {"loss"}
            columns.add(self.problem.metric.column)
            metrics |= {f"{self.split}_{name}": None for name in sorted(columns, reverse=True)}
            became = f"the training loss became {metrics['train_loss']} in epoch {metrics['epoch']}"
            failure = self._with_cause(became, TRAIN)
        self.curve.append(metrics)
        for callback in self.callbacks:
            callback.on_epoch_end(metrics)
        return failure

    def _train_epoch(self, stepper: Stepper) -> Metrics:
        """Make the steps of one epoch and return their metrics."""
        run, feed = self.run, self.feed
        number = len(self.curve) + 1
        start = last_read = time.monotonic()
        # Reading metrics would synchronize with a GPU or with other processes.
        reads_live = self.device.type == "cpu" and self.context.world_size == 1
        stepper.reset_totals()
        rate = 0.0
        for step, (inputs, targets) in enumerate(feed.epoch(), (number - 1) * feed.steps):
            rate = learning_rate(run, step, run.epochs * feed.steps)
            set_learning_rate(self.optimizer, rate)
            with self.explain():
                stepper(self.context.shard(inputs), self.context.shard(targets))
            live = None
            if reads_live and time.monotonic() - last_read > _LIVE_SECONDS:
                last_read = time.monotonic()
                live = self._read_metrics(stepper)
            for callback in self.callbacks:
                callback.on_step_end(live)
        metrics = {"epoch": number, **self._read_metrics(stepper), "lr": rate}
        metrics["seconds"] = time.monotonic() - start
        return metrics

    def _evaluate(self, split: str, metrics: Metrics) -> str | None:
        """Add the figures of a split to `metrics`; return the reason if its loss is not finite."""
        batches, precision = self.feed.evaluation(split), self.run.precision
        with self.explain():
            figures = self.context.run_on_main(
                lambda: evaluate(self.problem, batches, precision, self.device)
            )
        metrics |= {f"{split}_{name}": value for name, value in figures.items()}
        for name in ("loss", self.problem.metric.column):
            if not math.isfinite(figures[name]):
                became = f"the {split} {name} became {figures[name]} in epoch {metrics['epoch']}"
                return self._with_cause(became, split)
        return None

    def _with_cause(self, failure: str, split: str) -> str:
        """Return a failure and, if the data of the split is not finite, this cause."""
        cause = describe_nonfinite(self.feed, split)
        return failure if cause is None else f"{failure}: {cause}"

    def _read_metrics(self, stepper: Stepper) -> Metrics:
        loss, error, sharpness = self.context.mean(stepper.totals.means(), self.device)
        return {
            "train_loss": loss,
            **({"train_error": error} if self.problem.classifies else {}),
            "sharpness": None if math.isnan(sharpness) else sharpness,  # no step measured it
        }

    def _log(self, message: str) -> None:
        for callback in self.callbacks:
            callback.on_message(message)

    # Checkpoints --------------------------------------------------------------------------------

    def _checkpoint_due(self) -> bool:
        return time.monotonic() - self.last_save_time >= self.execution.checkpoint_seconds

    def _save_checkpoint(self) -> None:
        generators = self.context.all_gather(rng_states(self.device))
        if self.context.is_main:
            self.checkpoints.save(len(self.curve), self._state(generators))
        self.last_save_time = time.monotonic()

    def _state(self, generators: list[RngStates]) -> dict[str, Any]:
        return {
            "run": self.run.canonical,
            "curve": self.curve,
            "seconds": self.previous_seconds + time.monotonic() - self.start_time,
            "resumed": self.resumed,
            "sessions": environment.add_epochs(
                self.previous_environments,
                self.environment,
                len(self.curve) - self.previous_epochs,
            ),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "order": self.feed.generator.get_state(),
            "generators": generators,
        }

    def _resume(self) -> None:
        state = self.checkpoints.load()
        if state is None:
            return
        folder = self.checkpoints.folder
        if state.get("run") != self.run.canonical:
            raise ValueError(f"{folder} contains a checkpoint of another run")
        # The user's model may import a file that has changed.
        with explain(f"resuming from {folder}, which can be removed to start again,"):
            load_weights(self.model, state["model"], "the weights do not fit")
            self.optimizer.load_state_dict(state["optimizer"])
            self.feed.generator.set_state(state["order"])
            set_rng_states(rank_states(state, self.context.rank), self.device)
        self.curve = state["curve"]
        self.previous_seconds = state["seconds"]
        self.previous_epochs = len(self.curve)
        self.previous_environments = state.get("sessions", [])  # absent in older checkpoints
        self.resumed = state["resumed"] + 1
        self._log(f"resuming after epoch {len(self.curve)} of {self.run.epochs}")

    # The record ---------------------------------------------------------------------------------

    def _write_record(self, failure: str | None) -> Record:
        """Write the weights, if they are kept, and the record; then remove the checkpoints."""
        if self.execution.keep_weights and failure is None:
            save_state(records.weights_path(self.out, self.run), self.model.state_dict())
        record = self._make_record(failure)
        records.write(self.out, self.run, record)
        self.checkpoints.clear()
        return json_safe(record)  # type: ignore[no-any-return]

    def _data_folder(self) -> dict[str, str]:
        """Return where the data was, unless it was in the default folder or outside of it."""
        folder, name = self.execution.source.folder, self.run.data.removeprefix("folder:")
        in_folder = name in DATA and name != "digits"
        if self.run.data.startswith("folder:"):
            in_folder = find_root(folder, name) != Path(name)
        return {"folder": str(folder)} if in_folder and folder != default_folder() else {}

    def _make_record(self, failure: str | None) -> Record:
        run, feed, last = self.run, self.feed, self.curve[-1]
        # The median over all epochs but the first, which includes compilation.
        epoch_seconds = median_high(row["seconds"] for row in self.curve[1:] or self.curve)
        return {
            "format": records.FORMAT,
            "key": run.key,
            "title": run.title,
            "status": records.FINISHED if failure is None else records.FAILED,
            "failure": failure,
            "settings": run.to_dict(),
            "final": {name: value for name, value in last.items() if name not in _NOT_FINAL},
            "metric": {
                "name": self.problem.metric.name,
                "unit": self.problem.metric.unit,
                "lower_is_better": self.problem.metric.lower_is_better,
                "split": self.split,
            },
            "curve": self.curve,
            "seconds": self.previous_seconds + time.monotonic() - self.start_time,
            "epoch_seconds": epoch_seconds,
            "images_per_second": feed.steps * feed.batch_size / max(epoch_seconds, 1e-9),
            "resumed": self.resumed,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "data": {
                **feed.counts,
                "steps": feed.steps,
                "verified": feed.verified,
                **self._data_folder(),
            },
            "parameters": models.parameter_count(self.model),
            **self.environment,
            "earlier": environment.differences(self.previous_environments, self.environment),
        }


def _choose_acceleration(
    run: Run, execution: ExecutionConfig, device: torch.device, world_size: int
) -> tuple[bool, bool]:
    """Return whether to compile the model, and whether to capture the step.

    The default on CUDA is to do both, unless the model or the data is the user's own code: it may
    branch on values and use other shapes in each batch.

    Raises:
        ValueError: The step is to be captured, but cannot be.
    """
    default = device.type == "cuda" and not uses_own_code(run)
    compiles = default if execution.compile is None else execution.compile
    captures = execution.capture
    if captures is None:
        captures = default and world_size == 1 and can_capture(run)
    if captures and (device.type != "cuda" or world_size > 1):
        raise ValueError("a step can be captured on CUDA only, and in one process: --no-capture")
    return compiles, captures


def run_checkpoints(run: Run, out: Path, log: Callable[[str], None] = no_op) -> Checkpoints:
    """Return the checkpoints of a run; `log` receives messages about damaged ones."""
    return Checkpoints(records.checkpoints_folder(records.work_folder(out, run)), log)
