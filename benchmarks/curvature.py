"""Time to the top Hessian eigenvalue: wsam, PyHessian and hessian-eigenthings in one run.

    python benchmarks/curvature.py                  a small CNN on digits, on the CPU
    python benchmarks/curvature.py --cuda --cifar data_batch_1.bin --tf32 --repeats 1
                                                    ResNet18 on 10,000 CIFAR images, on a GPU

Every library runs with several settings of its own stopping rule. All settings are timed in turns, and
the turns are repeated. The time of a library to an accuracy is that of its fastest setting whose error
is at most that accuracy in every repeat. A library that cannot be imported is skipped; put both on
PYTHONPATH to include them. The record is written to benchmarks/results/;
`python benchmarks/curvature_page.py` copies it into docs/curvature.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wsam.curvature import hessian, top_eigenvalues
from wsam.lab import environment, models
from wsam.lab.data import datasets

Batches = list[tuple[Tensor, Tensor]]
TARGETS = (1e-2, 1e-3, 1e-4)


@dataclass
class TimedMethod:
    library: str
    setting: str
    solve: Callable[[int], float]
    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def measure(self, seed: int, device: torch.device) -> None:
        synchronize(device)
        # CPU time of this process, since other programs may share the CPU; one thread runs.
        clock = time.perf_counter if device.type == "cuda" else time.process_time
        start = clock()
        value = self.solve(seed)
        synchronize(device)
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


def synchronize(device: torch.device) -> None:
    """Wait for the GPU and free cached memory."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def wsam_method(model: nn.Module, batches: Batches, method: str, tol: float) -> TimedMethod:
    def solve(seed: int) -> float:
        H = hessian(model, cross_entropy, batches)
        return top_eigenvalues(H, 1, method=method, tol=tol, seed=seed).largest

    return TimedMethod(f"wsam {method}", f"tol={tol:g}", solve)


def pyhessian(
    model: nn.Module, batches: Batches, tol: float, whole: bool, most: int = 500
) -> TimedMethod:
    """PyHessian's power iteration; `whole` passes one batch as `data=`, which keeps its graph."""
    from pyhessian import hessian as peer

    cuda = batches[0][0].is_cuda
    everything = tuple(torch.cat(part) for part in zip(*batches, strict=True))

    def solve(seed: int) -> float:
        torch.manual_seed(seed)
        source = {"data": everything} if whole else {"dataloader": batches}
        found, _ = peer(model, cross_entropy, **source, cuda=cuda).eigenvalues(
            maxIter=most, tol=tol, top_n=1
        )
        model.zero_grad(set_to_none=True)
        return float(found[0])

    form = "data (graph kept)" if whole else "dataloader"
    limit = "" if most == 500 else f" maxIter={most}"
    return TimedMethod(f"PyHessian {form}", f"tol={tol:g}{limit}", solve)


def eigenthings(model: nn.Module, batches: Batches, method: str, effort: float) -> TimedMethod:
    import hessian_eigenthings as peer

    def solve(seed: int) -> float:
        H = peer.HessianOperator(model, batches, peer.supervised_loss(cross_entropy))
        if method == "lanczos":
            found = peer.lanczos(H, k=1, max_iter=int(effort), which="LA", seed=seed)
            return float(found.eigenvalues[0])
        return float(peer.power_iteration_one(H, max_iter=500, tol=effort, seed=seed)[0])

    setting = f"max_iter={effort:g}" if method == "lanczos" else f"tol={effort:g}"
    return TimedMethod(f"hessian-eigenthings {method}", setting, solve)


def peer_versions() -> dict[str, str | None]:
    """Return the versions of the other libraries; None if one is not installed."""
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
    """Return the lab's small CNN after 20 epochs on digits, and 1,200 images in four batches."""
    images = datasets.load("digits", datasets.DataSource(Path(), download=False))
    model = models.build_model("cnn", models.Task((1, 8, 8), 10), seed=0)
    x = (images.train.images.permute(0, 3, 1, 2).float() / 255 - 0.3053) / 0.3759
    train(model, x, images.train.labels, epochs=20, batch_size=100)
    batches = list(zip(x.split(300), images.train.labels.split(300), strict=True))
    return model, batches, {"model": "cnn", "data": "digits", "images": len(x), "batch": 300}


