"""`wsam train`: one run from data to record."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from wsam._format import pluralize
from wsam.cli import _options as options
from wsam.cli._app import app
from wsam.cli._errors import pausing

if TYPE_CHECKING:
    from wsam.lab.means import Means
    from wsam.lab.records import Record
    from wsam.lab.run import Run

_EXAMPLE = (
    "Example: wsam train --data cifar10 --model resnet18 --method wsam --rho 0.2 --gamma 0.88 "
    "--epochs 200 --seed 0"
)


@app.command(epilog=_EXAMPLE)
def train(
    data: options.Data = "digits",
    model: options.Model = "cnn",
    method: options.Method = "wsam",
    rho: options.Rho = None,
    gamma: options.Gamma = None,
    alpha: options.Alpha = None,
    beta: options.Beta = None,
    eta: options.Eta = None,
    hyper: options.Hyper = None,
    geometry: options.Geometry = None,
    geometry_arg: options.GeometryArg = None,
    lean: options.Lean = False,
    max_norm: options.MaxNorm = None,
    base: options.Base = "sgd",
    lr: options.LearningRate = None,
    momentum: options.Momentum = None,
    weight_decay: options.WeightDecay = None,
    nesterov: options.Nesterov = None,
    base_arg: options.BaseArg = None,
    epochs: options.Epochs = 200,
    batch_size: options.BatchSize = 128,
    seed: options.Seed = 0,
    noise: options.Noise = 0.0,
    noise_seed: options.NoiseSeed = 0,
    schedule: options.Schedule = "cosine",
    precision: options.Precision = None,
    augment: options.Augment = True,
    pretrained: options.Pretrained = None,
    train_limit: options.TrainLimit = None,
    test_limit: options.TestLimit = None,
    out: options.Out = Path("runs"),
    data_dir: options.DataDir = None,
    download: options.Download = True,
    device: options.Device = "auto",
    compile: options.Compile = None,
    capture: options.Capture = None,
    keep_checkpoint: options.KeepCheckpoint = False,
    checkpoint_seconds: options.CheckpointSeconds = 60.0,
    tensorboard: options.TensorBoard = None,
    retry: options.Retry = False,
    as_json: options.Json = False,
) -> None:
    """Train a model and write its record.

    A finished run is skipped, an interrupted one goes on.
    """
    from wsam.lab.run import Run

    means = options.make_means(
        data_dir,
        download,
        device=device,
        compile=compile,
        capture=capture,
        keep_weights=keep_checkpoint,
        checkpoint_seconds=checkpoint_seconds,
        retry=retry,
    )
    named = options.given(rho=rho, gamma=gamma, alpha=alpha, beta=beta, eta=eta)
    of_base = options.given(lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)
    run = Run(
        data=data,
        model=model,
        method=method,
        hyper=options.merged(named, "--hyper", hyper or ()),
        geometry=_geometry(geometry, geometry_arg or []),
        base=base,
        base_args=options.merged(of_base, "--base-arg", base_arg or ()),
        options=options.given(lean=lean or None, max_norm=max_norm),
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        noise=noise,
        noise_seed=noise_seed,
        schedule=schedule,
        precision=precision or ("bf16" if means.place().type == "cuda" else "fp32"),
        augment=augment,
        pretrained=pretrained,
        train_limit=train_limit,
        test_limit=test_limit,
    )
    _train(run, out, means, tensorboard, as_json)


def _geometry(name: str | None, arguments: list[str]) -> dict[str, Any] | None:
    if name is None:
        if arguments:
            raise ValueError("--geometry-arg needs --geometry")
        return None
    if "name" in (own := options.pairs(arguments)):
        raise ValueError("the name of the geometry is given by --geometry, not by --geometry-arg")
    return {"name": name, **own}


def _train(run: Run, out: Path, means: Means, tensorboard: bool | None, as_json: bool) -> None:
    from wsam.lab import records, watch
    from wsam.lab.train import is_begun, settled
    from wsam.lab.train import train as train_run

    done = settled(run, out, means) is not None
    follows = os.environ.get("RANK", "0") != "0"  # another process of a team speaks
    watchers = options.make_watchers(quiet=as_json or follows)
    if not follows and (watch.has_tensorboard() if tensorboard is None else tensorboard):
        watchers.append(watch.TensorBoard(records.work_folder(out, run) / "events"))
    with pausing(lambda: is_begun(run, out)):
        record = train_run(run, out, means, watchers)
    path = records.record_path(out, run)
    if follows:
        return
    if as_json:
        print(json.dumps({"record": str(path), "skipped": done, **record}, allow_nan=False))
    else:
        print(_summary(record, done), f"{'record:' if done else 'wrote'} {path}", sep="\n")
    if not records.is_finished(record):
        raise typer.Exit(1)
    if means.keep_weights and not records.weights_path(out, run).exists():
        note = f"its weights were not kept then; remove {path} to train it again"
        print(note, file=sys.stderr)


def _summary(record: Record, done: bool) -> str:
    from wsam.lab import records

    if not records.is_finished(record):
        failure, advice = records.failure_of(record), "turn down rho, gamma or the learning rate"
        if done:
            return f"failed before: {failure}; {advice}, or try it again with --retry"
        return f"failed: {failure}; {advice}"
    last = record["curve"][-1]
    return (
        f"{'already finished: ' if done else ''}{record['title']}: test error "
        f"{last['test_error']:.2f}% after {pluralize(last['epoch'], 'epoch')} "
        f"in {record['seconds']:.0f} s"
    )
