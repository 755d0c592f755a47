"""`wsam curvature`: eigenvalues, trace, density and sharpness of a trained model."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wsam.cli import _measuring as shared
from wsam.cli import _options as options
from wsam.cli._app import WithArguments, app
from wsam.cli._files import as_folder, together

if TYPE_CHECKING:
    from wsam.curvature import Operator
    from wsam.lab.subject import Subject

_EXAMPLE = (
    "Example: wsam curvature runs/KEY.json --data cifar10 --top 5 --trace --density --out seen"
)
# What an option is about: without it, it would be ignored.
_ABOUT = {
    **dict.fromkeys(("which", "method", "tol", "block", "top_products"), ("--top above 0",)),
    **dict.fromkeys(("trace_tol", "trace_products"), ("--trace",)),
    **dict.fromkeys(("density_probes", "density_steps"), ("--density",)),
    "steps": ("--sharpness",),
    "adaptive": ("--sharpness", "--average"),
}


@app.command(cls=WithArguments, epilog=_EXAMPLE)
def curvature(
    context: typer.Context,
    checkpoint: shared.Checkpoint,
    data: shared.Data = None,
    model: shared.Model = None,
    split: shared.Split = "train",
    samples: shared.Samples = 10_000,
    batch_size: shared.BatchSize = None,
    operator: Annotated[
        str, typer.Option(help="hessian, gauss_newton or empirical_fisher.")
    ] = "hessian",
    top: Annotated[
        int,
        typer.Option(
            min=0, metavar="<int>", help="How many eigenvalues at each wanted end; 0 for none."
        ),
    ] = 1,
    which: Annotated[str, typer.Option(help="largest, smallest or both.")] = "largest",
    method: Annotated[str, typer.Option(help="lanczos or power.")] = "lanczos",
    tol: Annotated[float, typer.Option(help="Relative residual of the eigenvalues.")] = 1e-3,
    block: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="<int>",
            help="Vectors Lanczos starts from: finds so many equal eigenvalues at once.",
        ),
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
    steps: Annotated[
        int, typer.Option(min=1, metavar="<int>", help="Ascent steps of --sharpness.")
    ] = 1,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="Scale both sharpness measures by the weights.")
    ] = False,
    average: Annotated[
        float | None,
        typer.Option(metavar="SIGMA", help="Average sharpness under Gaussian noise of this size."),
    ] = None,
    mode: shared.Mode = "eval",
    precision: shared.Precision = "float32",
    seed: shared.Seed = 0,
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
    _check_words(operator, which, method)
    _check_numbers({"--sharpness": sharpness, "--average": average, "--trace-tol": trace_tol}, tol)
    measures = {
        "--top above 0": top > 0, "--trace": trace, "--density": density,
        "--sharpness": sharpness is not None, "--average": average is not None,
    }  # fmt: skip
    _check_nothing_is_idle(context, measures)
    settings = shared.loss_options(mode, precision)
    if out is not None and density:
        shared.require_pictures()
    means = options.make_means(data_dir, download, device=device)
    begin = time.monotonic()
    with shared.progress(quiet=as_json) as follow:
        subject = shared.open_checkpoint(checkpoint, means, data, model, split, samples, batch_size)
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
        **shared.about(subject, seed, begin),
        "accuracy": subject.accuracy(),
        "info": H.info.as_dict(),
        **{name: result.as_dict() for name, result in found.items()},
    }
    files = _write(out, record, found) if out else []
    if as_json:
        print(json.dumps({**record, "files": [str(f) for f in files]}, allow_nan=False))
    else:
        _print_table(record, files)


def _check_words(operator: str, which: str, method: str) -> None:
    shared.one_of("--operator", operator, "hessian", "gauss_newton", "empirical_fisher")
    shared.one_of("--which", which, "largest", "smallest", "both")
    shared.one_of("--method", method, "lanczos", "power")


def _check_numbers(positive: dict[str, float | None], tol: float) -> None:
    for option, value in positive.items():
        shared.above_zero(option, value)
    if not 0 < tol < 1:
        raise ValueError(f"--tol must lie between 0 and 1, not {tol}")


def _check_nothing_is_idle(context: typer.Context, measures: dict[str, bool]) -> None:
    """Refuse an option whose measure is not asked for, and a command that measures nothing."""
    for name, owners in _ABOUT.items():
        if shared.is_given(context, name) and not any(measures[owner] for owner in owners):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} needs {' or '.join(owners)}: alone it changes nothing")
    if not any(measures.values()):
        raise ValueError(f"nothing to measure: give one of {', '.join(measures)}")


def _operator(name: str, subject: Subject, settings: Any) -> Operator:
    from wsam.curvature import empirical_fisher, gauss_newton, hessian

    builders = {f.__name__: f for f in (hessian, gauss_newton, empirical_fisher)}
    return builders[name](subject.model, shared.cross_entropy(), subject.batches, **settings)


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

    about = (subject.model, shared.cross_entropy(), subject.batches)
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
    from wsam.curvature.operator import TITLES

    info = record["info"]
    rounded = " with TF32" if info["tf32"] else ""
    print(record["title"])
    print(
        f"{TITLES[info['kind']]} of {info['parameters']:,} weights on {info['samples']:,} "
        f"{record['split']} images, {info['mode']} mode, {info['dtype']}{rounded}, {info['device']}"
    )
    print(f"labels {record['labels']}")
    rows = [("loss", f"{info['loss']:.6g}", ""), ("accuracy", f"{record['accuracy']:.4f}", "")]
    if eigen := record.get("eigenvalues"):
        columns = (eigen["values"], eigen["residuals"], eigen["converged"])
        for number, (value, bound, good) in enumerate(zip(*columns, strict=True), 1):
            note = f"true to within {bound:.1e}" + _unless(good, "--tol or --top-products")
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
