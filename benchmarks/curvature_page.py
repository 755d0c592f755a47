"""Copy the records of benchmarks/curvature.py into docs/curvature.md.

python benchmarks/curvature_page.py            rewrite the blocks of the page
python benchmarks/curvature_page.py --check    fail if they are out of date
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from wsam.lab.markdown_tables import update_tables

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "curvature.md"
RESULTS = ROOT / "benchmarks" / "results"
MARK = "record"
LABELS = {
    "wsam lanczos": "wsam, Lanczos",
    "wsam power": "wsam, power iteration",
    "hessian-eigenthings lanczos": "hessian-eigenthings, Lanczos",
    "hessian-eigenthings power": "hessian-eigenthings, power iteration",
    "PyHessian data (graph kept)": "PyHessian, one batch with its graph kept",
    "PyHessian dataloader": "PyHessian, batch by batch",
}
PEERS = ("PyHessian", "hessian-eigenthings")
UNKNOWN = "unknown"
"""The version of a library that was not installed by pip."""
NO_RECORD = "Not measured on a GPU yet: there is no `benchmarks/results/curvature-cuda.json`."


def versions(record: dict[str, Any]) -> str:
    """Return the versions of the libraries, or "not installed"; none that is unknown."""
    found = record["versions"]
    names = [name for name in ("wsam", *PEERS, "torch") if found[name] != UNKNOWN]
    return ", ".join(f"{name} {found[name] or 'not installed'}" for name in names)


def to_accuracy(record: dict[str, Any]) -> list[str]:
    """Return a table of the seconds each library needs for each error."""
    targets = record["to_accuracy"]
    lines = ["| | " + " | ".join(f"error {target}" for target in targets) + " |"]
    lines.append("|---" * (len(targets) + 1) + "|")
    measured = {row["library"] for row in record["contenders"]}
    for name, label in LABELS.items():
        if name in measured:
            cells = [_seconds(found.get(name)) for found in targets.values()]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return lines


def _seconds(best: dict[str, Any] | None) -> str:
    return "not met" if best is None else f"{best['median_seconds']:.2f}"


def cpu(record: dict[str, Any]) -> str:
    """Return the block of the small problem, on one thread."""
    problem, info, hardware = record["problem"], record["info"], record["hardware"]
    repeats = len(record["contenders"][0]["seconds"])
    text = (
        f"The lab's small CNN ({info['parameters']:,} weights) on {problem['images']:,} digits in "
        f"{info['batches']} batches, {record['precision']}, one thread of {hardware['cpu']} with "
        f"{hardware['cores']} cores. The table shows the CPU seconds until the relative error of the "
        f"top eigenvalue is at most the target in all of {repeats} repeats, for the fastest of "
        "several settings of each library's stopping rule "
        f"(`benchmarks/results/curvature-cpu.json`: {versions(record)}):"
    )
    return "\n".join([_wrapped(text), "", *to_accuracy(record)])


def cuda(record: dict[str, Any]) -> str:
    """Return the block of ResNet18 on CIFAR: the time in float32, and the comparison."""
    problem, strict = record["problem"], record["reference"]
    info = strict["info"]
    text = (
        f"ResNet18 ({info['parameters']:,} weights) on {problem['images']:,} CIFAR-10 images in "
        f"batches of {problem['batch']:,}, {record['hardware']['gpu']} "
        f"(`benchmarks/results/curvature-cuda.json`: {versions(record)}). In float32 without TF32 the "
        f"top eigenvalue took **{strict['seconds']:.1f} s**: {strict['products']} products, residual "
        f"{strict['residuals'][0] / abs(strict['values'][0]):.1e} of the value, "
        f"{strict['peak_gib']:.0f} GiB."
    )
    if not record["contenders"]:
        return _wrapped(text)
    repeats = len(record["contenders"][0]["seconds"])
    timed = f"median of {repeats} runs" if repeats > 1 else "one run each"
    settings = ", ".join(f"{row['library']} {row['setting']}" for row in record["contenders"])
    more = (
        f"Comparison of the libraries, all in {record['precision']}, {record['clock']}, {timed}, each "
        f"at one setting, not at the fastest of several as above ({settings}). Errors are relative to "
        "that value, which wsam computed."
    )
    return "\n".join([_wrapped(text), "", _wrapped(more), "", *to_accuracy(record)])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def block(kind: str, results: Path = RESULTS) -> str:
    """Return the Markdown of a record, or a sentence if there is none."""
    path = results / f"curvature-{kind}.json"
    if not path.exists():
        return NO_RECORD
    record = json.loads(path.read_text(encoding="utf-8"))
    return {"cpu": cpu, "cuda": cuda}[kind](record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    chosen = parser.parse_args()
    if update_tables(PAGE, MARK, block, chosen.check) and chosen.check:
        sys.exit(f"{PAGE} is out of date: run python benchmarks/curvature_page.py")


if __name__ == "__main__":
    main()
