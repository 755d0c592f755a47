"""`train`: train a run, unless it has a record or another process is training it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from wsam.lab import attempts, records
from wsam.lab.callbacks import Callback
from wsam.lab.distributed import DistributedContext, init_distributed
from wsam.lab.errors import RunError, is_out_of_memory, one_line
from wsam.lab.execution import ExecutionConfig
from wsam.lab.problem import NO_OBJECTS, Objects
from wsam.lab.records import Record
from wsam.lab.run import Run
from wsam.lab.trainer import Trainer, run_checkpoints


def train(
    run: Run,
    out: Path,
    execution: ExecutionConfig | None = None,
    callbacks: Sequence[Callback] = (),
    objects: Objects | None = None,
) -> Record:
    """Train a run and return its record, which is also written to ``out/KEY.json``.

    A run that has a record is not trained again. An interrupted run resumes from its last checkpoint
    and ends with the same record as without the interruption; on one CPU the curve is bit-identical.
    A loss that is not finite ends the run with a record marked as failed.

    Args:
        run: What to train.
        out: The results folder.
        execution: How to execute it.
        callbacks: Called during training.
        objects: Python objects that replace the names of model and data; see `wsam.lab.fit`.

    Raises:
        BusyError: Another process is training this run.
        OSError: Data is missing, or a file cannot be written.
        ValueError: Invalid settings, damaged data, or a model that does not accept the data.

    Example:
        >>> import tempfile
        >>> run = Run(method="wsam", epochs=1, train_limit=256)
        >>> record = train(run, Path(tempfile.mkdtemp()), ExecutionConfig(device="cpu"))
        >>> record["status"], len(record["curve"])
        ('finished', 1)
    """
    execution, objects = execution or ExecutionConfig(), objects or NO_OBJECTS
    with init_distributed(execution.device) as (context, device):
        return _train(run, out, replace(execution, device=device), callbacks, context, objects)


def _train(
    run: Run,
    out: Path,
    execution: ExecutionConfig,
    callbacks: Sequence[Callback],
    context: DistributedContext,
    objects: Objects,
) -> Record:
    """Return the existing record, or train in this process, one of `context.world_size`."""
    record = context.run_on_main(lambda: existing_record(run, out, execution))
    if record is not None:
        if context.is_main and records.is_finished(record):
            _remove_leftovers(run, out)
        return record
    context.run_on_main(lambda: records.check_unlocked(out, run))
    callbacks = callbacks if context.is_main else ()
    # Before locking, which creates a folder: a run that is refused here leaves no files.
    with _explain_memory(run):
        trainer = Trainer(run, out, execution, callbacks, context, objects)
    lock = records.lock_run(out, run) if context.is_main else nullcontext()
    attempt = _record_attempt(run, out) if context.is_main else nullcontext()
    with lock:
        record = context.run_on_main(lambda: existing_record(run, out, execution))
        if record is not None:
            return record  # another process finished it in the meantime
        try:
            with attempt, _explain_memory(run):
                return trainer.train()
        finally:
            for callback in callbacks:
                callback.on_train_end()


@contextmanager
def _record_attempt(run: Run, out: Path) -> Iterator[None]:
    """Store the run, and the exception that ends it, for reports."""
    attempts.write(out, run)
    try:
        yield
    except Exception as error:
        attempts.write(out, run, one_line(error))
        raise
    attempts.remove(out, run)


@contextmanager
def _explain_memory(run: Run) -> Iterator[None]:
    """Convert an exception about too little memory into one line."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise RunError(
            f"{run.title} ran out of memory at batch size {run.batch_size}: use a smaller batch or "
            f"model ({reason})"
        ) from error


def existing_record(run: Run, out: Path, execution: ExecutionConfig) -> Record | None:
    """Return the record that `train` would return without training, else None."""
    record = records.read(out, run)
    train_again = execution.retry and not records.is_finished(record)
    return None if record is None or train_again else record


def _remove_leftovers(run: Run, out: Path) -> None:
    """Remove the checkpoints of a finished run, left by a process killed before it removed them."""
    checkpoints = run_checkpoints(run, out)
    if checkpoints.folder.is_dir():
        with suppress(OSError), records.lock_run(out, run):  # busy, or a read-only folder
            checkpoints.clear()


def has_started(run: Run, out: Path) -> bool:
    """Return whether a run has a record or a checkpoint."""
    has_record = records.record_path(out, run).exists()
    return has_record or run_checkpoints(run, out).newest is not None
