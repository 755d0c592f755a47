"""The command of a comparison."""

from __future__ import annotations

import shlex

from wsam.compare.request import Request
from wsam.report.commands import problem_words


def command(request: Request) -> str:
    """Return the `wsam compare` command of a request."""
    seeds = request.seeds
    words = [*problem_words(request.run), "--methods", ",".join(request.methods)]
    words += ["--budget", f"{request.budget:.12g}s"]
    first_ones = seeds == tuple(range(len(seeds)))
    words += ["--seeds", len(seeds) if first_ones else ",".join(map(str, seeds))]
    words += ["--trials", request.trials, "--every", request.every]
    words += [] if request.equal == "time" else ["--equal", request.equal]
    return shlex.join(["wsam", "compare", *map(str, words)])
