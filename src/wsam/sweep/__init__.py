"""Many runs: grids of settings, and who carries them out.

A grid (`grid.Grid`) is data. A job (`work.Job`) is one of its runs with all it takes to carry it
out; an executor (`executors.Executor`) carries jobs out: in this process, in processes of this
machine, on a Ray cluster, or on SLURM. `sweep` goes through jobs until all of them have a record.
"""

from wsam.sweep.executors import Executor, Here, Processes, local_devices, sweep
from wsam.sweep.grid import Grid, read_grid, with_value
from wsam.sweep.work import Job, Outcome, Status, perform

__all__ = [
    "Executor",
    "Grid",
    "Here",
    "Job",
    "Outcome",
    "Processes",
    "Status",
    "local_devices",
    "perform",
    "read_grid",
    "sweep",
    "with_value",
]
