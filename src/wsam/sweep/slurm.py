"""Jobs on SLURM, or in processes, by submitit: `pip install 'wsam[slurm]'`."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wsam.sweep.executors import RETRIES
from wsam.sweep.work import Job, Outcome, Status, perform

CLUSTERS = ("slurm", "local")
_POLL = {"slurm": 15.0, "local": 0.2}


class Task:
    """What submitit carries out: a job, and how to go on with it after a preemption."""

    def __call__(self, job: Job) -> Outcome:
        """Carry out the job."""
        return perform(job)

    def checkpoint(self, job: Job) -> Any:
        """Ask for the same job again: its run goes on from its own last checkpoint."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, job)


@dataclass(frozen=True)
class Submitit:
    """Carries out each job as a SLURM job of its own.

    The folders of results and data must be shared by all nodes, and wsam installed on them.

    Args:
        folder: Where submitit keeps its scripts and logs.
        cluster: ``slurm``, or ``local`` for processes of this machine.
        workers: SLURM jobs at a time.
        parameters: For submitit's ``update_parameters``: ``timeout_min``, ``gpus_per_node``,
            ``slurm_partition`` and so on.
        retries: How often a job that died is submitted again.
    """

    folder: Path
    cluster: str = "slurm"
    workers: int = 64
    parameters: Mapping[str, Any] = field(default_factory=dict)
    retries: int = RETRIES

    def carry_out(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Yield what became of each job, in the order in which they end."""
        executor = self._executor()
        waiting, again = iter(jobs), deque[Job]()
        deaths: Counter[str] = Counter()
        at_work: list[tuple[Any, Job]] = []
        try:
            while True:
                while len(at_work) < self.workers:
                    job = again.popleft() if again else next(waiting, None)
                    if job is None:
                        break
                    at_work.append((executor.submit(Task(), job), job))
                if not at_work:
                    return
                ended = [pair for pair in at_work if pair[0].done()]
                for submitted, job in ended:
                    at_work.remove((submitted, job))
                    outcome = self._outcome(submitted, job, deaths)
                    if outcome is None:
                        again.append(job)
                    else:
                        yield outcome
                if not ended:
                    time.sleep(_POLL[self.cluster])
        finally:
            for submitted, _ in at_work:  # the sweep was abandoned
                submitted.cancel()

    def _executor(self) -> Any:
        if self.cluster not in CLUSTERS:
            raise ValueError(f"unknown cluster {self.cluster!r}; known: {', '.join(CLUSTERS)}")
        try:
            import submitit
        except ModuleNotFoundError as error:
            raise ValueError("--submitit needs submitit: pip install 'wsam[slurm]'") from error
        try:
            executor = submitit.AutoExecutor(folder=str(self.folder), cluster=self.cluster)
            executor.update_parameters(name="wsam", **self.parameters)
        except (RuntimeError, NameError) as error:  # no SLURM here; an unknown parameter
            raise ValueError(f"submitit: {str(error).partition(chr(10))[0]}") from error
        return executor

    def _outcome(self, submitted: Any, job: Job, deaths: Counter[str]) -> Outcome | None:
        """Return what became of a job; None if it is to be submitted again."""
        from submitit.core.utils import FailedJobError, UncompletedJobError

        try:
            outcome: Outcome = submitted.result()
        except (FailedJobError, UncompletedJobError) as error:
            deaths[job.run.key] += 1
            if deaths[job.run.key] <= self.retries:
                return None
            reason = str(error).strip().partition("\n")[0]
            return Outcome(job, Status.LOST, f"job {submitted.job_id}: {reason}")
        return outcome
