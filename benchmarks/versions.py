"""Compare the time of a step between two versions of the library, in processes that take turns.

    git worktree add /tmp/before 28b2ba7
    python benchmarks/versions.py /tmp/before/src src --out benchmarks/results

Both versions train the same CIFAR ResNet18, or on a CPU a perceptron, with public names only. Each
process measures all cases in interleaved rounds and relates them to two plain forward and backward
passes of the same round.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
ROUNDS, STEPS = (7, 8) if CUDA else (9, 4)
METHODS = ("SAM", "WSAM")
Step = Callable[[], object]


def model_and_batch() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a ResNet18 for 32 pixels and 128 images; on a CPU a perceptron of ten million weights."""
    torch.manual_seed(0)
    if not CUDA:
        sizes = ((3072, 2048), (2048, 1536), (1536, 512), (512, 10))
        layers = [layer for size in sizes for layer in (nn.Linear(*size), nn.ReLU())][:-1]
        return nn.Sequential(*layers), torch.randn(32, 3072), torch.randint(10, (32,))
    from torchvision.models import resnet18

    model = resnet18(num_classes=10)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    model = model.to(DEVICE, memory_format=torch.channels_last)
    x = torch.randn(128, 3, 32, 32, device=DEVICE).to(memory_format=torch.channels_last)
    return model, x, torch.randint(10, (128,), device=DEVICE)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss, in bfloat16 on CUDA."""
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
        return cross_entropy(model(x), y)


def two_passes(captured: bool) -> Step:
    """Return two forward and backward passes without an optimizer."""
    model, x, y = model_and_batch()

    def run() -> None:
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            loss_of(model, x, y).backward()

    if not captured:
        return run
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def training_step(method: str, captured: bool) -> Step:
    """Return a step of a method over SGD with momentum and weight decay."""
    import wsam

    model, x, y = model_and_batch()
    base = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    opt: Any = getattr(wsam, method)(base, rho=0.05, model=model)
    if captured:
        step = wsam.capture(opt, lambda x, y: loss_of(model, x, y), x, y)
        return lambda: step(x, y)

    def closure() -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    return lambda: opt.step(closure)


def measure() -> dict[str, list[float]]:
    """Return the milliseconds of each round, for each case in this process's version."""
    steps: dict[str, Step] = {}
    for captured in (False, True)[: 1 + CUDA]:
        form = "captured" if captured else "eager"
        steps[f"two passes, {form}"] = two_passes(captured)
        for method in METHODS:
            steps[f"{method}, {form}"] = training_step(method, captured)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(-1, ROUNDS):  # the first warms up
        for name, step in steps.items():
            begin = _now()
            for _ in range(STEPS):
                step()
            if round_ >= 0:
                times[name].append((_now() - begin) / STEPS * 1e3)
    return times


def _now() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def ratios(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the time of each step relative to two passes of the same form in the same round."""
    found = {}
    for name, mine in times.items():
        method, _, form = name.partition(", ")
        if method in METHODS:
            pairs = zip(mine, times[f"two passes, {form}"], strict=True)
            found[name] = [own / passes for own, passes in pairs]
    return found


def main() -> None:
    """Measure both versions in turn and write a record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path, help="Source folder of the older version.")
    parser.add_argument("after", type=Path, help="Source folder of the newer version.")
    parser.add_argument("--processes", type=int, default=4, help="For each version.")
    parser.add_argument("--out", type=Path, help="Folder for the record.")
    given = parser.parse_args()
    results: dict[str, dict[str, list[float]]] = {"before": {}, "after": {}}
    for _ in range(given.processes):
        for name, source in (("before", given.before), ("after", given.after)):
            environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
            command = [sys.executable, __file__, "--measure"]
            result = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
            for case, values in ratios(json.loads(result.stdout)).items():
                results[name].setdefault(case, []).extend(values)
    device = torch.cuda.get_device_name() if CUDA else platform.machine()
    record: dict[str, Any] = {"device": device, "torch": torch.__version__, "ratios": {}}
    for case in results["before"]:
        record["ratios"][case] = {
            name: [round(q, 4) for q in statistics.quantiles(found[case], n=4)]
            for name, found in results.items()
        }
        line = "  ".join(f"{name} {q[1]:.3f}" for name, q in record["ratios"][case].items())
        print(f"{case:20s}{line}")
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        path = given.out / f"versions-{DEVICE.type}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:  # a process that `main` has started
        print(json.dumps(measure()))
    else:
        main()
