"""`wsam train`: train one model and write its record."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wsam._utils.text import pluralize
from wsam.cli import _options as options
from wsam.cli import _run_options as run_options
from wsam.cli._app import app, resumable

if TYPE_CHECKING:
    from wsam.lab.execution import ExecutionConfig
    from wsam.lab.records import Record
    from wsam.lab.run import Run

_EXAMPLE = (
    "Example: wsam train --data cifar10 --model resnet18 --method wsam --rho 0.2 --gamma 0.88 "
    "--epochs 200 --seed 0"
)


KeepCheckpoint = Annotated[bool, typer.Option("--keep-checkpoint", help="Keep the final weights.")]
TensorBoard = Annotated[
    bool | None,
    typer.Option(
        "--tensorboard/--no-tensorboard",
        help="Write TensorBoard events. [default: if installed]",
    ),
]


@app.command(epilog=_EXAMPLE)
def train(
    data: run_options.Data = "digits",
    model: run_options.Model = None,
    model_arg: run_options.ModelArg = None,
    method: run_options.Method = "wsam",
    rho: run_options.Rho = None,
    gamma: run_options.Gamma = None,
    alpha: run_options.Alpha = None,
    beta: run_options.Beta = None,
    eta: run_options.Eta = None,
    hyper: run_options.Hyper = None,
    geometry: run_options.Geometry = None,
    geometry_arg: run_options.GeometryArg = None,
    lean: run_options.Lean = False,
    precondition: run_options.Precondition = None,
    max_norm: run_options.MaxNorm = None,
    every: run_options.Every = 1,
    reuse: run_options.Reuse = False,
    option: run_options.Option = None,
    base: run_options.Base = "sgd",
    lr: run_options.LearningRate = None,
    momentum: run_options.Momentum = None,
    weight_decay: run_options.WeightDecay = None,
    nesterov: run_options.Nesterov = None,
    base_arg: run_options.BaseArg = None,
    epochs: run_options.Epochs = 200,
    batch_size: run_options.BatchSize = 128,
    seed: run_options.Seed = 0,
    noise: run_options.Noise = 0.0,
    noise_seed: run_options.NoiseSeed = 0,
    schedule: run_options.Schedule = "cosine",
    decay_start: run_options.DecayStart = None,
    precision: run_options.Precision = None,
    augment: run_options.Augment = True,
    pretrained: run_options.Pretrained = None,
    train_limit: run_options.TrainLimit = None,
    test_limit: run_options.TestLimit = None,
    validation: run_options.Validation = None,
    validation_seed: run_options.ValidationSeed = None,
    metric: run_options.MetricName = None,
    image_size: run_options.ImageSize = None,
    target: run_options.Target = None,
    task: run_options.TaskName = None,
    block_size: run_options.BlockSize = None,
    out: options.Out = Path("runs"),
    data_dir: options.DataDir = None,
    download: options.Download = True,
    device: options.Device = "auto",
    compile: options.Compile = None,
    capture: options.Capture = None,
    keep_checkpoint: KeepCheckpoint = False,
    checkpoint_seconds: options.CheckpointSeconds = 60.0,
    tensorboard: TensorBoard = None,
    retry: options.Retry = False,
    as_json: options.Json = False,
) -> None:
    """Train a model and write its record.

    A finished run is skipped; an interrupted one is resumed.
    """
    given = locals()
    from wsam.lab.run import Run, with_wsam_defaults

    config = options.make_config(
        data_dir,
        download,
        device=device,
        compile=compile,
        capture=capture,
        keep_weights=keep_checkpoint,
        checkpoint_seconds=checkpoint_seconds,
        retry=retry,
    )
    named = {"rho": rho, "gamma": gamma, "alpha": alpha, "beta": beta, "eta": eta}
    hypers = run_options.merge_pairs(named, "--hyper", hyper or ())
    switches = {
        "lean": lean or None,
        "precondition": precondition,
        "max_norm": max_norm,
        "every": None if every == 1 else every,
        "reuse": reuse or None,
    }
    chosen = run_options.merge_pairs(switches, "--option", option or ())
    run = Run(
        **run_options.problem(given, config),
        method=method,
        hyper=hypers,
        geometry=_geometry(geometry, geometry_arg or []),
        options=chosen,
        seed=seed,
        noise_seed=noise_seed,
        validation_seed=validation_seed,
    )
    run = with_wsam_defaults(run, {*hypers, *chosen})
    _train(run, out, config, tensorboard, as_json)


def _geometry(name: str | None, arguments: list[str]) -> dict[str, Any] | None:
    """Return the geometry as in `Run`; None for the ball."""
    pairs = options.parse_pairs(arguments)
    if "name" in pairs or (pairs and name is None):
        raise ValueError("--geometry-arg needs --geometry NAME, and takes no name itself")
    return None if name is None else {"name": name, **pairs}


def _train(
    run: Run, out: Path, config: ExecutionConfig, tensorboard: bool | None, as_json: bool
) -> None:
    """Train a run, or read its record, and print the result."""
    from wsam.lab import records
    from wsam.lab.callbacks import TensorBoard as TensorBoardCallback
    from wsam.lab.callbacks import has_tensorboard
    from wsam.lab.train import existing_record, has_started
    from wsam.lab.train import train as train_run

    skipped = existing_record(run, out, config) is not None
    main_process = os.environ.get("RANK", "0") == "0"  # only rank 0 prints
    callbacks = options.make_callbacks(quiet=as_json or not main_process)
    if main_process and (has_tensorboard() if tensorboard is None else tensorboard):
        callbacks.append(TensorBoardCallback(records.work_folder(out, run) / "events"))
    with resumable(lambda: has_started(run, out)):
        record = train_run(run, out, config, callbacks)
    if not main_process:
        return
    path = records.record_path(out, run)
    if as_json:
        print(json.dumps({"record": str(path), "skipped": skipped, **record}, allow_nan=False))
    else:
        print(_summary(record, skipped))
        print(f"{'record:' if skipped else 'wrote'} {path}")
    if not records.is_finished(record):
        raise typer.Exit(1)
    if config.keep_weights and not records.weights_path(out, run).exists():
        note = f"the weights of this run were not kept; remove {path} to train it again"
        print(note, file=sys.stderr)


def _summary(record: Record, skipped: bool) -> str:
    """Return the result of a run as one line."""
    from wsam.lab import records

    if not records.is_finished(record):
        failure, advice = records.failure_reason(record), records.failure_advice(record)
        if skipped:
            return f"failed before: {failure}; {advice}, or use --retry"
        return f"failed: {failure}; {advice}"
    return (
        f"{'already finished: ' if skipped else ''}{record['title']}: "
        f"{records.final_text(record)} after {pluralize(record['final']['epoch'], 'epoch')} "
        f"in {record['seconds']:.0f} s"
    )
