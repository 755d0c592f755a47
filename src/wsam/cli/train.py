"""`wsam train`: train one model and write its record."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from wsam._format import pluralize
from wsam.cli import _options as options
from wsam.cli._app import app, resumable

if TYPE_CHECKING:
    from wsam.lab.execution import ExecutionConfig
    from wsam.lab.records import Record
    from wsam.lab.run import Run

_EXAMPLE = (
    "Example: wsam train --data cifar10 --model resnet18 --method wsam --rho 0.2 --gamma 0.88 "
    "--epochs 200 --seed 0"
)


# Settings of a run. They are part of its key.
Data = Annotated[
    str,
    typer.Option(
        help="digits, cifar10, cifar100, fashion, imagenet; your own files: folder:PATH, table:PATH, "
        "text:PATH, hf:PATH; or your own function: path.py:function or package.module:function."
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="cnn, mlp, resnet18, wrn-28-10, deit-base, gpt, vit, timm:NAME, or your own function: "
        "path.py:function or package.module:function. [default: cnn for images, gpt for texts, "
        "else mlp]"
    ),
]
ModelArg = Annotated[
    list[str] | None,
    typer.Option(
        metavar=options.PAIR,
        help="An argument of mlp, gpt or vit, such as layers=6 or dropout=0.2. Repeatable.",
    ),
]
Method = Annotated[
    str,
    typer.Option(
        help=f"vanilla, {', '.join(options.METHODS)}, or your own subclass of wsam.SharpnessAware: "
        "path.py:Class or package.module:Class."
    ),
]
Rho = Annotated[float | None, typer.Option(help="Radius of the perturbation.")]
Gamma = Annotated[
    float | None,
    typer.Option(help="Weight of the sharpness term (WSAM); fraction of samples kept (ESAM)."),
]
Alpha = Annotated[float | None, typer.Option(help="Weight of the orthogonal component (GSAM).")]
Beta = Annotated[float | None, typer.Option(help="Fraction of tensors perturbed (ESAM).")]
Eta = Annotated[float | None, typer.Option(help="Stabilising constant (ASAM, Fisher SAM).")]
Hyper = Annotated[
    list[str] | None,
    typer.Option(metavar=options.PAIR, help="Another hyperparameter of the method. Repeatable."),
]
Geometry = Annotated[
    str | None,
    typer.Option(
        help="Neighbourhood other than a ball: adaptive, fisher, masked, norm-layers, per-layer or "
        "preconditioned."
    ),
]
GeometryArg = Annotated[
    list[str] | None,
    typer.Option(metavar=options.PAIR, help="An argument of the geometry. Repeatable."),
]
Lean = Annotated[
    bool,
    typer.Option(
        "--lean", help="Save one buffer: the base optimizer steps between the two passes."
    ),
]
Precondition = Annotated[
    bool | None,
    typer.Option(
        "--precondition/--no-precondition",
        help="Divide WSAM's sharpness term by the denominator of an adaptive base optimizer; gamma is "
        "then 0.5 by default. --no-precondition: the published form. [default: as the base allows]",
    ),
]
MaxNorm = Annotated[float | None, typer.Option(help="Clip gradients to this norm.")]
Every = Annotated[int, typer.Option(help="Make two passes on every N-th step only.")]
Reuse = Annotated[
    bool,
    typer.Option(
        "--reuse", help="With --every: apply WSAM's last sharpness gradient on the steps between."
    ),
]
Option = Annotated[
    list[str] | None,
    typer.Option(
        metavar=options.PAIR,
        help="Another option of the method: start, threshold, ascent_share, gather, rho_warmup, "
        "gamma_warmup, rho_follows_lr, reuse_scaled, reuse_average or reuse_weight. Repeatable.",
    ),
]
Base = Annotated[
    str,
    typer.Option(
        help="Base optimizer: sgd, adam, adamw, nadam, radam, adamax, rmsprop, adagrad, adadelta."
    ),
]
LearningRate = Annotated[float | None, typer.Option("--lr", help="Peak learning rate.")]
Momentum = Annotated[float | None, typer.Option(help="Momentum of the base optimizer.")]
WeightDecay = Annotated[float | None, typer.Option(help="Weight decay of the base optimizer.")]
Nesterov = Annotated[
    bool | None, typer.Option("--nesterov/--no-nesterov", help="Nesterov momentum.")
]
BaseArg = Annotated[
    list[str] | None,
    typer.Option(metavar=options.PAIR, help="Another argument of the base optimizer. Repeatable."),
]
Epochs = Annotated[int, typer.Option(help="Passes over the training data.")]
BatchSize = Annotated[int, typer.Option(help="Samples per step.")]
Seed = Annotated[int, typer.Option(help="Seed of initial weights, data order and augmentation.")]
Noise = Annotated[
    float, typer.Option(help="Fraction of training labels replaced by uniformly random ones.")
]
NoiseSeed = Annotated[int, typer.Option(help="Seed of the label noise.")]
Schedule = Annotated[
    Literal["cosine", "constant", "warmup-cosine"],
    typer.Option(
        help="Learning rate schedule; cosine decays to zero, every step, and warmup-cosine rises over "
        "the first 5% of the steps before."
    ),
]
Precision = Annotated[
    Literal["bf16", "fp32"] | None,
    typer.Option(help="Training precision. [default: bf16 on CUDA, fp32 elsewhere]"),
]
Augment = Annotated[
    bool, typer.Option("--augment/--no-augment", help="Random crops and horizontal flips.")
]
Pretrained = Annotated[
    str | None,
    typer.Option(
        help="Initial weights (deit-base, timm:): a folder or a name on the hub; (gpt, vit): run:KEY, "
        "the kept weights of a run in the output folder."
    ),
]
TrainLimit = Annotated[int | None, typer.Option(help="Train on this many samples only.")]
TestLimit = Annotated[int | None, typer.Option(help="Test on this many samples only.")]
Validation = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Hold out a part of the training data: a fraction or a number of samples. "
        "The test set is then evaluated once, at the end.",
    ),
]
ImageSize = Annotated[
    int | None,
    typer.Option(
        help="Rows and columns that image files are resized to. "
        "[default: the images' own; 224 for imagenet]"
    ),
]
Target = Annotated[
    str | None, typer.Option(help="Column to predict (table:, hf:). [default for hf: label]")
]
TaskName = Annotated[
    Literal["classification", "regression"] | None,
    typer.Option("--task", help="Kind of target (table:, hf:). [default: by its values]"),
]
BlockSize = Annotated[int | None, typer.Option(help="Characters per sample (text:). [default: 64]")]
MetricName = Annotated[
    str | None,
    typer.Option(
        "--metric",
        help="error, accuracy, loss, mse, macro-f1, or your own: path.py:NAME of a function of "
        "outputs and targets (lower is better) or of a wsam.lab.Metric. "
        "[default: as fits the data]",
    ),
]
ValidationSeed = Annotated[int | None, typer.Option(help="Seed of the validation split.")]

# How the run is executed. Not part of its key.
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
    data: Data = "digits",
    model: Model = None,
    model_arg: ModelArg = None,
    method: Method = "wsam",
    rho: Rho = None,
    gamma: Gamma = None,
    alpha: Alpha = None,
    beta: Beta = None,
    eta: Eta = None,
    hyper: Hyper = None,
    geometry: Geometry = None,
    geometry_arg: GeometryArg = None,
    lean: Lean = False,
    precondition: Precondition = None,
    max_norm: MaxNorm = None,
    every: Every = 1,
    reuse: Reuse = False,
    option: Option = None,
    base: Base = "sgd",
    lr: LearningRate = None,
    momentum: Momentum = None,
    weight_decay: WeightDecay = None,
    nesterov: Nesterov = None,
    base_arg: BaseArg = None,
    epochs: Epochs = 200,
    batch_size: BatchSize = 128,
    seed: Seed = 0,
    noise: Noise = 0.0,
    noise_seed: NoiseSeed = 0,
    schedule: Schedule = "cosine",
    precision: Precision = None,
    augment: Augment = True,
    pretrained: Pretrained = None,
    train_limit: TrainLimit = None,
    test_limit: TestLimit = None,
    validation: Validation = None,
    validation_seed: ValidationSeed = None,
    metric: MetricName = None,
    image_size: ImageSize = None,
    target: Target = None,
    task: TaskName = None,
    block_size: BlockSize = None,
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
    base_named = {
        "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov,
    }  # fmt: skip
    hypers = merge_pairs(named, "--hyper", hyper or ())
    switches = {
        "lean": lean or None,
        "precondition": precondition,
        "max_norm": max_norm,
        "every": None if every == 1 else every,
        "reuse": reuse or None,
    }
    chosen = merge_pairs(switches, "--option", option or ())
    run = Run(
        data=data,
        model=model or "",
        method=method,
        hyper=hypers,
        geometry=_geometry(geometry, geometry_arg or []),
        base=base,
        base_args=merge_pairs(base_named, "--base-arg", base_arg or ()),
        options=chosen,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        noise=noise,
        noise_seed=noise_seed,
        schedule=schedule,
        precision=precision or default_precision(config),
        augment=augment,
        pretrained=pretrained,
        train_limit=train_limit,
        test_limit=test_limit,
        validation=options.parse_validation(validation),
        validation_seed=validation_seed,
        metric=metric,
        image_size=image_size,
        target=target,
        task=task,
        block_size=block_size,
        model_args=options.parse_pairs(model_arg or ()),
    )
    run = with_wsam_defaults(run, {*hypers, *chosen})
    if run.options.get("lean") and run.options.get("precondition"):
        raise ValueError(
            f"--lean lets the base step between the passes, but WSAM over {base} is preconditioned, "
            "which needs both gradients: add --no-precondition"
        )
    _train(run, out, config, tensorboard, as_json)


def default_precision(config: ExecutionConfig) -> str:
    """Return the precision of a run on the chosen device."""
    return "bf16" if config.resolve_device().type == "cuda" else "fp32"


def merge_pairs(named: dict[str, Any], option: str, items: Iterable[str]) -> dict[str, Any]:
    """Merge the values of named options with the pairs of a general option.

    Args:
        named: Values of the named options; None means not given.
        option: The general option, such as ``--hyper``.
        items: Its ``name=value`` pairs.

    Raises:
        ValueError: A name is given by both.

    Example:
        >>> merge_pairs({"rho": 0.2, "gamma": None}, "--hyper", ["rho_min=0.01"])
        {'rho': 0.2, 'rho_min': 0.01}
    """
    values = _drop_none(named)
    pairs = options.parse_pairs(items)
    for name in values.keys() & pairs.keys():
        flag = f"--{name.replace('_', '-')}"
        raise ValueError(f"{name} is given twice, by {flag} and by {option}: remove one")
    return values | pairs


def _drop_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _geometry(name: str | None, arguments: list[str]) -> dict[str, Any] | None:
    if name is None:
        if arguments:
            raise ValueError("--geometry-arg needs --geometry")
        return None
    pairs = options.parse_pairs(arguments)
    if "name" in pairs:
        raise ValueError("the name of the geometry is given by --geometry, not by --geometry-arg")
    return {"name": name, **pairs}


def _train(
    run: Run, out: Path, config: ExecutionConfig, tensorboard: bool | None, as_json: bool
) -> None:
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
    from wsam.lab import records

    if not records.is_finished(record):
        failure, advice = records.failure_reason(record), records.failure_advice(record)
        if skipped:
            return f"failed before: {failure}; {advice}, or use --retry"
        return f"failed: {failure}; {advice}"
    metric, figure = records.metric(record), records.final_figure(record)
    assert figure is not None
    value = f"{figure:.2f}%" if metric["unit"] == "%" else f"{figure:.6g}{metric['unit']}"
    return (
        f"{'already finished: ' if skipped else ''}{record['title']}: test {metric['name']} "
        f"{value} after {pluralize(record['final']['epoch'], 'epoch')} "
        f"in {record['seconds']:.0f} s"
    )
