"""`wsam curvature`: eigenvalues, trace, density and sharpness of a trained model."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from wsam._utils.text import align_columns, pluralize
from wsam.cli import _checkpoints as shared
from wsam.cli import _options as options
from wsam.cli._app import app
from wsam.cli._files import check_output_folder, staged

_EXAMPLE = (
    "Example: wsam curvature runs/KEY.json --data cifar10 --top 5 --trace --density --out figures"
)


@app.command(epilog=_EXAMPLE)
def curvature(
    checkpoint: shared.Checkpoint,
    data: shared.Data = None,
    model: shared.Model = None,
    split: shared.Split = "train",
    samples: shared.Samples = 10_000,
    batch_size: shared.BatchSize = None,
    operator: Annotated[
        Literal["hessian", "gauss_newton", "empirical_fisher"],
        typer.Option(help="Matrix to measure."),
    ] = "hessian",
    top: Annotated[
        int,
        typer.Option(min=0, help="Number of eigenvalues at each end; 0 for none."),
    ] = 1,
    which: Annotated[
        Literal["largest", "smallest", "both"], typer.Option(help="End of the spectrum.")
    ] = "largest",
    method: Annotated[
        Literal["lanczos", "power"], typer.Option(help="Eigenvalue algorithm.")
    ] = "lanczos",
    tol: Annotated[
        float,
        typer.Option(help="Relative residual of the eigenvalues, below 1."),
    ] = 1e-3,
    block: Annotated[
        int,
        typer.Option(
            min=1,
            help="Block size of Lanczos: the multiplicity of eigenvalues it can find.",
        ),
    ] = 1,
    top_products: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum number of products for --top. [default: grows with --top]"
        ),
    ] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Estimate the trace (Hutch++).")] = False,
    trace_tol: Annotated[
        float, typer.Option(help="Target relative standard error of --trace.")
    ] = 0.02,
    trace_products: Annotated[
        int, typer.Option(min=2, help="Maximum number of products for --trace.")
    ] = 300,
    density: Annotated[
        bool, typer.Option("--density", help="Estimate the spectral density.")
    ] = False,
    density_probes: Annotated[
        int,
        typer.Option(min=1, help="Maximum number of random vectors for --density."),
    ] = 10,
    density_steps: Annotated[
        int,
        typer.Option(min=2, help="Products per random vector for --density."),
    ] = 60,
    sharpness: Annotated[
        float | None,
        typer.Option(metavar="RHO", help="SAM's sharpness at this radius."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of ascent steps for --sharpness.")] = 1,
    adaptive: Annotated[
        bool,
        typer.Option(
            "--adaptive", help="Scale perturbations by the weights, for both sharpness measures."
        ),
    ] = False,
    average: Annotated[
        float | None,
        typer.Option(
            metavar="SIGMA",
            help="Average sharpness under Gaussian noise of this standard deviation.",
        ),
    ] = None,
    mode: shared.Mode = "eval",
    precision: shared.Precision = "float32",
    seed: shared.Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            callback=check_output_folder, help="Folder for curvature.json and density plots."
        ),
    ] = None,
    data_dir: options.DataDir = None,
    download: options.Download = True,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Measure the curvature of a trained model's loss."""
    from wsam import curvature as measure
    from wsam.lab.loaded_model import load_model

    settings = shared.loss_options(mode, precision)
    if out is not None and density:
        import matplotlib  # noqa: F401 (if it is missing, the error comes before the measurement)
    config = options.make_config(data_dir, download, device=device)
    start = time.monotonic()
    found: dict[str, Any] = {}
    with shared.progress(quiet=as_json) as follow:
        loaded = load_model(
            checkpoint, config, data=data, model=model, split=split,
            samples=samples, batch_size=batch_size,
        )  # fmt: skip
        loss = (loaded.model, loaded.batches.loss, loaded.batches)
        H = getattr(measure, operator)(*loss, **settings)
        if top:
            found["eigenvalues"] = measure.top_eigenvalues(
                H, top, which=which, method=method, tol=tol, block=block,
                max_products=top_products, seed=seed, report=follow("eigenvalues"),
            )  # fmt: skip
        if trace:
            found["trace"] = measure.trace(
                H, tol=trace_tol, max_products=trace_products, seed=seed, report=follow("trace")
            )
        if density:
            found["density"] = measure.density(
                H, max_probes=density_probes, steps=density_steps, seed=seed,
                report=follow("density"),
            )  # fmt: skip
        settings |= {"adaptive": adaptive, "seed": seed}
        if sharpness is not None:
            found["sharpness"] = measure.sharpness(
                *loss, sharpness, steps=steps, report=follow("sharpness"), **settings
            )
        if average is not None:
            found["average_sharpness"] = measure.average_sharpness(
                *loss, average, report=follow("average sharpness"), **settings
            )
    record = {
        **shared.describe(loaded, seed, start),
        "accuracy": loaded.accuracy(),
        "info": H.info.as_dict(),
        **{name: result.as_dict() for name, result in found.items()},
    }
    files = _write(out, record, found) if out else []
    if as_json:
        print(json.dumps({**record, "files": [str(f) for f in files]}, allow_nan=False))
    else:
        _print_table(record, files)


