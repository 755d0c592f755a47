"""Count the collective calls and bytes of a step, on two CPU processes.

    python benchmarks/communication.py

All collectives of a step are counted: those of DistributedDataParallel, of FSDP2 and of the optimizer.
Bytes are the size of the whole tensor, for each rank; the bytes on the wire depend on the algorithm (a
ring all-reduce sends 2(n-1)/n of them). The network fits into one bucket, so that one call reduces all
gradients. The record is written to benchmarks/results/communication.json.
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
LOCAL_SKIP = {**LOCAL, "nonfinite": "skip"}

# Name, methods with the same communication (none: the base alone), and their options.
Case = tuple[str, tuple[str, ...], dict[str, Any]]
ONE_GRADIENT = ("sam", "esam", "asam", "fisher_sam")
TWO_GRADIENTS = ("wsam", "coupled_wsam", "gsam")
DDP_CASES: list[Case] = [
    ("plain base", (), {}),
    ("SAM, ESAM, ASAM, Fisher SAM", ONE_GRADIENT, {}),
    ("SAM, ESAM, ASAM, Fisher SAM, local", ONE_GRADIENT, LOCAL),
    ("WSAM, Coupled-WSAM, GSAM", TWO_GRADIENTS, {}),
    ("WSAM, lean", ("wsam",), LEAN),
    ("WSAM, Coupled-WSAM, GSAM, local", TWO_GRADIENTS, LOCAL),
    ('WSAM, Coupled-WSAM, GSAM, local, nonfinite="skip"', TWO_GRADIENTS, LOCAL_SKIP),
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
    """Counts collective calls and their bytes: the larger of input and output."""

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
                self.calls[payload_kind(name, max(sizes))] += 1
                self.bytes[payload_kind(name, max(sizes))] += max(sizes)
        return func(*args, **(kwargs or {}))


def payload_kind(name: str, size: int) -> str:
    """Return what is communicated: weights are gathered, gradients reduced; numbers are small."""
    if size <= 64:
        return NUMBERS
    return WEIGHTS if "gather" in name else GRADIENTS


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def count(style: str, name: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return the calls and bytes of one step on this rank, after two warm-up steps."""
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

    for _ in range(2):  # DistributedDataParallel rebuilds its buckets after the first step
        optimizer.step(closure)
    with Collectives() as counted:
        optimizer.step(closure)
    return {
        kind: {"calls": counted.calls[kind], "bytes": counted.bytes[kind]}
        for kind in (GRADIENTS, WEIGHTS, NUMBERS)
    }


def measure() -> dict[str, Any]:
    """Count all cases on this rank; the process group must be initialized."""
    record: dict[str, Any] = {
        "ranks": dist.get_world_size(),
        "gradient_bytes": sum(p.nbytes for p in network().parameters()),
    }
    for style, cases in (("ddp", DDP_CASES), ("fsdp2", FSDP2_CASES)):
        record[style] = []
        for case, names, options in cases:
            counts = [count(style, name, options) for name in names or [None]]
            assert all(each == counts[0] for each in counts), f"methods differ: {case}"
            record[style].append({"case": case, **counts[0]})
    return record


def table(record: dict[str, Any], style: str) -> list[str]:
    """Return the record as a Markdown table, in bytes and in multiples of the gradients' size."""
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


def run_rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    record = measure()
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, record)
    assert all(other == record for other in gathered), "ranks have different counts"
    if rank == 0:
        for style in ("ddp", "fsdp2"):
            print(*table(record, style), "", sep="\n")
        RECORD.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
        print(f"written to {RECORD}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (f"{folder}/store",), nprocs=RANKS)
