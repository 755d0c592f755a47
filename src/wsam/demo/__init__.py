"""The demonstration: digits with wrong labels, trained with SGD, SAM and WSAM."""

from wsam.demo.config import SEEDS, TUNING_SEEDS, contenders
from wsam.demo.jobs import demo_jobs, run_jobs, tuning_jobs
from wsam.demo.summary import Summary, summarise

__all__ = [
    "SEEDS",
    "TUNING_SEEDS",
    "Summary",
    "contenders",
    "demo_jobs",
    "run_jobs",
    "summarise",
    "tuning_jobs",
]
