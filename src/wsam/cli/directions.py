"""`wsam directions`: how gamma changes the direction of the update."""

import json
from pathlib import Path
from typing import Annotated

import typer

from wsam._utils.text import json_safe
from wsam.cli import _options as options
from wsam.cli._app import app
from wsam.cli._files import check_output_folder, staged

_EXAMPLE = "Example: wsam directions --gamma 0 --gamma 0.5 --gamma 0.8 --out figures"


@app.command(epilog=_EXAMPLE)
def directions(
    gamma: Annotated[
        list[float] | None,
        typer.Option(
            help="Weight of the sharpness term, in [0, 1). Repeatable. [default: five, 0 to 0.75]",
        ),
    ] = None,
    rho: Annotated[float, typer.Option(help="Radius, positive.")] = 4.0,
    out: Annotated[
        Path | None,
        typer.Option(callback=check_output_folder, help="Folder for the figure (PNG, SVG)."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show how gamma changes the update direction.

    The update is g0 at gamma 0 and g1 at gamma 1/2; above that it turns beyond g1.
    """
    from wsam.toy import updates

    fan = updates(sorted(set(gamma)) if gamma else (0.0, 0.3, 0.5, 0.65, 0.75), rho=rho)
    files: list[Path] = []
    if out:
        from wsam._utils.plot_style import save_figure
        from wsam.toy.plot_updates import plot_updates

        with staged(out) as staging:
            files = [
                out / path.name for path in save_figure(plot_updates(fan), staging, "directions")
            ]
    if as_json:
        rows = [
            {"gamma": g, "update": update, "angle": fan.angle(g)}
            for g, update in fan.by_gamma.items()
        ]
        record = {"point": fan.point, "rho": fan.rho, "g0": fan.first, "g1": fan.second}
        found = {**record, "updates": rows, "files": [str(p) for p in files]}
        print(json.dumps(json_safe(found), indent=2, allow_nan=False))
        return
    print(f"toy loss at {fan.point}, rho {fan.rho:g}")
    print(f"g0 = ({fan.first[0]:.5f}, {fan.first[1]:.5f})")
    print(f"g1 = ({fan.second[0]:.5f}, {fan.second[1]:.5f})")
    for g, (x, y) in fan.by_gamma.items():
        print(f"gamma {g:<5g} update ({x:.5f}, {y:.5f}), {fan.angle(g):.1f} degrees from g0")
    for path in files:
        print(f"wrote {path}")