def _write(out: Path, record: dict[str, Any], found: dict[str, Any]) -> list[Path]:
    """Write the record and the plots of the density, and return their paths."""
    from wsam.curvature import save_density

    names = ["curvature.json"]
    with staged(out) as staging:
        numbers = json.dumps(record, allow_nan=False)
        (staging / names[0]).write_text(numbers, encoding="utf-8")
        if "density" in found:
            marks = found["eigenvalues"].values.tolist() if "eigenvalues" in found else []
            names += ["density.png", "density.html"]
            for name in names[1:]:
                save_density(found["density"], staging / name, marks)
    return [out / name for name in names]


def _print_table(record: dict[str, Any], files: list[Path]) -> None:
    from wsam.curvature.operator import TITLES

    info = record["info"]
    rounded = " with TF32" if info["tf32"] else ""
    print(record["title"])
    print(
        f"{TITLES[info['kind']]} of {info['parameters']:,} weights on {info['samples']:,} "
        f"{record['split']} samples, {info['mode']} mode, {info['dtype']}{rounded}, {info['device']}"
    )
    print(f"labels {record['labels']}")
    rows = [("loss", f"{info['loss']:.6g}", "")]
    if record["accuracy"] is not None:
        rows.append(("accuracy", f"{record['accuracy']:.4f}", ""))
    if eigen := record.get("eigenvalues"):
        columns = (eigen["values"], eigen["residuals"], eigen["converged"])
        for number, (value, bound, good) in enumerate(zip(*columns, strict=True), 1):
            note = f"error at most {bound:.1e}" + _not_converged(good, "--tol or --top-products")
            rows.append((f"eigenvalue {number}", f"{value:.6g}", note))
    if found := record.get("trace"):
        error = found["standard_error"]
        note = "standard error " + ("unknown" if error is None else f"{error:.2g}")
        note += _not_converged(found["converged"], "--trace-products or --trace-tol")
        rows.append(("trace", f"{found['value']:.6g}", note))
    if found := record.get("density"):
        rows += _density_rows(found)
    for name in ("sharpness", "average_sharpness"):
        if found := record.get(name):
            note = f"{found['measure']}, radius {found['radius']:g}"
            value = "not finite" if found["value"] is None else f"{found['value']:.6g}"
            rows.append((name.replace("_", " "), value, note))
    for line in align_columns(rows, left=(0, 2)):
        print(f"  {line}")
    for file in files:
        print(file)


def _density_rows(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the rows of a spectral density: fractions of eigenvalues, with their bounds."""
    if found["semidefinite"]:
        return [("below zero", "0.0%", "of the eigenvalues: positive semi-definite by definition")]
    probes = pluralize(found["probes"], "probe")
    rows = []
    for name, share in (
        ("below zero", found["below_zero"]),
        (f"below {-found['sigma']:.3g}", found["below_minus_sigma"]),
    ):
        low, high = (f"{100 * share[end]:.1f}%" for end in ("low", "high"))
        note = f"of the eigenvalues, standard error {100 * share['standard_error']:.1f}%"
        note += f", {probes} of {found['steps']} steps"
        note += _not_converged(found["converged"], "--density-probes or --density-steps")
        rows.append((name, low if low == high else f"{low} to {high}", note))
    return rows


def _not_converged(converged: bool, options: str) -> str:
    """Return a note on the options to raise if a value has not converged."""
    return "" if converged else f", not converged: raise {options}"
