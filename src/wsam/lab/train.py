"""One run from start to record."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wsam._format import json_safe
from wsam.lab import environment, generators, models, records
from wsam.lab.batches import MemoryFeed
from wsam.lab.checkpoint import Checkpoints, load_state, save_state
from wsam.lab.files import quiet
from wsam.lab.folder import FolderFeed
from wsam.lab.generators import Generators
from wsam.lab.means import Means, make_feed, make_model
from wsam.lab.records import Record
from wsam.lab.run import Run
from wsam.lab.step import (
    Objective,
    Stepper,
    evaluate,
    fast_convolutions,
    learning_rate,
    make_optimizer,
    set_learning_rate,
    try_out,
)
from wsam.lab.subject import fitted
from wsam.lab.team import Team, joined
from wsam.lab.watch import Row, Watcher

_LIVE_SECONDS = 0.5
_FINAL = ("train_loss", "train_error", "test_loss", "test_error", "sharpness")


def train(
    run: Run, out: Path, means: Means | None = None, watchers: Sequence[Watcher] = ()
) -> Record:
    """Train a run and return its record, which is also written to ``out/KEY.json``.

    A run that has a record is not run again. An interrupted one goes on from its last checkpoint
    and ends in the record it would have had without the interruption; on one CPU the curve is
    bit-identical. A loss that is not finite ends the run with a record marked as failed.

    Args:
        run: What to train.
        out: The folder of the results.
        means: How to carry it out.
        watchers: Hear of the run as it goes.

    Raises:
        BusyError: Another process works on this run.
        OSError: Data is missing, or a file cannot be written.
        ValueError: Bad settings, damaged data, or a model that does not take it.

    Example:
        >>> import tempfile
        >>> run = Run(method="wsam", epochs=1, train_limit=256)
        >>> record = train(run, Path(tempfile.mkdtemp()), Means(device="cpu"))
        >>> record["status"], len(record["curve"])
        ('finished', 1)
    """
    means = means or Means()
    with joined(means.device) as (team, device):
        means = replace(means, device=device)
        record = team.from_first(lambda: settled(run, out, means))
        if record is not None:
            return record
        team.from_first(lambda: records.check_free(out, run))
        heard = watchers if team.leads else ()
        # Before the claim, which makes a folder: a run that is refused here leaves nothing.
        session = Session(run, out, means, heard, team)
        claim = records.claim(out, run) if team.leads else nullcontext()
        with claim:
            record = team.from_first(lambda: settled(run, out, means))
            if record is not None:
                return record  # another process finished it between the two looks
            try:
                return session.train()
            finally:
                for watcher in heard:
                    watcher.close()


def restore(
    run: Run, out: Path, means: Means | None = None
) -> tuple[nn.Module, MemoryFeed | FolderFeed]:
    """Return the trained model of a finished run, in evaluation mode, and its data as it is.

    Args:
        run: What was trained, with its weights kept (`Means.keep_weights`).
        out: The folder of the results.
        means: Says the device and where data is.

    Raises:
        FileNotFoundError: The weights were not kept.
        ValueError: They are damaged.
    """
    means = means or Means()
    path = records.weights_path(out, run)
    if not path.exists():
        raise FileNotFoundError(
            f"no weights of {run.title} in {path.parent}: train it with its weights kept"
        )
    model, feed = fitted(run, load_state(path), means, f"{path} does not fit {run.title}")
    return model.eval(), feed


def settled(run: Run, out: Path, means: Means) -> Record | None:
    """Return the record that `train` would return without training; None if it would train."""
    record = records.read(out, run)
    return None if record is None or (means.retry and not records.is_finished(record)) else record


def is_begun(run: Run, out: Path) -> bool:
    """Tell whether there is something to go on from: the run's record, or a checkpoint."""
    return records.record_path(out, run).exists() or checkpoints(run, out).newest is not None


def checkpoints(run: Run, out: Path, say: Callable[[str], None] = quiet) -> Checkpoints:
    """Return the checkpoints of a run; `say` takes a message about each that is damaged."""
    return Checkpoints(records.checkpoints_folder(records.work_folder(out, run)), say)


