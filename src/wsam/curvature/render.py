"""Pictures of landscapes and densities, and a page of its own for each that needs no network."""

from __future__ import annotations

import html
import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wsam.curvature.operator import TITLES
from wsam.plot_style import MUTED_COLOR, RC_PARAMS, TEXT_COLOR

if TYPE_CHECKING:
    from wsam.curvature.quadrature import Density
    from wsam.curvature.slices import Landscape

__all__ = ["PICTURES", "save_density", "save_landscape"]

PICTURES = (".png", ".svg", ".pdf")
_KINDS = (*PICTURES, ".html", ".json")
_UNDATED: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
_CURVE, _MARK, _GAP = "#2a6fb0", "#c0392b", "#d5dae1"  # the page's, in its light scheme
_NO_LOSS = "no finite loss"


def save_landscape(found: Landscape, path: str | Path, log: bool | None = None) -> None:
    """Write a landscape as a picture, an interactive page (`.html`) or its numbers (`.json`).

    Args:
        found: a line or a surface.
        path: its suffix says which: .png, .svg, .pdf, .html or .json; its folder is made.
        log: logarithmic loss; default where the losses span more than a factor of 30.
    """
    path = _target(path)
    if path.suffix.lower() == ".json":
        _write_text(path, json.dumps(found.as_dict(), allow_nan=False))
        return
    values = _finite(found)
    if not values:
        raise ValueError("no loss of this landscape is finite: there is nothing to draw")
    logarithmic = min(values) > 0 and max(values) > 30 * min(values) if log is None else log
    if logarithmic and min(values) <= 0:
        raise ValueError("a logarithmic loss needs losses above zero")
    title = "Loss along " + " and ".join(found.labels)
    note = "\n".join(filter(None, (_note(found.info), found.note)))
    if path.suffix.lower() == ".html":
        page = {
            "surface": found.dimensions == 2,
            "x": found.coordinates[0],
            "x2": found.coordinates[-1],
            "y": found.as_dict()["losses"],
            "labels": found.labels,
            "value": "loss",
            "log": logarithmic,
            "marks": [0.0] if found.dimensions == 1 else [],
            "legend": "Dotted: origin." + (f" A cross: {_NO_LOSS}." if _has_gaps(found) else ""),
        }
        _write_page(path, title, note, page)
        return
    with _picture(path, title, note) as (figure, axes):
        if found.dimensions == 1:
            _draw_line(axes, found, logarithmic)
        else:
            _draw_surface(figure, axes, found, values, logarithmic)


def save_density(found: Density, path: str | Path, marks: Sequence[float] | None = None) -> None:
    """Write a spectral density as a picture, an interactive page (`.html`) or numbers (`.json`).

    Args:
        found: the density.
        path: its suffix says which: .png, .svg, .pdf, .html or .json; its folder is made.
        marks: eigenvalues to point out in a picture or on a page.
    """
    path = _target(path)
    info = found.info.as_dict() if found.info else {}
    if path.suffix.lower() == ".json":
        _write_text(path, json.dumps({"info": info, **found.as_dict()}, allow_nan=False))
        return
    pointed_out = [float(mark) for mark in (() if marks is None else marks)]
    title = f"Density of the eigenvalues of the {TITLES.get(info.get('kind', ''), 'operator')}"
    if path.suffix.lower() == ".html":
        band = "Band: within two standard errors. " if _has_errors(found) else ""
        page = {
            "surface": False,
            "x": found.grid.tolist(),
            "y": _drawn_values(found),
            "error": found.standard_error.tolist() if band else None,
            "labels": ["eigenvalue"],
            "value": "density",
            "log": True,
            "marks": pointed_out,
            "legend": band + (f"Dotted: {_marks_label(pointed_out)}." if pointed_out else ""),
        }
        _write_page(path, title, _note(info), page)
        return
    with _picture(path, title, _note(info)) as (_, axes):
        _draw_density(axes, found, pointed_out)


