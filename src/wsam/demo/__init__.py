"""The demonstration: digits with wrong labels, learnt by SGD, SAM and WSAM."""

from wsam.demo.setting import LOOK_SEEDS, SEEDS, contenders
from wsam.demo.summary import Summary, summarise
from wsam.demo.work import carry_out, demo_jobs, map_jobs

__all__ = [
    "LOOK_SEEDS",
    "SEEDS",
    "Summary",
    "carry_out",
    "contenders",
    "demo_jobs",
    "map_jobs",
    "summarise",
]
