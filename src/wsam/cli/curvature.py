"""`wsam curvature`: eigenvalues, trace, density and sharpness of a trained model."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wsam.cli import _options as options
from wsam.cli._app import WithArguments, app
from wsam.cli._files import as_folder, together

if TYPE_CHECKING:
    from wsam.curvature import Operator
    from wsam.curvature.eigen import Progress, Report
    from wsam.lab.subject import Subject

_EXAMPLE = (
    "Example: wsam curvature runs/KEY.json --data cifar10 --top 5 --trace --density --out seen"
)

Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A run's record, weights or work folder, or a file of a state dict.",
    ),
]
Data = Annotated[
    str | None, typer.Option(help="Data to measure on. [default: the run's; else needed]")
]
Model = Annotated[str | None, typer.Option(help="Of a plain state dict: resnet18, cnn, ...")]
Split = Annotated[str, typer.Option(help="train or test images, without augmentation.")]
Samples = Annotated[int, typer.Option(help="Measure on the first so many images.")]
BatchSize = Annotated[
    int | None, typer.Option(help="Images at a time. [default: 1000 on CUDA, 250 elsewhere]")
]
Mode = Annotated[
    str, typer.Option(help="eval (running statistics of BatchNorm) or train (the batch's own).")
]
Precision = Annotated[
    str, typer.Option(help="float32, float64, or tf32: float32 with faster, rounder products.")
]
Seed = Annotated[int, typer.Option(help="Of the random vectors.")]


@app.command(cls=WithArguments, epilog=_EXAMPLE)
def curvature(
    checkpoint: Checkpoint,
    data: Data = None,
    model: Model = None,
    split: Split = "train",
    samples: Samples = 10_000,
    batch_size: BatchSize = None,
    operator: Annotated[
        str, typer.Option(help="hessian, gauss_newton or empirical_fisher.")
    ] = "hessian",
    top: Annotated[int, typer.Option(help="How many eigenvalues at each wanted end.")] = 1,
    which: Annotated[str, typer.Option(help="largest, smallest or both.")] = "largest",
    method: Annotated[str, typer.Option(help="lanczos or power.")] = "lanczos",
    tol: Annotated[float, typer.Option(help="Relative residual of the eigenvalues.")] = 1e-3,
    block: Annotated[
        int,
        typer.Option(help="Vectors Lanczos starts from: finds so many equal eigenvalues at once."),
    ] = 1,
    top_products: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="<int>",
            help="Products after which --top gives up. [default: grows with --top]",
        ),
    ] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Estimate the trace (Hutch++).")] = False,
    trace_tol: Annotated[
        float, typer.Option(help="Relative standard error that --trace goes for.")
    ] = 0.02,
    trace_products: Annotated[
        int, typer.Option(min=2, metavar="<int>", help="Products after which --trace gives up.")
    ] = 300,
    density: Annotated[
        bool, typer.Option("--density", help="Estimate the density of the eigenvalues.")
    ] = False,
    density_probes: Annotated[
        int,
        typer.Option(min=1, metavar="<int>", help="Random vectors after which --density gives up."),
    ] = 10,
    density_steps: Annotated[
        int,
        typer.Option(min=2, metavar="<int>", help="Products of --density for each random vector."),
    ] = 60,
    sharpness: Annotated[
        float | None, typer.Option(metavar="RHO", help="SAM's sharpness at this radius.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Ascent steps of --sharpness.")] = 1,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="Scale both sharpness measures by the weights.")
    ] = False,
    average: Annotated[
        float | None,
        typer.Option(metavar="SIGMA", help="Average sharpness under Gaussian noise of this size."),
    ] = None,
    mode: Mode = "eval",
    precision: Precision = "float32",
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(callback=as_folder, help="Folder for curvature.json and the density's plots."),
    ] = None,
    data_dir: options.DataDir = None,
    download: options.Download = True,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Measure the curvature of a trained model's loss."""
    if not trace_tol > 0:
        raise ValueError(f"--trace-tol must be above 0, not {trace_tol}")
    if adaptive and sharpness is None and average is None:
        raise ValueError("--adaptive needs --sharpness or --average: it scales those measures")
    settings = loss_options(mode, precision)
    if out is not None and density:
        require_pictures()
    means = options.make_means(data_dir, download, device=device)
    begin = time.monotonic()
    with progress(quiet=as_json) as follow:
        subject = open_checkpoint(checkpoint, means, data, model, split, samples, batch_size)
        H = _operator(operator, subject, settings)
        wanted: dict[str, dict[str, Any]] = {}
        if top:
            wanted["eigenvalues"] = {
                "k": top, "which": which, "method": method, "tol": tol,
                "block": block, "max_products": top_products,
            }  # fmt: skip
        if trace:
            wanted["trace"] = {"tol": trace_tol, "max_products": trace_products}
        if density:
            wanted["density"] = {"max_probes": density_probes, "steps": density_steps}
        found = _spectrum(H, wanted, seed, follow)
        found |= _sharpness(
            subject, settings, seed, follow, (sharpness, average), adaptive=adaptive, steps=steps
        )
    record = {
        **about(subject, seed, begin),
        "accuracy": subject.accuracy(),
        "info": H.info.as_dict(),
        **{name: result.as_dict() for name, result in found.items()},
    }
    files = _write(out, record, found) if out else []
    if as_json:
        print(json.dumps({**record, "files": [str(f) for f in files]}, allow_nan=False))
    else:
        _print_table(record, files)


