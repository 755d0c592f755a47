"""The command of a comparison."""

from __future__ import annotations

import shlex

from wsam.compare.request import Request
from wsam.report.commands import base_words, problem_words


def command(request: Request) -> str:
    """Return the `wsam compare` command of a request."""
    run, seeds = request.run, request.seeds
    words: list[object] = ["--data", run.data, "--model", run.model, *base_words(run)]
    words += ["--methods", ",".join(request.methods), "--budget", f"{request.budget:.12g}s"]
    first_ones = seeds == tuple(range(len(seeds)))
    words += ["--seeds", len(seeds) if first_ones else ",".join(map(str, seeds))]
    words += ["--trials", request.trials, "--epochs", run.epochs, "--every", request.every]
    words += [] if request.equal == "time" else ["--equal", request.equal]
    words += ["--batch-size", run.batch_size]
    words += ["--noise", run.noise] if run.noise else []
    words += problem_words(run)
    return shlex.join(["wsam", "compare", *map(str, words)])