def cifar_problem(
    path: Path,
    device: torch.device,
    batch: int,
    epochs: int,
    images: int = 10_000,
    name: str = "resnet18",
) -> tuple[nn.Module, Batches, dict[str, Any]]:
    """Return a model trained on CIFAR images, and those images, on the device."""
    pixels, labels = datasets.read_cifar(path, 1, 10, 10_000)
    mean, std = (
        torch.tensor(v).view(3, 1, 1) for v in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    )
    x = (torch.from_numpy(pixels[:images]).permute(0, 3, 1, 2).float() / 255 - mean) / std
    x = x.to(device).contiguous(memory_format=torch.channels_last)
    y = torch.from_numpy(labels[:images]).long().to(device)
    model = models.build_model(name, models.Task((3, 32, 32), 10), seed=0)
    model = model.to(device, memory_format=torch.channels_last)
    train(model, x, y, epochs, batch_size=125)
    batches = list(zip(x.split(batch), y.split(batch), strict=True))
    about = {"model": name, "data": "cifar10", "images": len(x), "batch": batch, "epochs": epochs}
    return model, batches, about


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, batch_size: int) -> None:
    """Train with SGD, so that the spectrum is that of a trained model."""
    steps = epochs * -(-len(x) // batch_size)
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
    model.eval()  # the other libraries do not change the mode


def allow_tf32(allowed: bool) -> None:
    torch.backends.cudnn.allow_tf32 = allowed
    torch.backends.cuda.matmul.allow_tf32 = allowed


def cpu_methods(model: nn.Module, batches: Batches) -> list[TimedMethod]:
    found = peer_versions()
    methods = [
        wsam_method(model, batches, "lanczos", tol)
        for tol in (0.2, 0.1, 0.05, 3e-2, 1e-2, 3e-3, 1e-3)
    ]
    methods += [wsam_method(model, batches, "power", tol) for tol in (0.3, 0.1, 3e-2, 1e-2)]
    if found["PyHessian"]:
        for whole in (False, True):
            methods += [pyhessian(model, batches, tol, whole) for tol in (1e-2, 1e-3, 1e-4, 1e-5)]
    if found["hessian-eigenthings"]:
        methods += [eigenthings(model, batches, "lanczos", n) for n in range(4, 11)]
        methods += [eigenthings(model, batches, "power", tol) for tol in (0.1, 1e-2, 1e-3)]
    return methods


def gpu_methods(model: nn.Module, batches: Batches) -> list[TimedMethod]:
    """Return one setting per library: the one that reached an error of 1e-3 on the CPU.

    A tolerance below the rounding of TF32 cannot be reached.
    """
    found = peer_versions()
    methods = [wsam_method(model, batches, "lanczos", 1e-2)]
    if found["hessian-eigenthings"]:
        methods.append(eigenthings(model, batches, "lanczos", 8))
    if found["PyHessian"]:
        methods.append(pyhessian(model, batches, 1e-3, whole=False, most=25))
    return methods


def time_in_turns(methods: list[TimedMethod], repeats: int, device: torch.device) -> Iterator[None]:
    """Time all methods in turns; each repeat starts with another one."""
    for repeat in range(repeats):
        shift = repeat * len(methods) // repeats
        for timed in methods[shift:] + methods[:shift]:
            timed.measure(repeat, device)
            print(f"  {timed.library:32s} {timed.setting:24s} {timed.seconds[-1]:8.2f} s "
                  f"{timed.values[-1]:.6g}", flush=True)  # fmt: skip
            yield


def warm_up(model: nn.Module, batches: Batches) -> None:
    """Make one product, so that libraries and kernels are loaded."""
    H = hessian(model, cross_entropy, batches)
    _ = H @ torch.ones(H.shape[0], device=H.device)


def to_accuracy(
    rows: list[dict[str, Any]], targets: tuple[float, ...] = TARGETS
) -> dict[str, dict[str, Any]]:
    """Return, for each target, the fastest setting of each library that reached it in all repeats."""
    found: dict[str, dict[str, Any]] = {}
    for target in targets:
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
    parser.add_argument("--tf32", action="store_true", help="allow TF32 for all libraries (--cuda)")
    parser.add_argument("--images", type=int, default=10_000, help="of that file (--cuda)")
    parser.add_argument("--batch", type=int, default=1000, help="images a batch (--cuda)")
    parser.add_argument("--epochs", type=int, default=6, help="of training beforehand (--cuda)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="where the record goes")
    chosen = parser.parse_args()
    if chosen.cuda and chosen.cifar is None:
        parser.error("--cuda needs --cifar")
    device = torch.device("cuda" if chosen.cuda else "cpu")
    out = chosen.out or Path(__file__).parent / "results" / f"curvature-{device.type}.json"
    if chosen.cuda:
        allow_tf32(True)
        model, batches, problem = cifar_problem(
            chosen.cifar, device, chosen.batch, chosen.epochs, chosen.images
        )
        found = gpu_record(model, batches, chosen.repeats, device, chosen.tf32)
    else:
        torch.set_num_threads(1)
        model, batches, problem = digits_problem()
        found = iter([cpu_record(model, batches, chosen.repeats, device)])
    head = record_head(problem, device, chosen.repeats)
    out.parent.mkdir(parents=True, exist_ok=True)
    for part in found:  # a GPU record is written after every method, in case a later one fails
        text = json.dumps({**head, **part}, indent=1, allow_nan=False)
        out.write_text(text + "\n", encoding="utf-8")
    print(json.dumps(part["to_accuracy"], indent=1), out, sep="\n")


def record_head(problem: dict[str, Any], device: torch.device, repeats: int) -> dict[str, Any]:
    head = {"problem": problem, **environment.describe_environment(device), "repeats": repeats}
    head["versions"] |= peer_versions()
    return head


def cpu_record(
    model: nn.Module, batches: Batches, repeats: int, device: torch.device
) -> dict[str, Any]:
    H = hessian(model, cross_entropy, batches, dtype=torch.float64)
    truth = top_eigenvalues(H, 3, which="both", tol=1e-8, max_products=600)
    print(f"reference, float64: {truth.values.tolist()}")
    methods = cpu_methods(model, batches)
    warm_up(model, batches)
    for _ in time_in_turns(methods, repeats, device):
        pass
    rows = [timed.summary(truth.largest) for timed in methods]
    return {
        "precision": "float32",
        "clock": "CPU seconds of one thread",
        "info": H.info.as_dict(),
        "reference": {"precision": "float64", **truth.as_dict()},
        "to_accuracy": to_accuracy(rows),
        "contenders": rows,
    }


def gpu_record(
    model: nn.Module, batches: Batches, repeats: int, device: torch.device, tf32: bool
) -> Iterator[dict[str, Any]]:
    """Yield the record after every method.

    The first measurement, in float32 without TF32, is also the reference.
    """
    strict = measure_float32(model, batches, device)
    print(f"float32 without TF32: {strict}", flush=True)
    truth = strict["values"][0]
    allow_tf32(tf32)
    methods = gpu_methods(model, batches)
    record = {
        "precision": "float32 with TF32" if tf32 else "float32",
        "tf32": tf32,
        "clock": "wall-clock seconds",
        "reference": {"precision": "float32", **strict},
        "to_accuracy": {},
        "contenders": [],
    }
    yield record
    if tf32:
        warm_up(model, batches)
    for _ in time_in_turns(methods, repeats, device):
        rows = [each.summary(truth) for each in methods if each.seconds]
        # The reference is not accurate enough for the last target.
        yield record | {"to_accuracy": to_accuracy(rows, TARGETS[:2]), "contenders": rows}


def measure_float32(model: nn.Module, batches: Batches, device: torch.device) -> dict[str, Any]:
    """Return time, memory and result of the top eigenvalue in float32 without TF32."""
    allow_tf32(False)
    synchronize(device)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    H = hessian(model, cross_entropy, batches)
    found = top_eigenvalues(H, 1, tol=3e-3)
    synchronize(device)
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if cuda else None
    return {"seconds": seconds, "peak_gib": peak, "info": H.info.as_dict(), **found.as_dict()}


if __name__ == "__main__":
    main()