def _target(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix.lower() not in _KINDS:
        raise ValueError(f"cannot write {path.name!r}: the name must end in {', '.join(_KINDS)}")
    return path


def _finite(found: Landscape) -> list[float]:
    return [value for value in _flat(found) if math.isfinite(value)]


def _has_gaps(found: Landscape) -> bool:
    return not all(map(math.isfinite, _flat(found)))


def _flat(found: Landscape) -> list[float]:
    rows = found.losses if found.dimensions == 2 else [found.losses]
    return [value for row in rows for value in row]


def _has_errors(found: Density) -> bool:
    return len(found.nodes) > 1


def _drawn_values(found: Density) -> list[float]:
    """Return the density without the far ends of its Gaussians.

    They would stretch a logarithmic axis by many decades.
    """
    values: list[float] = found.values.tolist()
    least = _least(values)
    return [max(value, least) for value in values]


def _least(values: Sequence[float]) -> float:
    return 1e-8 * max(values)


def _marks_label(marks: Sequence[float]) -> str:
    if len(marks) > 4:
        return f"{len(marks)} eigenvalues from {min(marks):.4g} to {max(marks):.4g}"
    return f"eigenvalue{'s' if len(marks) > 1 else ''} " + ", ".join(f"{m:.4g}" for m in marks)


@contextmanager
def _picture(path: Path, title: str, note: str) -> Iterator[tuple[Any, Any]]:
    """Yield a figure in the look of all the others, and its axes; write it once they are drawn."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError(
            "pictures need matplotlib: pip install 'wsam[plots]', or write .html"
        ) from error
    with rc_context(RC_PARAMS):
        figure = Figure(figsize=(7.2, 4.8), layout="constrained")
        axes = figure.subplots()
        yield figure, axes
        heading = textwrap.fill(title, 78)
        figure.suptitle(heading, x=0.01, ha="left", fontsize=11, color=TEXT_COLOR)
        axes.set_title(note, loc="left", fontsize=9, color=MUTED_COLOR)
        figure.legend(loc="outside lower left", ncols=2, fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata=_UNDATED.get(path.suffix.lower()))


def _draw_line(axes: Any, found: Landscape, logarithmic: bool) -> None:
    where = found.coordinates[0]
    axes.axvline(0, color=_MARK, linewidth=1, linestyle=":", label="origin")
    axes.plot(where, found.losses, color=_CURVE, linewidth=1.8)
    gaps = [x for x, loss in zip(where, found.losses, strict=True) if not math.isfinite(loss)]
    if gaps:
        along_the_foot = axes.get_xaxis_transform()
        axes.plot(
            gaps,
            [0.02] * len(gaps),
            "x",
            color=MUTED_COLOR,
            transform=along_the_foot,
            label=_NO_LOSS,
        )
    axes.set(xlabel=found.labels[0], ylabel="loss")
    if logarithmic:
        axes.set_yscale("log")


def _draw_density(axes: Any, found: Density, marks: Sequence[float]) -> None:
    grid, values = found.grid.tolist(), _drawn_values(found)
    least = _least(values)
    smoothed = f"density, smoothed by a Gaussian of width {found.sigma:.2g}"
    axes.semilogy(grid, values, color=_CURVE, linewidth=1.8, label=smoothed)
    if _has_errors(found):
        pairs = list(zip(found.values.tolist(), found.standard_error.tolist(), strict=True))
        ends = [[max(v + side * 2 * error, least) for v, error in pairs] for side in (-1, 1)]
        band = "within two standard errors"
        axes.fill_between(grid, *ends, color=_CURVE, alpha=0.2, linewidth=0, label=band)
    for number, mark in enumerate(marks):
        label = None if number else _marks_label(marks)  # once in the legend
        axes.axvline(mark, color=_MARK, linewidth=1, linestyle=":", label=label)
    axes.set(xlabel="eigenvalue", ylabel="density", ylim=(least, None))


def _draw_surface(
    figure: Any, axes: Any, found: Landscape, values: list[float], logarithmic: bool
) -> None:
    from matplotlib.colors import LogNorm, Normalize

    low, high = min(values), max(values)
    high = high if high > low else low + (abs(low) or 1.0) * 1e-6
    levels = 24
    if logarithmic:
        edges = [low * (high / low) ** (i / levels) for i in range(levels + 1)]
    else:
        edges = [low + (high - low) * i / levels for i in range(levels + 1)]
    # Rows are values of the first coordinate, which runs to the right: columns for matplotlib.
    turned = [
        [value if math.isfinite(value) else math.nan for value in column]
        for column in zip(*found.losses, strict=True)
    ]
    norm = LogNorm(low, high) if logarithmic else Normalize(low, high)
    filled = axes.contourf(*found.coordinates, turned, levels=edges, norm=norm)
    axes.contour(*found.coordinates, turned, levels=edges[::2], colors="white", linewidths=0.4)
    axes.plot(0, 0, "P", mfc="white", mec=TEXT_COLOR, ms=8, label="origin")
    if _has_gaps(found):
        axes.set_facecolor(_GAP)
        axes.plot([], [], "s", color=_GAP, ms=9, label=_NO_LOSS)
    axes.set(xlabel=found.labels[0], ylabel=found.labels[1])
    figure.colorbar(filled, ax=axes, label="loss", format="%.3g")


def _note(info: dict[str, Any]) -> str:
    """Say in one line what was measured: a picture without it cannot be compared."""
    if not info:
        return ""
    return (
        f"{info['parameters']:,} weights, {info['samples']:,} samples, {info['mode']} mode, "
        f"{info['dtype']}{' with TF32' if info['tf32'] else ''}, loss {info['loss']:.4g}"
    )


def _write_page(path: Path, title: str, note: str, page: dict[str, Any]) -> None:
    template = resources.files("wsam.curvature").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps({"title": title, "note": note, **page}, allow_nan=False)
    # Inside a script element nothing may look like its end, whatever a label holds.
    inert = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    filled = template.replace("__TITLE__", html.escape(title)).replace("__DATA__", inert)
    _write_text(path, filled)


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