class Session:
    """A run being trained: everything that lives from its first step to its record."""

    def __init__(
        self, run: Run, out: Path, means: Means, watchers: Sequence[Watcher], team: Team
    ) -> None:
        self.run, self.out, self.means, self.watchers = run, out, means, watchers
        self.team = team
        self.begun = time.monotonic()
        self.saved = self.begun
        self.before = 0.0
        self.resumed = 0
        self.curve: list[Row] = []
        self.earlier: list[environment.Facts] = []  # what the sessions before this one ran on
        self.begun_at = 0  # the epochs that they made
        self.device = means.place()
        cuda = self.device.type == "cuda"
        self.compiled = cuda if means.compile is None else means.compile
        self.captured = (cuda and team.size == 1) if means.capture is None else means.capture
        if self.captured and not cuda:
            raise ValueError(f"a step is captured on CUDA only, not on {self.device}")
        if self.captured and team.size > 1:
            raise ValueError("a step of several processes cannot be captured: use --no-capture")
        self.feed = make_feed(run, means, self.device)
        team.check(self.feed.batch_size)
        self.model = make_model(run, self.feed, self.device)
        shown = min(2, self.feed.batch_size // team.size)
        try_out(run, self.model, torch.zeros(shown, *self.feed.shape, device=self.device))
        self.optimizer = make_optimizer(run, self.model)
        execution = {
            "device": self.device.type,
            "compiled": self.compiled,
            "captured": self.captured,
            "processes": team.size,
        }
        self.facts = {"execution": execution, **environment.facts(self.device)}
        self.checkpoints = checkpoints(run, out, self._say)

    def train(self) -> Record:
        """Go from the last checkpoint, or the start, to the record."""
        run, feed = self.run, self.feed
        torch.manual_seed(run.seed + self.team.rank)  # dropout masks differ between processes
        self._resume()
        stepper = self._stepper()
        for watcher in self.watchers:
            watcher.start(run, feed.steps, len(self.curve), feed.batch_size)
        if feed.batch_size < run.batch_size:
            self._say(
                f"a step takes {feed.batch_size} images, all there are to train on, instead of "
                f"{run.batch_size}"
            )
        if self.compiled:
            self._say("the first steps compile the model, which takes a minute or so")
        failure = None
        with fast_convolutions(self.device):
            while len(self.curve) < run.epochs and failure is None:
                failure = self._epoch(stepper)
                goes_on = failure is None and len(self.curve) < run.epochs
                if goes_on and self.team.from_first(self._due):
                    self._save()
        return self._conclude(failure)

    def _stepper(self) -> Stepper:
        model = self.team.wrap(self.model)
        model = torch.compile(model) if self.compiled else model  # type: ignore[assignment]
        select = getattr(self.optimizer, "select", torch.mean)
        objective = Objective(model, select, self.run.precision, self.device)
        return Stepper(self.optimizer, objective, self.captured)

    def _epoch(self, stepper: Stepper) -> str | None:
        """Train and test one epoch; return what went wrong, if anything."""
        run, feed = self.run, self.feed
        number = len(self.curve) + 1
        start = looked = time.monotonic()
        stepper.restart()
        rate = 0.0
        for step, (images, labels) in enumerate(feed.epoch(), (number - 1) * feed.steps):
            rate = learning_rate(run, step, run.epochs * feed.steps)
            set_learning_rate(self.optimizer, rate)
            stepper(self.team.part(images), self.team.part(labels))
            live = None
            # Reading a figure makes the host wait for a GPU: there, only after an epoch.
            alone = self.device.type == "cpu" and self.team.size == 1
            if alone and time.monotonic() - looked > _LIVE_SECONDS:
                looked = time.monotonic()
                live = self._figures(stepper)
            for watcher in self.watchers:
                watcher.step(live)
        row = {"epoch": number, **self._figures(stepper), "lr": rate}
        row["seconds"] = time.monotonic() - start
        failure = None
        if math.isfinite(row["train_loss"]):
            loss, error = self.team.from_first(
                lambda: evaluate(self.model, feed.test(), run.precision, self.device)
            )
            row |= {"test_loss": loss, "test_error": error}
            if not math.isfinite(loss):
                failure = f"the test loss became {loss} in epoch {number}"
        else:
            row |= {"test_loss": None, "test_error": None}
            failure = f"the training loss became {row['train_loss']} in epoch {number}"
        self.curve.append(row)
        for watcher in self.watchers:
            watcher.epoch(row)
        return failure

    def _figures(self, stepper: Stepper) -> Row:
        loss, error, sharpness = self.team.mean(stepper.totals.read(), self.device)
        sharp = sharpness if stepper.sharp else None
        return {"train_loss": loss, "train_error": error, "sharpness": sharp}

    # Interruption and resumption ---------------------------------------------------------------

    def _due(self) -> bool:
        return time.monotonic() - self.saved >= self.means.checkpoint_seconds

    def _save(self) -> None:
        everyone = self.team.gathered(generators.states(self.device))
        if self.team.leads:
            self.checkpoints.save(len(self.curve), self._state(everyone))
        self.saved = time.monotonic()

    def _state(self, everyone: list[Generators]) -> dict[str, Any]:
        return {
            "run": self.run.canonical,
            "curve": self.curve,
            "seconds": self.before + time.monotonic() - self.begun,
            "resumed": self.resumed,
            "sessions": environment.with_session(
                self.earlier, self.facts, len(self.curve) - self.begun_at
            ),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "order": self.feed.generator.get_state(),
            "generators": everyone,
        }

    def _resume(self) -> None:
        state = self.checkpoints.load()
        if state is None:
            return
        if state["run"] != self.run.canonical:
            raise ValueError(f"{self.checkpoints.folder} holds a checkpoint of another run")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.feed.generator.set_state(state["order"])
        generators.put_back(state, self.team.rank, self.device)
        self.curve = state["curve"]
        self.before = state["seconds"]
        self.resumed = state["resumed"] + 1
        self.earlier = state.get("sessions", [])  # older checkpoints do not tell
        self.begun_at = len(self.curve)
        self._say(f"going on after epoch {len(self.curve)} of {self.run.epochs}")

    def _say(self, message: str) -> None:
        for watcher in self.watchers:
            watcher.say(message)

    # The record --------------------------------------------------------------------------------

    def _conclude(self, failure: str | None) -> Record:
        """Write the record, and the weights first if they are wanted."""
        return self.team.from_first(lambda: self._write(failure))

    def _write(self, failure: str | None) -> Record:
        weights = records.weights_path(self.out, self.run)
        if self.means.keep_weights and failure is None:
            save_state(weights, self.model.state_dict())
        record = self._record(failure)
        records.write(self.out, self.run, record)
        self.checkpoints.clear()
        return json_safe(record)  # type: ignore[no-any-return]

    def _record(self, failure: str | None) -> Record:
        run, feed, last = self.run, self.feed, self.curve[-1]
        later = sorted(row["seconds"] for row in self.curve[1:] or self.curve)
        seconds = later[len(later) // 2]
        return {
            "format": records.FORMAT,
            "key": run.key,
            "title": run.title,
            "status": records.FINISHED if failure is None else records.FAILED,
            "failure": failure,
            "settings": run.to_dict(),
            "final": {name: last[name] for name in ("epoch", *_FINAL)},
            "curve": self.curve,
            "seconds": self.before + time.monotonic() - self.begun,
            "epoch_seconds": seconds,
            "images_per_second": feed.steps * feed.batch_size / max(seconds, 1e-9),
            "resumed": self.resumed,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "data": {
                "train": feed.train_count,
                "test": feed.test_count,
                "steps": feed.steps,
                "verified": feed.verified,
            },
            "parameters": models.parameter_count(self.model),
            **self.facts,
            "earlier": environment.differing(self.earlier, self.facts),
        }
