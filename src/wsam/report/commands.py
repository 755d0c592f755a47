"""Commands that reproduce a record."""

from __future__ import annotations

import json
import shlex

from wsam.lab.run import Run
from wsam.lab.settings import BASES, has_preconditioner
from wsam.lab.user_code import OBJECT
from wsam.report.results import Result

_HYPER_OPTIONS = ("rho", "gamma", "alpha", "beta", "eta")
_BASE_OPTIONS = ("lr", "momentum", "weight_decay")
OUTPUT_FOLDER = "again"
"""The output folder of the commands. A new one, because a finished run is not trained again."""


def command(
    run: Run,
    *,
    device: str | None = None,
    keep: bool = False,
    out: str | None = None,
    data_dir: str | None = None,
) -> str:
    """Return the `wsam train` command of a run, with all settings that determine its result.

    Args:
        run: The run.
        device: The value of ``--device``, if any.
        keep: Keep the weights for later measurements.
        out: The output folder.
        data_dir: The value of ``--data-dir``, if any.

    Example:
        >>> command(Run(method="sam", hyper={"rho": 0.2}, epochs=3)).partition("fp32 ")[2]
        '--method sam --rho 0.2 --seed 0'
    """
    words = [*problem_words(run), "--method", run.method]
    words += [*_hyper(run), *_geometry(run), *_options(run), "--seed", run.seed]
    words += ["--noise-seed", run.noise_seed] if run.noise else []
    words += [] if run.validation_seed is None else ["--validation-seed", run.validation_seed]
    words += [] if device is None else ["--device", device]
    words += [] if data_dir is None else ["--data-dir", data_dir]
    words += ["--keep-checkpoint"] if keep else []
    words += [] if out is None else ["--out", out]
    return shlex.join(["wsam", "train", *map(str, words)])


def problem_words(run: Run) -> list[object]:
    """Return the options that `wsam train` and `wsam compare` share: all but method and seeds."""
    words: list[object] = ["--data", run.data, "--model", run.model]
    for name, value in run.model_args.items():
        words += ["--model-arg", f"{name}={json.dumps(value)}"]
    words += [*_base(run), "--epochs", run.epochs, "--batch-size", run.batch_size]
    words += ["--noise", run.noise] if run.noise else []
    words += ["--schedule", run.schedule, "--precision", run.precision]
    words += [] if run.augment else ["--no-augment"]
    optional = (
        ("--decay-start", run.decay_start),
        ("--pretrained", run.pretrained),
        ("--train-limit", run.train_limit),
        ("--test-limit", run.test_limit),
        ("--metric", run.metric),
        ("--image-size", run.image_size),
        ("--target", run.target),
        ("--task", run.task),
        ("--block-size", run.block_size),
        ("--validation", run.validation),
    )
    for option, given in optional:
        words += [] if given is None else [option, given]
    return words


def _hyper(run: Run) -> list[object]:
    words: list[object] = []
    for name, value in run.hyper.items():
        if value is not None:
            named = name in _HYPER_OPTIONS
            words += [f"--{name}", value] if named else ["--hyper", f"{name}={json.dumps(value)}"]
    return words


def _geometry(run: Run) -> list[object]:
    if run.geometry is None:
        return []
    words: list[object] = ["--geometry", run.geometry["name"]]
    for name, value in run.geometry.items():
        if name != "name":
            words += ["--geometry-arg", f"{name}={json.dumps(value)}"]
    return words


def _options(run: Run) -> list[object]:
    words: list[object] = ["--lean"] if run.options.get("lean") else []
    if run.options.get("precondition"):
        words.append("--precondition")
    elif run.method == "wsam" and has_preconditioner(run.base):  # the default of the command
        words.append("--no-precondition")
    if run.options.get("max_norm") is not None:
        words += ["--max-norm", run.options["max_norm"]]
    if "every" in run.options:
        words += ["--every", run.options["every"]]
    words += ["--reuse"] if run.options.get("reuse") else []
    named = ("lean", "precondition", "max_norm", "every", "reuse")
    for name in (name for name in run.options if name not in named):
        words += ["--option", f"{name}={json.dumps(run.options[name])}"]
    return words


def _base(run: Run) -> list[object]:
    words: list[object] = ["--base", run.base]
    for name, value in run.base_args.items():
        if name in _BASE_OPTIONS:
            words += [f"--{name.replace('_', '-')}", value]
        elif value != BASES[run.base][name]:
            items = list(value) if isinstance(value, tuple) else value
            words += ["--base-arg", f"{name}={json.dumps(items)}"]
    return words


def commands(result: Result) -> list[str]:
    """Return the commands that reproduce a result: training and measurements.

    Empty for a run of `wsam.lab.fit` with objects, which a command cannot name.
    """
    run = result.run
    if any(name.startswith(OBJECT) for name in (run.data, run.model, run.metric or "")):
        return []
    execution = result.record.get("execution") or {}
    device = "cpu" if execution.get("device") == "cpu" else None
    folder = (result.record.get("data") or {}).get("folder")
    train = command(
        result.run,
        device=device,
        keep=result.minimum is not None,
        out=OUTPUT_FOLDER,
        data_dir=None if folder is None else str(folder),
    )
    processes = execution.get("processes", 1)
    if isinstance(processes, int) and processes > 1:
        train = f"torchrun --nproc_per_node {processes} -m {train}"
    if result.minimum is None:
        return [train]
    words = ["wsam", "curvature", f"{OUTPUT_FOLDER}/{result.run.key}.json", "--top", "1"]
    words += ["--samples", str(result.minimum.get("images", 10_000))]
    words += [] if folder is None else ["--data-dir", str(folder)]
    return [train, shlex.join(words)]
