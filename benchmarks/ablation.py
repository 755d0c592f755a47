"""What each optional acceleration saves: steps of WSAM with and without it, interleaved.

    python benchmarks/ablation.py --out benchmarks/results/ablation-cpu.json
    python benchmarks/ablation.py --cuda --out benchmarks/results/ablation-cuda.json

A feature is disabled by replacing the function that decides whether it is used.
"""

import argparse
import json
import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from wsam.accel import cpu, triton_backend
from wsam.bench.cases import method_step
from wsam.bench.timing import Timer, make_clock, paired_ratios
from wsam.bench.workload import Workload, default_batch_size, image_workload
from wsam.lab import environment


def never(*_: object) -> bool:
    """Stands for a decision against a feature."""
    return False


class OverAdamW(Workload):
    """A workload whose base is AdamW, over which WSAM preconditions its term."""

    def base(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW, fused as in captured steps."""
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


@dataclass(frozen=True)
class Feature:
    """A function that decides whether a feature is used, and the steps that are measured."""

    owner: Any
    function: str
    form: str = "eager"
    over_adamw: bool = False

    def switched(self, used: bool) -> AbstractContextManager[object]:
        """Return a context in which the feature is used, or not."""
        return nullcontext() if used else mock.patch.object(self.owner, self.function, never)


CPU_FEATURES: dict[str, Feature] = {
    "weight swap on CPU": Feature(cpu, "can_swap"),
    "fused base step on CPU": Feature(cpu, "can_step_fused"),
}
CUDA_FEATURES: dict[str, Feature] = {
    "fused CUDA kernels in eager steps": Feature(triton_backend, "may_use_kernels"),
    "fused preconditioned step, captured": Feature(
        triton_backend.TritonBackend, "finish", "captured", over_adamw=True
    ),
}
CPU_MODELS, CUDA_MODELS = (("mlp10m", 32), ("resnet18", 8)), (("resnet18", 32),)
"""Names and side lengths of the images."""


def compare(
    workload: Workload, feature: Feature, rounds: int, steps: int, timer: Timer
) -> dict[str, Any]:
    """Return the step time without a feature, relative to the time with it."""
    make = method_step("wsam")
    if feature.over_adamw:
        workload = OverAdamW(**vars(workload))
    made = {}
    for used in (True, False):
        with feature.switched(used):
            made[used] = make(workload, feature.form)
            timer.time(made[used], 3)
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for used in random.sample([True, False], 2):
            with feature.switched(used):
                times[used].append(timer.time(made[used], steps))
    ratio = paired_ratios(times[False], times[True])
    return {
        "time_without": round(ratio.median, 4),
        "quartiles": [round(ratio.low, 4), round(ratio.high, 4)],
        "rounds": rounds,
        "steps_per_round": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--only", help="measure this model only")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if options.cuda else "cpu")
    torch.set_num_threads(1)
    clock = "wall" if options.cuda else "cpu"
    timer = Timer(device, make_clock(clock, device))
    rows = []
    for model, pixels in CUDA_MODELS if options.cuda else CPU_MODELS:
        if options.only not in (None, model):
            continue
        workload = image_workload(model, default_batch_size(model, device), device, pixels)
        for name, feature in (CUDA_FEATURES if options.cuda else CPU_FEATURES).items():
            row = compare(workload, feature, options.rounds, options.steps, timer)
            rows.append({"case": f"{model}, {pixels} pixels", "feature": name, **row})
            print(f"{model}: without {name} {row['time_without']:.3f} {row['quartiles']}")
    record = {
        "what": "step time of WSAM without a feature, relative to the time with it",
        "clock": clock,
        **environment.describe_environment(device),
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
