"""`wsam bounds`: the paper's bounds, as printed and as corrected."""

import json
from dataclasses import asdict, fields
from typing import Annotated, Any, Literal

import typer

from wsam.cli import _options as options
from wsam.cli._app import app

bounds = typer.Typer(
    name="bounds",
    help="The paper's bounds, as printed and as corrected.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="Example: wsam bounds convex --lr 5 --gamma 0.9 --steps 1000",
)
app.add_typer(bounds)

Gamma = Annotated[float, typer.Option(help="Weight of the sharpness term, in [0, 1).")]
Rho = Annotated[float, typer.Option(help="Largest radius, positive.")]
LR = Annotated[float, typer.Option(help="Step size at t = 1, positive; it decays as 1/sqrt(t).")]
Parameters = Annotated[int, typer.Option("--parameters", "-n", help="Number of weights.")]
Gradient = Annotated[float, typer.Option(help="G, the largest entry of any gradient.")]
Steps = Annotated[int, typer.Option("--steps", "-T", help="Number of steps, at least 2.")]
Radius = Annotated[
    Literal["falling", "constant"], typer.Option(help="falling: the radius is rho/sqrt(t).")
]


@bounds.command(epilog="Example: wsam bounds convex --gamma 0 --lr 5 --distance 2.5 -T 2")
def convex(
    *,
    gamma: Gamma = 0.9,
    lr: LR = 0.1,
    rho: Rho = 0.05,
    smoothness: Annotated[float, typer.Option(help="eta of every loss l_t.")] = 1.0,
    parameters: Parameters = 1,
    gradient: Gradient = 1.0,
    distance: Annotated[float, typer.Option(help="D, the largest entry of any w_t - w*.")] = 1.0,
    steps: Steps = 1000,
    radius: Radius = "falling",
    as_json: options.Json = False,
) -> None:
    """Bound the regret on convex losses."""
    from wsam.theory import Convex

    bound = _make(Convex, locals())
    _show(_convergence(bound, steps, radius, "regret over T steps", "mean regret"), as_json)


@bounds.command(epilog="Example: wsam bounds nonconvex --gamma 0.88 --lr 0.05 --rho 0.2 -T 100000")
def nonconvex(
    *,
    gamma: Gamma = 0.9,
    lr: LR = 0.1,
    rho: Rho = 0.05,
    smoothness: Annotated[
        float, typer.Option(help="eta of every batch's loss (as printed: of L alone).")
    ] = 1.0,
    parameters: Parameters = 1,
    gradient: Gradient = 1.0,
    start_loss: Annotated[float, typer.Option(help="L at the start.")] = 1.0,
    lowest_loss: Annotated[float, typer.Option(help="A lower bound of L.")] = 0.0,
    steps: Steps = 1000,
    radius: Radius = "falling",
    as_json: options.Json = False,
) -> None:
    """Bound the gradient norm on smooth losses.

    The bound holds for the smallest expected squared norm over all steps.
    """
    from wsam.theory import NonConvex

    bound = _make(NonConvex, locals())
    _show(
        _convergence(bound, steps, radius, "smallest E|grad L|^2 over T steps", "E|grad L|^2"),
        as_json,
    )


@bounds.command(
    epilog="Example: wsam bounds generalization --gamma 0.8 -n 10 --dimension 11 -m 1000000000"
)
def generalization(
    *,
    gamma: Gamma = 0.9,
    rho: Rho = 0.05,
    samples: Annotated[int, typer.Option("--samples", "-m", help="Training samples.")] = 50_000,
    parameters: Parameters = 100,
    dimension: Annotated[int, typer.Option(help="VC dimension, at most the samples.")] = 100,
    delta: Annotated[float, typer.Option(help="Probability of failure, in (0, 1).")] = 0.05,
    norm: Annotated[float, typer.Option(help="Euclidean norm of the weights.")] = 1.0,
    as_json: options.Json = False,
) -> None:
    """Bound the true error by the training loss.

    The bound holds for the difference of the true 0-1 error and L_WSAM on the training set.
    """
    from wsam.theory import Generalization

    bound = _make(Generalization, locals())
    _show(
        {
            **_head(bound, "excess of the true error over L_WSAM"),
            "schedules": "rho is constant; the bound diverges as rho goes to zero",
            "bound": {form: bound.gap(form) for form in bound.forms},
            "vacuous": bound.gap() >= 1,
        },
        as_json,
    )


def _make(kind: Any, options: dict[str, Any]) -> Any:
    """Return a bound, given options that are named like its fields."""
    return kind(**{field.name: options[field.name] for field in fields(kind)})


def _head(bound: Any, what: str) -> dict[str, Any]:
    """Return the entries that the JSON of every bound has."""
    constants = {form: bound.constants(form) for form in bound.forms}
    return {"what": what, "setting": asdict(bound), "constants": constants, "why": bound.why}


def _convergence(bound: Any, steps: int, radius: str, what: str, floor_of: str) -> dict[str, Any]:
    """Return a bound that decreases with the number of steps as JSON data."""
    falling = radius == "falling"
    at_steps = bound.corollary if falling else bound.constant_radius
    rho = "rho_t = rho/sqrt(t)" if falling else "rho_t = rho"
    return {
        **_head(bound, what),
        "T": steps,
        "schedules": f"lr_t = lr/sqrt(t), {rho}",
        "bound": {form: at_steps(steps, form) for form in bound.forms},
        "floor": 0.0 if falling else bound.floor(),
        "floor_of": floor_of,
        "tight": bound.sharper,
    }


def _show(record: dict[str, Any], as_json: bool) -> None:
    """Print a bound as JSON or as a table."""
    try:
        text = json.dumps(record, indent=2, allow_nan=False)
    except ValueError as error:
        raise OverflowError("the bound is not finite") from error
    if as_json:
        print(text)
        return
    from rich.console import Console
    from rich.table import Table

    names = list(record["constants"]["corrected"])
    table = Table(title=f"{record['what']} (at most)", title_justify="left")
    for name in ("form", "bound", *names):
        table.add_column(name, justify="left" if name == "form" else "right")
    for form, value in record["bound"].items():
        constants = record["constants"][form]
        table.add_row(form, f"{value:.6g}", *(f"{constants[name]:.6g}" for name in names))
    Console().print(table)
    print(f"assumes: {record['schedules']}")
    if record.get("floor"):
        floor, what = record["floor"], record["floor_of"]
        print(f"a constant radius leaves a floor of {floor:.6g} for the {what}, for any T")
    if record.get("vacuous"):
        print("the bound is vacuous: an error rate is at most 1")
    print(f"corrected: {record['why']}")
    if "tight" in record:
        print(f"tight: {record['tight']}")
