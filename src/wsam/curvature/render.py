"""Pictures of landscapes and densities, and a page of its own for each that needs no network."""

from __future__ import annotations

import html
import json
import math
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wsam.curvature.quadrature import Density
    from wsam.curvature.slices import Landscape

__all__ = ["PICTURES", "save_density", "save_landscape"]

PICTURES = (".png", ".svg", ".pdf")


def save_landscape(found: Landscape, path: Path, log: bool | None = None) -> None:
    """Write a landscape as a picture or, for `.html`, as an interactive page.

    Args:
        found: a line or a surface.
        path: its suffix says which: .png, .svg, .pdf or .html.
        log: logarithmic loss; default where the losses span more than a factor of 30.
    """
    rows = found.losses if found.dimensions == 2 else [found.losses]
    values = [value for row in rows for value in row if math.isfinite(value)]
    if not values:
        raise ValueError("no loss of this landscape is finite: there is nothing to draw")
    logarithmic = min(values) > 0 and max(values) > 30 * min(values) if log is None else log
    if logarithmic and min(values) <= 0:
        raise ValueError("a logarithmic loss needs losses above zero")
    title = "Loss along " + " and ".join(found.labels)
    if path.suffix == ".html":
        page = {
            "surface": found.dimensions == 2,
            "x": found.coordinates[0],
            "x2": found.coordinates[-1],
            "y": found.as_dict()["losses"],
            "labels": found.labels,
            "value": "loss",
            "log": logarithmic,
            "marks": [0.0] if found.dimensions == 1 else [],
        }
        _write_page(path, title, _note(found.info), page)
        return
    figure, axes = _figure(path)
    if found.dimensions == 1:
        axes.axvline(0, color="0.7", linewidth=1)
        axes.plot(found.coordinates[0], found.losses)
        axes.set(xlabel=found.labels[0], ylabel="loss")
        if logarithmic:
            axes.set_yscale("log")
    else:
        _draw_surface(figure, axes, found, values, logarithmic)
    _finish(figure, axes, title, found.info, path)


def save_density(found: Density, path: Path, marks: list[float] | None = None) -> None:
    """Write a spectral density as a picture or, for `.html`, as an interactive page.

    Args:
        found: the density.
        path: its suffix says which: .png, .svg, .pdf or .html.
        marks: eigenvalues to point out.
    """
    info = found.info.as_dict() if found.info else {}
    grid, values = found.grid.tolist(), found.values.tolist()
    # The far ends of the Gaussians would stretch a logarithmic axis by many decades.
    least = 1e-8 * max(values)
    title = f"Density of the eigenvalues of the {info.get('kind', 'operator')}".replace("_", "-")
    if path.suffix == ".html":
        several = len(found.nodes) > 1
        page = {
            "surface": False,
            "x": grid,
            "y": [max(value, least) for value in values],
            "error": found.standard_error.tolist() if several else None,
            "labels": ["eigenvalue"],
            "value": "density",
            "log": True,
            "marks": marks or [],
        }
        _write_page(path, title, _note(info), page)
        return
    figure, axes = _figure(path)
    axes.semilogy(grid, [max(value, least) for value in values])
    for mark in marks or []:
        axes.axvline(mark, color="tab:red", linewidth=0.8, linestyle=":")
    axes.set(xlabel="eigenvalue", ylabel="density")
    _finish(figure, axes, title, info, path)


def _figure(path: Path) -> tuple[Any, Any]:
    if path.suffix not in PICTURES:
        allowed = ", ".join((*PICTURES, ".html"))
        raise ValueError(f"cannot write {path.name!r}: the name must end in {allowed}")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError(
            "pictures need matplotlib: pip install 'wsam[plots]', or write .html"
        ) from error
    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    return figure, figure.subplots()


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
    axes.plot(0, 0, marker="+", color="white")
    axes.set(xlabel=found.labels[0], ylabel=found.labels[1])
    figure.colorbar(filled, ax=axes, label="loss", format="%.3g")


def _finish(figure: Any, axes: Any, title: str, info: dict[str, Any], path: Path) -> None:
    axes.set_title(f"{title}\n{_note(info)}", fontsize=9)
    figure.savefig(path, dpi=150)


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
    path.write_text(filled, encoding="utf-8")