def _operator(name: str, subject: Subject, settings: Any) -> Operator:
    from wsam.curvature import empirical_fisher, gauss_newton, hessian

    builders = {f.__name__: f for f in (hessian, gauss_newton, empirical_fisher)}
    if name not in builders:
        raise ValueError(f"--operator must be one of {', '.join(builders)}, not {name}")
    return builders[name](subject.model, cross_entropy(), subject.batches, **settings)


def _spectrum(
    H: Operator, wanted: dict[str, dict[str, Any]], seed: int, follow: Any
) -> dict[str, Any]:
    """Measure what is wanted, each with its options."""
    from wsam.curvature import density, top_eigenvalues, trace

    ways: dict[str, Any] = {"eigenvalues": top_eigenvalues, "trace": trace, "density": density}
    return {
        name: ways[name](H, seed=seed, report=follow(name), **given)
        for name, given in wanted.items()
    }


def _sharpness(
    subject: Subject,
    settings: Any,
    seed: int,
    follow: Any,
    radii: tuple[float | None, float | None],
    *,
    adaptive: bool,
    steps: int,
) -> dict[str, Any]:
    from wsam.curvature import average_sharpness, sharpness

    about = (subject.model, cross_entropy(), subject.batches)
    settings = {**settings, "adaptive": adaptive, "seed": seed}
    rho, sigma = radii
    found: dict[str, Any] = {}
    if rho is not None:
        report = follow("sharpness")
        found["sharpness"] = sharpness(*about, rho, steps=steps, report=report, **settings)
    if sigma is not None:
        report = follow("average sharpness")
        found["average_sharpness"] = average_sharpness(*about, sigma, report=report, **settings)
    return found


def open_checkpoint(
    checkpoint: Path,
    means: Any,
    data: str | None,
    model: str | None,
    split: str,
    samples: int | None,
    batch_size: int | None,
) -> Subject:
    """Open a checkpoint as a verb's options describe it."""
    from wsam.lab.subject import open_subject

    return open_subject(
        checkpoint, means, data=data, model=model, split=split,
        samples=samples, batch_size=batch_size,
    )  # fmt: skip


def about(subject: Subject, seed: int, begin: float) -> dict[str, Any]:
    """Return what a measurement is of and what it was made with: the head of its JSON."""
    from wsam.lab import environment

    device = next(subject.model.parameters()).device
    return {
        "title": subject.title,
        "split": subject.split,
        "seed": seed,
        "seconds": time.monotonic() - begin,
        **environment.facts(device),
    }


