"""`wsam toy`: the paper's two-dimensional example."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from wsam._utils.text import json_safe
from wsam.cli import _options as options
from wsam.cli._app import app
from wsam.cli._files import check_output_folder, staged

_EXAMPLE = "Example: wsam toy --gamma 0.6 --gamma 0.95 --out toy"


@app.command(epilog=_EXAMPLE)
def toy(
    gamma: Annotated[
        list[float] | None,
        typer.Option(
            help="Weight of the sharpness term, in [0, 1). Repeatable. [default: 0.6 and 0.95]",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            callback=check_output_folder,
            help="Folder for the figure (PNG, SVG) and the page (HTML).",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show which minimum of a toy loss each method finds.

    Runs SAM, GSAM, WSAM and Coupled-WSAM on a loss with a sharp and a flat minimum.
    """
    from wsam.toy import trace

    gammas = sorted(set(gamma)) if gamma else [0.6, 0.95]
    runs = [trace(rule="sam"), trace(rule="gsam")]
    runs += [trace(rule=rule, gamma=g) for g in gammas for rule in ("wsam", "coupled_wsam")]
    files = _write(runs, out) if out else []
    if as_json:
        _print_json(runs, files)
    else:
        _print_table(runs, files)


def _write(runs: list[Any], out: Path) -> list[Path]:
    """Write the figure and the page, and return their paths."""
    from wsam._utils.plot_style import save_figure
    from wsam.toy.page import toy_page
    from wsam.toy.plot_trajectories import plot_trajectories

    with staged(out) as staging:
        written = save_figure(plot_trajectories(runs), staging, "toy")
        page = staging / "toy.html"
        page.write_text(toy_page(), encoding="utf-8")
    return [out / path.name for path in (*written, page)]


def _record(run: Any) -> dict[str, Any]:
    """Return a trajectory as JSON data."""
    weighted = "wsam" in run.setting.rule
    return {
        "rule": run.setting.rule,
        "gamma": run.setting.gamma if weighted else None,
        "end": run.end,
        "loss": run.loss,
        "minimum": run.minimum,
        "eigenvalues": run.eigenvalues,
        "spread": run.spread,
    }


def _print_json(runs: list[Any], files: list[Path]) -> None:
    from wsam.toy import Setting, places

    common = asdict(Setting())
    for own in ("rule", "gamma"):
        del common[own]
    record = {
        "setting": common,
        "places": [asdict(place) for place in places()],
        "runs": [_record(run) for run in runs],
        "files": [str(path) for path in files],
    }
    print(json.dumps(json_safe(record), indent=2, allow_nan=False))


def _print_table(runs: list[Any], files: list[Path]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from wsam.toy import RULES, Setting, places
    from wsam.toy.stable_digits import thousandths

    setting = Setting()
    ends = Table(title="Where each rule ends", title_justify="left", box=SIMPLE_HEAD)
    for name in ("rule", "γ", "end point", "loss", "minimum", "Hessian ×10³"):
        ends.add_column(name, justify="right" if name in {"γ", "loss"} else "left")
    for run in runs:
        gamma = f"{run.setting.gamma:g}" if "wsam" in run.setting.rule else ""
        where = run.minimum or "neither"
        row = (RULES[run.setting.rule], gamma, run.end_text, run.loss_text, where)
        ends.add_row(*row, run.eigenvalues_text)
    still = Table(title="Where the loss is stationary", title_justify="left", box=SIMPLE_HEAD)
    for name in ("", "point", "loss", "Hessian ×10³"):
        still.add_column(name)
    for place in places():
        mu, sigma = place.point
        point, value = f"({mu:.3f}, {sigma:.3f})", f"{place.loss:.5f}"
        still.add_row(place.name, point, value, ", ".join(map(thousandths, place.eigenvalues)))
    console = Console()
    print(
        f"start {setting.start}, rho {setting.rho:g}, lr {setting.lr:g}, "
        f"momentum {setting.momentum:g}, {setting.steps} steps, GSAM's alpha {setting.alpha:g}"
    )
    console.print(ends)
    console.print(still)
    _print_remarks(runs, files)


def _print_remarks(runs: list[Any], files: list[Path]) -> None:
    """Print what the tables show, and the written files."""
    from wsam.toy.trajectory import verdict

    print("Hessian: eigenvalues at the end point; small where the loss is flat.")
    for gamma in sorted({run.setting.gamma for run in runs if "wsam" in run.setting.rule}):
        mine = [r for r in runs if "wsam" in r.setting.rule and r.setting.gamma == gamma]
        print(f"gamma {gamma:g}: {verdict(mine)}.")
    if any(run.chaotic for run in runs):
        print("±: the run is chaotic; a change of the start by 1e-12 moves the end point that far.")
        print("Loss and eigenvalues are shown to the digits that do not change.")
    for path in files:
        print(f"wrote {path}")
