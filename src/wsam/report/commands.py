"""Commands that reproduce a record."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence

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
    hyper = {name: value for name, value in run.hyper.items() if value is not None}
    words += _arguments("--hyper", hyper, _HYPER_OPTIONS)
    geometry = dict(run.geometry or {})
    words += _given(("--geometry", geometry.pop("name", None)))
    words += [*_arguments("--geometry-arg", geometry), *_options(run)]
    words += _given(
        ("--seed", run.seed),
        ("--noise-seed", run.noise_seed if run.noise else None),
        ("--validation-seed", run.validation_seed),
        ("--device", device),
        ("--data-dir", data_dir),
    )
    words += ["--keep-checkpoint"] if keep else []
    words += _given(("--out", out))
    return shlex.join(["wsam", "train", *map(str, words)])


def problem_words(run: Run) -> list[object]:
    """Return the options that `wsam train` and `wsam compare` share: all but method and seeds."""
    words: list[object] = ["--data", run.data, "--model", run.model]
    words += _arguments("--model-arg", run.model_args)
    words += [*_base(run), "--epochs", run.epochs, "--batch-size", run.batch_size]
    words += ["--noise", run.noise] if run.noise else []
    words += ["--schedule", run.schedule, "--precision", run.precision]
    words += [] if run.augment else ["--no-augment"]
    return words + _given(
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


def _given(*options: tuple[str, object]) -> list[object]:
    """Return options with their values, without those whose value is None."""
    return [word for option, value in options if value is not None for word in (option, value)]


def _arguments(
    option: str, values: Mapping[str, object], named: Sequence[str] = ()
) -> list[object]:
    """Return each value by the option of its name, or as ``NAME=VALUE`` of a general option."""
    words: list[object] = []
    for name, value in values.items():
        if name in named:
            words += [f"--{name.replace('_', '-')}", value]
        else:
            words += [option, f"{name}={json.dumps(value)}"]
    return words


def _options(run: Run) -> list[object]:
    options = dict(run.options)
    words: list[object] = ["--lean"] if options.pop("lean", False) else []
    if options.pop("precondition", False):
        words.append("--precondition")
    elif run.method == "wsam" and has_preconditioner(run.base):  # the default of the command
        words.append("--no-precondition")
    words += _given(("--max-norm", options.pop("max_norm", None)))
    words += _given(("--every", options.pop("every", None)))
    words += ["--reuse"] if options.pop("reuse", False) else []
    return words + _arguments("--option", options)


def _base(run: Run) -> list[object]:
    given = {
        name: value
        for name, value in run.base_args.items()
        if name in _BASE_OPTIONS or value != BASES[run.base][name]
    }
    return ["--base", run.base, *_arguments("--base-arg", given, _BASE_OPTIONS)]


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
