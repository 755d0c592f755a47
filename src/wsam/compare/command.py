"""The command of a comparison."""

from __future__ import annotations

import shlex

from wsam.compare.request import Request
from wsam.lab.settings import BASES

_NAMED_BASE_ARGS = ("lr", "momentum", "weight_decay")
_OPTIONAL = (
    *("pretrained", "train_limit", "test_limit", "validation", "metric", "image_size"),
    *("target", "task", "block_size"),
)


def command(request: Request) -> str:
    """Return the `wsam compare` command of a request."""
    run, seeds = request.run, request.seeds
    words: list[object] = ["--data", run.data, "--model", run.model, "--base", run.base]
    for name, value in run.base_args.items():
        if value == BASES[run.base][name]:
            continue
        if name in _NAMED_BASE_ARGS:
            words += [_flag(name), value]
        else:
            shown = list(value) if isinstance(value, tuple) else value
            words += ["--base-arg", f"{name}={shown}"]
    words += ["--methods", ",".join(request.methods), "--budget", f"{request.budget:.12g}s"]
    first_ones = seeds == tuple(range(len(seeds)))
    words += ["--seeds", len(seeds) if first_ones else ",".join(map(str, seeds))]
    words += ["--trials", request.trials, "--epochs", run.epochs, "--every", request.every]
    words += [] if request.equal == "time" else ["--equal", request.equal]
    words += ["--batch-size", run.batch_size, "--schedule", run.schedule]
    words += ["--precision", run.precision, *([] if run.augment else ["--no-augment"])]
    words += ["--noise", run.noise] if run.noise else []
    for name in _OPTIONAL:
        value = getattr(run, name)
        words += [] if value is None else [_flag(name), value]
    return shlex.join(["wsam", "compare", *map(str, words)])


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
