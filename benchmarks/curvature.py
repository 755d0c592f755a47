"""Time to the top Hessian eigenvalue: wsam beside PyHessian and hessian-eigenthings, in one run.

    python benchmarks/curvature.py                             a small CNN on digits, on the CPU
    python benchmarks/curvature.py --cuda --cifar DATA.bin     ResNet18 on 10,000 CIFAR images

Every contender runs with several settings of its own stopping rule, all of them in turn, repeat
after repeat. The time of a library to an accuracy is that of its cheapest setting whose error,
in every repeat, is at most that accuracy. A peer that cannot be imported is left out and named.
The record goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wsam.curvature import hessian, top_eigenvalues
from wsam.lab import data, environment, formats, models

Batches = list[tuple[Tensor, Tensor]]
TARGETS = (1e-2, 1e-3, 1e-4)


@dataclass
class Contender:
    library: str
    setting: str
    solve: Callable[[int], float]
    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def measure(self, seed: int, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
        # On a CPU the process's own time: other programs share the machine, and one thread runs.
        clock = time.perf_counter if device.type == "cuda" else time.process_time
        start = clock()
        value = self.solve(seed)
        if device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(clock() - start)
        self.values.append(value)

    def summary(self, truth: float) -> dict[str, Any]:
        errors = [abs(value - truth) / abs(truth) for value in self.values]
        return {
            "library": self.library,
            "setting": self.setting,
            "seconds": self.seconds,
            "median_seconds": statistics.median(self.seconds),
            "values": self.values,
            "worst_error": max(errors),
        }


def ours(model: nn.Module, batches: Batches, method: str, tol: float, **how: Any) -> Contender:
    def solve(seed: int) -> float:
        H = hessian(model, cross_entropy, batches, **how)
        return top_eigenvalues(H, 1, method=method, tol=tol, seed=seed).largest

    words = "".join(f" {name}={value}" for name, value in how.items())
    return Contender(f"wsam {method}", f"tol={tol:g}{words}", solve)


def pyhessian(model: nn.Module, batches: Batches, tol: float, whole: bool) -> Contender:
    """PyHessian's power iteration; `whole` keeps the graph of all images, as its data= does."""
    from pyhessian import hessian as peer

    cuda = batches[0][0].is_cuda
    everything = tuple(torch.cat(part) for part in zip(*batches, strict=True))

    def solve(seed: int) -> float:
        torch.manual_seed(seed)
        source = {"data": everything} if whole else {"dataloader": batches}
        found, _ = peer(model, cross_entropy, **source, cuda=cuda).eigenvalues(
            maxIter=500, tol=tol, top_n=1
        )
        model.zero_grad(set_to_none=True)
        return float(found[0])

    form = "data (graph kept)" if whole else "dataloader"
    return Contender(f"PyHessian {form}", f"tol={tol:g}", solve)


def eigenthings(model: nn.Module, batches: Batches, method: str, effort: float) -> Contender:
    import hessian_eigenthings as peer

    def solve(seed: int) -> float:
        H = peer.HessianOperator(model, batches, peer.supervised_loss(cross_entropy))
        if method == "lanczos":
            found = peer.lanczos(H, k=1, max_iter=int(effort), which="LA", seed=seed)
            return float(found.eigenvalues[0])
        return float(peer.power_iteration_one(H, max_iter=500, tol=effort, seed=seed)[0])

    setting = f"max_iter={effort:g}" if method == "lanczos" else f"tol={effort:g}"
    return Contender(f"hessian-eigenthings {method}", setting, solve)


def available() -> dict[str, str | None]:
    """Versions of the peers; None for one that is not installed."""
    names = {"pyhessian": "PyHessian", "hessian_eigenthings": "hessian-eigenthings"}
    found: dict[str, str | None] = {}
    for module, package in names.items():
        found[package] = None
        if importlib.util.find_spec(module) is not None:
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                found[package] = "unknown"
    return found