def require_pictures() -> None:
    """Refuse before anything is measured where pictures cannot be drawn."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib: pip install 'wsam[plots]'")


def loss_options(mode: str, precision: str) -> Any:
    """Return the options of an objective; sets what the GPU may round, for the whole process."""
    import torch

    if precision not in ("float32", "float64", "tf32"):
        raise ValueError(f"--precision must be float32, float64 or tf32, not {precision}")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    return {"mode": mode, "dtype": torch.float64 if precision == "float64" else torch.float32}


def cross_entropy() -> Any:
    """Return the loss the lab trains with."""
    from torch.nn.functional import cross_entropy as loss

    return loss


@contextmanager
def progress(quiet: bool) -> Iterator[Any]:
    """Yield a function that makes a `report` for a stage; a bar on a terminal, else nothing."""
    if quiet or not sys.stderr.isatty():
        yield lambda _stage: None
        return
    from rich import progress as bars
    from rich.console import Console

    bar = bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(None),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[error]}"),
        bars.TimeElapsedColumn(),
        console=Console(stderr=True),
    )

    def follow(stage: str) -> Report:
        task = bar.add_task(stage, total=None, error="")

        def report(at: Progress) -> None:
            error = "" if at.error != at.error else f"error {at.error:.1e}"
            bar.update(task, completed=at.products, total=at.limit, error=error)

        return report

    with bar:
        yield follow


def _write(out: Path, record: dict[str, Any], found: dict[str, Any]) -> list[Path]:
    from wsam.curvature import save_density

    names = ["curvature.json"]
    with together(out) as unfinished:
        numbers = json.dumps(record, allow_nan=False)
        (unfinished / names[0]).write_text(numbers, encoding="utf-8")
        if "density" in found:
            marks = found["eigenvalues"].values.tolist() if "eigenvalues" in found else []
            names += ["density.png", "density.html"]
            for name in names[1:]:
                save_density(found["density"], unfinished / name, marks)
    return [out / name for name in names]


def _print_table(record: dict[str, Any], files: list[Path]) -> None:
    info = record["info"]
    rounded = " with TF32" if info["tf32"] else ""
    print(record["title"])
    print(
        f"{info['kind'].replace('_', '-')} of {info['parameters']:,} weights on {info['samples']:,} "
        f"{record['split']} images, {info['mode']} mode, {info['dtype']}{rounded}, {info['device']}"
    )
    rows = [("loss", f"{info['loss']:.6g}", ""), ("accuracy", f"{record['accuracy']:.4f}", "")]
    if eigen := record.get("eigenvalues"):
        columns = (eigen["values"], eigen["residuals"], eigen["converged"])
        for number, (value, bound, good) in enumerate(zip(*columns, strict=True), 1):
            note = f"an eigenvalue within {bound:.1e}" + _unless(good, "--tol or --top-products")
            rows.append((f"eigenvalue {number}", f"{value:.6g}", note))
    if found := record.get("trace"):
        error = found["standard_error"]
        note = "standard error " + ("unknown" if error is None else f"{error:.2g}")
        note += _unless(found["converged"], "--trace-products or --trace-tol")
        rows.append(("trace", f"{found['value']:.6g}", note))
    if found := record.get("density"):
        rows += _shares(found)
    for name in ("sharpness", "average_sharpness"):
        if found := record.get(name):
            note = f"{found['measure']}, radius {found['radius']:g}"
            value = "not finite" if found["value"] is None else f"{found['value']:.6g}"
            rows.append((name.replace("_", " "), value, note))
    wide, broad = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value, note in rows:
        print(f"  {name:<{wide}}  {value:>{broad}}  {note}".rstrip())
    for file in files:
        print(file)


def _shares(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the rows of a density: shares of the eigenvalues, each between its bounds."""
    if found["semidefinite"]:
        return [("below zero", "0.0%", "of the eigenvalues: positive semi-definite by definition")]
    probes = f"{found['probes']} probe" + ("s" if found["probes"] > 1 else "")
    rows = []
    for name, share in (
        ("below zero", found["below_zero"]),
        (f"below {-found['sigma']:.3g}", found["below_minus_sigma"]),
    ):
        low, high = (f"{100 * share[end]:.1f}%" for end in ("low", "high"))
        note = f"of the eigenvalues, standard error {100 * share['standard_error']:.1f}%"
        note += f", {probes} of {found['steps']} steps"
        note += _unless(found["converged"], "--density-probes or --density-steps")
        rows.append((name, low if low == high else f"{low} to {high}", note))
    return rows


def _unless(converged: bool, options: str) -> str:
    """Say that a figure has not converged, and which options help."""
    return "" if converged else f", not converged: raise {options}"
