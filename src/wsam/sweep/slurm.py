"""Runs jobs on SLURM, or in local processes, with submitit: `pip install 'wsam[slurm]'`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wsam.sweep.executors import RETRIES, JobQueue
from wsam.sweep.jobs import Job, Outcome, Status, run_job

_POLL_SECONDS = {"slurm": 15.0, "local": 0.2}


class Task:
    """The callable that submitit runs; its `checkpoint` requeues it after a preemption."""

    def __call__(self, job: Job) -> Outcome:
        """Run the job."""
        return run_job(job)

    def checkpoint(self, job: Job) -> Any:
        """Submit the same job again; its run resumes from its last checkpoint."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, job)


@dataclass(frozen=True)
class Submitit:
    """Runs each job as a SLURM job.

    All nodes must share the results and data folders and have wsam installed.

    Args:
        folder: Where submitit stores its scripts and logs.
        cluster: ``slurm``, or ``local`` for processes of this machine.
        workers: Maximum number of concurrent SLURM jobs.
        parameters: For submitit's ``update_parameters``: ``timeout_min``, ``gpus_per_node``,
            ``slurm_partition`` and so on.
        retries: How often a job that died is submitted again.
    """

    folder: Path
    cluster: str = "slurm"
    workers: int = 64
    parameters: Mapping[str, Any] = field(default_factory=dict)
    retries: int = RETRIES

    @property
    def parallel(self) -> int:
        """How many jobs run at a time."""
        return self.workers

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Yield the outcome of each job, in the order in which they end."""
        executor = self._make_executor()
        queue = JobQueue(jobs, self.retries)
        running: list[tuple[Any, Job]] = []
        try:
            while True:
                while len(running) < self.workers and (job := queue.take()) is not None:
                    running.append((executor.submit(Task(), job), job))
                if not running:
                    return
                ended = [pair for pair in running if pair[0].done()]
                for submitted, job in ended:
                    running.remove((submitted, job))
                    outcome = _outcome(submitted, job)
                    if outcome.status is not Status.LOST or not queue.retry(job):
                        yield outcome
                if not ended:
                    time.sleep(_POLL_SECONDS[self.cluster])
        finally:
            for submitted, _ in running:  # the sweep was interrupted
                submitted.cancel()

    def _make_executor(self) -> Any:
        """Return submitit's executor.

        Raises:
            ValueError: An unknown parameter, or SLURM is missing.
        """
        import submitit

        try:
            executor = submitit.AutoExecutor(folder=str(self.folder), cluster=self.cluster)
            executor.update_parameters(name="wsam", **self.parameters)
        except (RuntimeError, NameError) as error:  # SLURM is missing; an unknown parameter
            raise ValueError(f"submitit: {str(error).partition(chr(10))[0]}") from error
        return executor


def _outcome(submitted: Any, job: Job) -> Outcome:
    """Return the outcome of a job that submitit ended."""
    from submitit.core.utils import FailedJobError, UncompletedJobError

    try:
        outcome: Outcome = submitted.result()
    except (FailedJobError, UncompletedJobError) as error:
        reason = str(error).strip().partition("\n")[0]
        return Outcome(job, Status.LOST, f"job {submitted.job_id}: {reason}")
    return outcome
