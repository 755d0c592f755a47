"""What a step sends: collective calls and bytes, counted on two CPU processes.

    python benchmarks/communication.py

Every collective that reaches torch.distributed is counted in a settled step, whoever makes it:
DistributedDataParallel's buckets, FSDP2's shards and the optimizer's own. Bytes are those of the
whole tensor a collective works on, for each rank; what goes over the wire depends on its algorithm (a
ring all-reduce sends 2(n-1)/n of it). The network is small enough for one bucket, so that a call is
a reduction of all gradients. The record goes to benchmarks/results/communication.json.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import wsam

RECORD = Path(__file__).parent / "results" / "communication.json"
RANKS = 2
GRADIENTS = "gradients"
WEIGHTS = "weights"
NUMBERS = "numbers"
LEAN = {"lean": True}
LOCAL = {"local": True}

# What is run, the members of whom it holds (none: the base alone), their options.
Case = tuple[str, tuple[str, ...], dict[str, Any]]
FEEDING = ("sam", "esam", "asam", "fisher_sam")
KEEPING = ("wsam", "coupled_wsam", "gsam")
DDP_CASES: list[Case] = [
    ("plain base", (), {}),
    ("SAM, ESAM, ASAM, Fisher SAM", FEEDING, {}),
    ("SAM, ESAM, ASAM, Fisher SAM, local", FEEDING, LOCAL),
    ("WSAM, Coupled-WSAM, GSAM", KEEPING, {}),
    ("WSAM, lean", ("wsam",), LEAN),
    ("WSAM, Coupled-WSAM, GSAM, local", KEEPING, LOCAL),
    ('WSAM, Coupled-WSAM, GSAM, local, nonfinite="skip"', KEEPING, {**LOCAL, "nonfinite": "skip"}),
]
FSDP2_CASES: list[Case] = [
    ("plain base", (), {}),
    ("SAM, ASAM, Fisher SAM", ("sam", "asam", "fisher_sam"), {}),
    ("ESAM", ("esam",), {}),
    ("WSAM, Coupled-WSAM", ("wsam", "coupled_wsam"), {}),
    ("WSAM, lean", ("wsam",), LEAN),
    ("GSAM", ("gsam",), {}),
    ("SAM, max_norm", ("sam",), {"max_norm": 1.0}),
]


class Collectives(TorchDispatchMode):
    """Counts calls of collectives, and the bytes of the larger of what goes in and what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in {"c10d", "_c10d_functional"}:
            sizes = [
                sum(leaf.nbytes for leaf in tree_leaves(argument) if isinstance(leaf, Tensor))
                for argument in args
            ]
            name = func._schema.name.split("::")[1]
            if max(sizes, default=0) > 0:
                self.calls[kind_of(name, max(sizes))] += 1
                self.bytes[kind_of(name, max(sizes))] += max(sizes)
        return func(*args, **(kwargs or {}))


def kind_of(name: str, size: int) -> str:
    """What travels: weights are gathered, gradients summed; a few bytes are a norm or a flag."""
    if size <= 64:
        return NUMBERS
    return WEIGHTS if "gather" in name else GRADIENTS


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def count(style: str, name: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return what one settled step of this rank sends."""
    model: Any = network()
    model = DistributedDataParallel(model) if style == "ddp" else fully_shard(model)
    base = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = base if name is None else wsam.create(name, base, model=model, **options)
    x = torch.randn(8, 64)

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses = model(x).square().mean(1)
        loss = losses.mean() if name is None else optimizer.select(losses)
        loss.backward()
        return loss

    for _ in range(2):  # DistributedDataParallel sorts its buckets anew after the first step
        optimizer.step(closure)
    with Collectives() as counted:
        optimizer.step(closure)
    return {
        kind: {"calls": counted.calls[kind], "bytes": counted.bytes[kind]}
        for kind in (GRADIENTS, WEIGHTS, NUMBERS)
    }


def measure() -> dict[str, Any]:
    """Count all cases on this rank of a process group that is there already."""
    record: dict[str, Any] = {
        "ranks": dist.get_world_size(),
        "gradient_bytes": sum(p.nbytes for p in network().parameters()),
    }
    for style, cases in (("ddp", DDP_CASES), ("fsdp2", FSDP2_CASES)):
        record[style] = []
        for case, names, options in cases:
            counts = [count(style, name, options) for name in names or [None]]
            assert all(each == counts[0] for each in counts), f"not all the same: {case}"
            record[style].append({"case": case, **counts[0]})
    return record


def table(record: dict[str, Any], style: str) -> list[str]:
    """Return the record as a table in Markdown, in bytes and in gradients' sizes."""
    kinds = [GRADIENTS, NUMBERS] if style == "ddp" else [GRADIENTS, WEIGHTS, NUMBERS]
    heads = [f"{kind}: calls | {kind}: bytes" for kind in kinds]
    lines = [f"| a step of | {' | '.join(heads)} |", "|---|" + "---:|" * 2 * len(kinds)]
    for row in record[style]:
        cells = []
        for kind in kinds:
            size = row[kind]["bytes"]
            times = f" ({size / record['gradient_bytes']:g}x)" if kind != NUMBERS and size else ""
            cells.append(f"{row[kind]['calls']} | {size:,}{times}")
        lines.append(f"| {row['case']} | {' | '.join(cells)} |")
    return lines


def work(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    record = measure()
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, record)
    assert all(other == record for other in everyone), "ranks count differently"
    if rank == 0:
        for style in ("ddp", "fsdp2"):
            print(*table(record, style), "", sep="\n")
        RECORD.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
        print(f"written to {RECORD}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (f"{folder}/store",), nprocs=RANKS)
