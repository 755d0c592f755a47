"""The demonstration's pictures, in the house's style."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wsam._format import format_mean_std, mean_and_std
from wsam.demo.choice import Choice
from wsam.demo.setting import SAM, TUNED, WSAM, contenders
from wsam.demo.summary import Row, Summary
from wsam.plot_style import COLORS, MUTED_COLOR, RC_PARAMS, TEXT_COLOR, new_figure, save_figure
from wsam.report.heat import is_light, shade, shares
from wsam.report.slices import mean_slice

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CURVES = {
    "test_error": "test error (%)",
    "train_loss": "training loss",
    "sharpness": "sharpness in training, each at its own ρ",
}

_GONE = (237, 237, 237)
"""Where training broke down."""


def write_all(summary: Summary, choice: Choice, out: Path) -> list[Path]:
    """Draw everything into a folder, as PNG and SVG; return the paths."""
    from matplotlib import rc_context

    drawings: dict[str, Callable[[], Figure]] = {
        "curves": lambda: curves(summary),
        "errors": lambda: errors(summary),
        "landscape": lambda: landscape(summary),
        "map": lambda: gamma_rho(choice),
    }
    written = []
    for name, draw in drawings.items():
        with rc_context(RC_PARAMS):
            written += save_figure(draw(), out, name)
    return written


def _stroke(row: Row) -> dict[str, Any]:
    mine = row.contender
    return {"color": COLORS[mine.run.method], "linestyle": "--" if mine.name == TUNED else "-"}


def _with_radius(row: Row) -> str:
    """Return a row's name and, where it has one, the radius that its sharpness is taken at."""
    radius = row.contender.run.hyper.get("rho")
    return row.contender.name if radius is None else f"{row.contender.name}, ρ {radius:g}"


def _band(panel: Axes, row: Row, x: Sequence[float], rows: Sequence[Sequence[float]]) -> None:
    """Draw a mean with a deviation around it."""
    pairs = [mean_and_std(list(values)) for values in rows]
    means = [mean or 0.0 for mean, _ in pairs]
    spreads = [deviation or 0.0 for _, deviation in pairs]
    low = [m - s for m, s in zip(means, spreads, strict=True)]
    high = [m + s for m, s in zip(means, spreads, strict=True)]
    stroke = _stroke(row)
    panel.plot(x, means, linewidth=1.8, label=_with_radius(row), **stroke)
    panel.fill_between(x, low, high, color=stroke["color"], alpha=0.15, linewidth=0)


