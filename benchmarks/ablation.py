"""What each optional acceleration saves: steps with and without it, interleaved.

    python benchmarks/ablation.py --out benchmarks/results/ablation-cpu.json
    python benchmarks/ablation.py --cuda --out benchmarks/results/ablation-cuda.json

A feature is disabled by replacing one function. Features of earlier versions are measured if the
imported version has them, so that the program also runs at the commit that removed one.
"""

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import wsam
from wsam.lab import models

# name: (module, attribute, replacement), and the first attribute that exists is replaced
FEATURES: dict[str, list[tuple[str, str, object]]] = {
    "weight swap on CPU": [
        ("wsam.accel.cpu", "can_swap", lambda *_: False),
        ("wsam.perturb", "step_aside", lambda *_: False),
    ],
    "fused base step on CPU": [
        ("wsam.accel.cpu", "can_step_fused", lambda *_: False),
        ("wsam.bases", "_can_be_fused", lambda *_: False),
    ],
    "batch norms told to keep no statistics (removed)": [
        ("wsam.switches", "Switches.throw", lambda *_: None),
    ],
    "fused CUDA kernels in eager steps": [
        ("wsam.accel.triton_backend", "may_use_kernels", lambda *_: False),
        ("wsam.kernels", "may_use_kernels", lambda *_: False),
    ],
}
ON_CPU = {
    "mlp10m": ["weight swap on CPU", "fused base step on CPU"],
    "resnet18, 8 pixels": list(FEATURES)[:3],
}
ON_CUDA = {"resnet18": list(FEATURES)[2:]}


@contextmanager
def disabled(feature: str) -> Iterator[bool]:
    """Disable a feature; yield whether this version has it."""
    for module, attribute, replacement in FEATURES[feature]:
        try:
            owner = import_module(module)
        except ModuleNotFoundError:
            continue
        *path, name = attribute.split(".")
        for part in path:
            owner = getattr(owner, part)
        if hasattr(owner, name):
            with mock.patch.object(owner, name, replacement):
                yield True
            return
    yield False


def workload(name: str, device: torch.device) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    pixels, batch = (8, 32) if "8 pixels" in name else (32, 128 if device.type == "cuda" else 32)
    torch.manual_seed(0)
    x, y = torch.randn(batch, 3, pixels, pixels), torch.randint(10, (batch,))
    if name == "mlp10m":
        model: nn.Module = nn.Sequential(
            nn.Flatten(), nn.Linear(3072, 2304), nn.ReLU(), nn.Linear(2304, 1280), nn.ReLU(),
            nn.Linear(1280, 10),
        )  # fmt: skip
    else:
        build = getattr(models, "build_model", None) or models.build
        model = build("resnet18", models.Task((3, pixels, pixels), 10), 0)
    if device.type == "cuda":
        model = model.to(device, memory_format=torch.channels_last)
        x = x.to(device, memory_format=torch.channels_last)
        return model, x, y.to(device)
    return model, x, y


def step_of(name: str, device: torch.device) -> Callable[[], None]:
    model, x, y = workload(name, device)
    base = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    opt = wsam.WSAM(base, rho=0.05, gamma=0.9, model=model)

    def closure() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    return lambda: opt.step(closure)


def seconds(step: Callable[[], None], steps: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter() if device.type == "cuda" else time.process_time()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps
    return (time.process_time() - start) / steps


def compare(case: str, feature: str, rounds: int, steps: int, device: torch.device) -> dict | None:
    """Return the step time without the feature, relative to the time with it."""
    with disabled(feature) as present:
        if not present:
            return None
        without = step_of(case, device)
        seconds(without, 3, device)
    with_it = step_of(case, device)
    seconds(with_it, 3, device)
    ratios, order = [], [True, False]
    for _ in range(rounds):
        random.shuffle(order)
        times = {}
        for on in order:
            if on:
                times[on] = seconds(with_it, steps, device)
            else:
                with disabled(feature):
                    times[on] = seconds(without, steps, device)
        ratios.append(times[False] / times[True])
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "case": case,
        "feature": feature,
        "time_without": round(quartiles[1], 4),
        "quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
        "rounds": rounds,
        "steps_per_round": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--only", help="measure this case only")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if options.cuda else "cpu")
    torch.set_num_threads(1)
    rows = []
    for case, features in (ON_CUDA if options.cuda else ON_CPU).items():
        for feature in features if options.only in (None, case) else ():
            row = compare(case, feature, options.rounds, options.steps, device)
            if row is not None:
                rows.append(row)
                print(f"{case}: without {feature} {row['time_without']:.3f} {row['quartiles']}")
    record = {
        "what": "step time of WSAM without a feature, relative to the time with it",
        "clock": "wall" if options.cuda else "CPU time of one thread",
        "commit": os.environ.get("WSAM_COMMIT"),
        "torch": torch.__version__,
        "hardware": torch.cuda.get_device_name() if options.cuda else platform.machine(),
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