def digits_problem() -> tuple[nn.Module, Batches, dict[str, Any]]:
    """The lab's small CNN after 20 epochs on digits, and its 1,200 images in four batches."""
    images = data.load("digits", data.Source(Path(), download=False))
    model = models.build("cnn", models.Task((1, 8, 8), 10), seed=0)
    x = (images.train_images.permute(0, 3, 1, 2).float() / 255 - 0.3053) / 0.3759
    train(model, x, images.train_labels, epochs=20, batch_size=100)
    batches = list(zip(x.split(300), images.train_labels.split(300), strict=True))
    return model, batches, {"model": "cnn", "data": "digits", "images": len(x), "batch": 300}


def cifar_problem(path: Path, batch: int, epochs: int) -> tuple[nn.Module, Batches, dict[str, Any]]:
    """ResNet18 after some epochs on 10,000 CIFAR images, and those images, on the GPU."""
    pixels, labels = formats.read_cifar(path, 1, 10, 10_000)
    mean, std = (
        torch.tensor(v).view(3, 1, 1) for v in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    )
    x = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - mean) / std
    x = x.cuda().contiguous(memory_format=torch.channels_last)
    y = torch.from_numpy(labels).long().cuda()
    model = models.build("resnet18", models.Task((3, 32, 32), 10), seed=0)
    model = model.cuda().to(memory_format=torch.channels_last)
    train(model, x, y, epochs, batch_size=125)
    batches = list(zip(x.split(batch), y.split(batch), strict=True))
    return (
        model,
        batches,
        {"model": "resnet18", "data": "cifar10", "images": len(x), "batch": batch},
    )


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, batch_size: int) -> None:
    """Plain SGD: the spectrum of a trained model is what people measure."""
    steps = epochs * (len(x) // batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=generator).to(x.device)
        for index in order.split(batch_size):
            optimizer.zero_grad()
            cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            schedule.step()
    optimizer.zero_grad(set_to_none=True)
    model.eval()  # the peers measure the model as they find it


def allow_tf32(allowed: bool) -> None:
    torch.backends.cudnn.allow_tf32 = allowed
    torch.backends.cuda.matmul.allow_tf32 = allowed


def cpu_contenders(model: nn.Module, batches: Batches) -> list[Contender]:
    found = available()
    contenders = [
        ours(model, batches, "lanczos", tol) for tol in (0.2, 0.1, 0.05, 3e-2, 1e-2, 3e-3, 1e-3)
    ]
    contenders += [ours(model, batches, "power", tol) for tol in (0.3, 0.1, 3e-2, 1e-2)]
    if found["PyHessian"]:
        for whole in (False, True):
            contenders += [
                pyhessian(model, batches, tol, whole) for tol in (1e-2, 1e-3, 1e-4, 1e-5)
            ]
    if found["hessian-eigenthings"]:
        contenders += [eigenthings(model, batches, "lanczos", n) for n in range(4, 11)]
        contenders += [eigenthings(model, batches, "power", tol) for tol in (0.1, 1e-2, 1e-3)]
    return contenders


def gpu_contenders(model: nn.Module, batches: Batches) -> list[Contender]:
    found = available()
    contenders = [ours(model, batches, "lanczos", tol) for tol in (1e-2, 1e-3)]
    if found["hessian-eigenthings"]:
        contenders.append(eigenthings(model, batches, "lanczos", 8))
    if found["PyHessian"]:
        contenders.append(pyhessian(model, batches, 1e-3, whole=False))
    return contenders


def race(contenders: list[Contender], repeats: int, device: torch.device) -> None:
    """Run all in turn, repeat after repeat, each repeat starting with another contender."""
    contenders[0].measure(0, device)  # warm up: libraries, kernels, memory
    contenders[0].seconds.clear()
    contenders[0].values.clear()
    for repeat in range(repeats):
        shift = repeat * len(contenders) // repeats
        for contender in contenders[shift:] + contenders[:shift]:
            contender.measure(repeat, device)
            print(f"  {contender.library:32s} {contender.setting:24s} {contender.seconds[-1]:8.2f} s "
                  f"{contender.values[-1]:.6g}", flush=True)  # fmt: skip


def to_accuracy(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each target, each library's cheapest setting that met it in every repeat."""
    found: dict[str, dict[str, Any]] = {}
    for target in TARGETS:
        best: dict[str, Any] = {}
        for row in rows:
            name = row["library"]
            if row["worst_error"] <= target and (
                name not in best or row["median_seconds"] < best[name]["median_seconds"]
            ):
                best[name] = {key: row[key] for key in ("setting", "median_seconds", "worst_error")}
        found[f"{target:g}"] = best
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cuda", action="store_true", help="ResNet18 on CIFAR, on the GPU")
    parser.add_argument("--cifar", type=Path, help="a binary file of 10,000 CIFAR-10 images")
    parser.add_argument("--batch", type=int, default=2000, help="images a batch (--cuda)")
    parser.add_argument("--epochs", type=int, default=10, help="of training beforehand (--cuda)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="where the record goes")
    chosen = parser.parse_args()
    if chosen.cuda and chosen.cifar is None:
        parser.error("--cuda needs --cifar")
    device = torch.device("cuda" if chosen.cuda else "cpu")
    allow_tf32(True)
    if chosen.cuda:
        model, batches, problem = cifar_problem(chosen.cifar, chosen.batch, chosen.epochs)
    else:
        torch.set_num_threads(1)
        model, batches, problem = digits_problem()
    record: dict[str, Any] = {
        "problem": problem,
        "hardware": environment.hardware(device),
        "versions": {**environment.versions(), **available()},
        "commit": environment.commit(),
    }
    record |= (gpu_record if chosen.cuda else cpu_record)(model, batches, chosen.repeats, device)
    out = chosen.out or Path(__file__).parent / "results" / f"curvature-{device.type}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(json.dumps(record["to_accuracy"], indent=1), out, sep="\n")


def cpu_record(
    model: nn.Module, batches: Batches, repeats: int, device: torch.device
) -> dict[str, Any]:
    H = hessian(model, cross_entropy, batches, dtype=torch.float64)
    truth = top_eigenvalues(H, 3, which="both", tol=1e-8, max_products=600)
    print(f"reference, float64: {truth.values.tolist()}")
    contenders = cpu_contenders(model, batches)
    race(contenders, repeats, device)
    rows = [contender.summary(truth.largest) for contender in contenders]
    return {
        "precision": "float32",
        "clock": "CPU seconds of one thread",
        "info": H.info.as_dict(),
        "reference": {"precision": "float64", **truth.as_dict()},
        "to_accuracy": to_accuracy(rows),
        "contenders": rows,
    }


def gpu_record(
    model: nn.Module, batches: Batches, repeats: int, device: torch.device
) -> dict[str, Any]:
    """Float32 without TF32 first, which is also the reference; then all contenders with TF32."""
    allow_tf32(False)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    start = time.perf_counter()
    H = hessian(model, cross_entropy, batches)
    found = top_eigenvalues(H, 1, tol=1e-3)
    torch.cuda.synchronize()
    strict = {
        "seconds": time.perf_counter() - start,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "info": H.info.as_dict(),
        **found.as_dict(),
    }
    print(f"float32 without TF32: {strict}", flush=True)
    allow_tf32(True)
    contenders = gpu_contenders(model, batches)
    race(contenders, repeats, device)
    rows = [contender.summary(found.largest) for contender in contenders]
    return {
        "precision": "float32 with TF32; the reference without",
        "clock": "wall-clock seconds",
        "float32": strict,
        "to_accuracy": to_accuracy(rows),
        "contenders": rows,
    }


if __name__ == "__main__":
    main()