def curves(summary: Summary) -> Figure:
    """Draw test error, training loss and sharpness over the epochs."""
    drawn = new_figure(12.0, 3.9)
    panels = drawn.subplots(1, len(_CURVES))
    for panel, (name, label) in zip(panels, _CURVES.items(), strict=True):
        for row in summary.rows.values():
            found = [result.record["curve"] for result in row.group.finished]
            if found[0][-1][name] is None:
                continue
            epochs = [epoch["epoch"] for epoch in found[0]]
            _band(panel, row, epochs, [[e[name] for e in es] for es in zip(*found, strict=True)])
        panel.set_title(label, loc="left")
        panel.set(xlabel="epoch", ylim=(0, None))
        panel.grid(axis="y", color="#eceef1")
    panels[0].set_ylim(0, 50)
    handles, labels = panels[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return drawn


def errors(summary: Summary) -> Figure:
    """Draw the final test errors and the top eigenvalues, with deviations and single runs."""
    drawn = new_figure(9.6, 3.2)
    panels = drawn.subplots(1, 2, sharey=True)
    names = list(summary.rows)
    columns = (("test error (%)", "test_error"), ("top eigenvalue of the Hessian", "eigenvalues"))
    for panel, (label, what) in zip(panels, columns, strict=True):
        for at, row in enumerate(summary.rows.values()):
            group, color = row.group, _stroke(row)["color"]
            values = group.values(what) if what == "test_error" else group.eigenvalues
            mean, deviation = mean_and_std(values)
            assert mean is not None
            panel.plot(values, [at] * len(values), "o", color=color, alpha=0.35, markersize=4)
            style: dict[str, Any] = {"fmt": "o", "capsize": 4, "markersize": 8, "color": color}
            panel.errorbar(mean, at, xerr=deviation, **style)
            text = format_mean_std(mean, deviation, "{:.1f}".format)
            end = (mean + (deviation or 0.0), at)
            offset: dict[str, Any] = {"xytext": (9, 0), "textcoords": "offset points"}
            panel.annotate(text, end, va="center", fontsize=9, color=TEXT_COLOR, **offset)
        panel.set_xlabel(label)
        panel.set(xlim=(0, panel.get_xlim()[1] * 1.28), ylim=(len(names) - 0.5, -0.7))
        panel.grid(axis="x", color="#eceef1")
        panel.tick_params(axis="y", length=0)
    panels[0].set_yticks(range(len(names)), names)
    seeds = ", ".join(map(str, summary.seeds))
    several = len(summary.seeds) > 1
    panels[0].set_title(
        f"Mean and deviation, seeds {seeds}" if several else f"Seed {seeds} alone", loc="left"
    )
    return drawn


def landscape(summary: Summary) -> Figure:
    """Draw the training loss along a random direction through each minimum."""
    drawn = new_figure(7.2, 4.2)
    panel = drawn.subplots()
    for row in summary.rows.values():
        points = mean_slice(row.group)
        x, middle = [p[0] for p in points], [p[1] or 0.0 for p in points]
        stroke = _stroke(row)
        panel.plot(x, middle, linewidth=1.8, label=row.contender.name, **stroke)
        low, high = [p[2] for p in points], [p[3] for p in points]
        panel.fill_between(x, low, high, color=stroke["color"], alpha=0.15, linewidth=0)
    panel.set(xlabel="distance along a filter-normalised random direction", ylim=(0, None))
    panel.set_title("Training loss around the minima (wrong labels included)", loc="left")
    panel.grid(axis="y", color="#eceef1")
    panel.legend(loc="upper center")
    return drawn


def gamma_rho(choice: Choice) -> Figure:
    """Draw the map of WSAM's test error over gamma and rho, and the looks at SAM and SGD."""
    drawn = new_figure(9.6, 4.6)
    grid, side = drawn.subplots(1, 2, width_ratios=(1.7, 1))
    _heat(grid, choice)
    for name, axis, color in ((SAM, "rho", "sam"), (TUNED, "lr", "sgd")):
        places = choice.places[name]
        x, y = [p.point[axis] for p in places], [p.mean for p in places]
        label = "SAM over ρ" if name == SAM else "SGD over its lr, twice the epochs"
        side.plot(x, y, "o-", color=COLORS[color], label=label, markersize=5)
    lowest = choice.best(WSAM).mean or 0.0
    side.axhline(lowest, color=COLORS["wsam"], linewidth=1, linestyle=":")
    side.annotate(
        "WSAM as chosen",
        (0.0, lowest),
        (4, 4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        color=COLORS["wsam"],
        fontsize=9,
    )
    side.set(xscale="log", xlabel="ρ or lr", ylim=(0, None))
    side.set_title("The same look at SAM and SGD", loc="left")
    side.legend(fontsize=9)
    return drawn


def _heat(panel: Axes, choice: Choice) -> None:
    from matplotlib.patches import Rectangle

    places = choice.places[WSAM]
    gammas = sorted({p.point["gamma"] for p in places})
    radii = sorted({p.point["rho"] for p in places})
    share = shares([p.mean for p in places if p.mean is not None])
    chosen = contenders()[WSAM].run.hyper
    for place in places:
        x, y = radii.index(place.point["rho"]), gammas.index(place.point["gamma"])
        tone = _GONE if place.mean is None else shade(share[place.mean])
        mine = all(chosen[name] == value for name, value in place.point.items())
        edge: dict[str, Any] = {
            "edgecolor": TEXT_COLOR if mine else "white",
            "linewidth": 2.5 if mine else 1,
        }
        panel.add_patch(
            Rectangle(
                (x - 0.48, y - 0.46), 0.96, 0.92, facecolor=_rgb(tone), zorder=2 + mine, **edge
            )
        )
        text = place.failures.replace(" ", "\n") if place.mean is None else f"{place.mean:.1f}"
        ink = TEXT_COLOR if is_light(tone) else "white"
        panel.text(x, y, text, ha="center", va="center", color=ink, fontsize=10, zorder=4)
    panel.set_xticks(range(len(radii)), [f"{value:g}" for value in radii])
    panel.set_yticks(range(len(gammas)), [f"{value:g}" for value in gammas])
    panel.set(xlim=(-0.55, len(radii) - 0.45), ylim=(-0.55, len(gammas) - 0.45))
    panel.set(xlabel="ρ", ylabel="γ")
    panel.tick_params(length=0)
    for spine in panel.spines.values():
        spine.set_visible(False)
    seeds = ", ".join(map(str, choice.facts["seeds"]))
    panel.set_title(f"WSAM's test error (%), mean of seeds {seeds}", loc="left", color=TEXT_COLOR)
    panel.yaxis.label.set_color(MUTED_COLOR)


def _rgb(color: tuple[int, int, int]) -> tuple[float, float, float]:
    """Return a colour as matplotlib takes it."""
    red, green, blue = color
    return red / 255, green / 255, blue / 255
