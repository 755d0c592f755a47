"""Many runs: grids of settings, and executors that train them.

A grid (`grid.Grid`) is data. A job (`jobs.Job`) is one run with everything needed to train it. An
executor (`executors.Executor`) runs jobs in this process, in processes of this machine, on a Ray
cluster or on SLURM. `sweep` runs jobs until each of them has a record.
"""

from wsam.sweep.executors import Executor, InProcess, Processes, local_devices, sweep
from wsam.sweep.grid import Grid, read_grid
from wsam.sweep.jobs import Job, Outcome, Status, run_job
from wsam.sweep.settings import with_value

__all__ = [
    "Executor",
    "Grid",
    "InProcess",
    "Job",
    "Outcome",
    "Processes",
    "Status",
    "local_devices",
    "read_grid",
    "run_job",
    "sweep",
    "with_value",
]
