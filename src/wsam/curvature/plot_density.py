"""Figure, page and file of a spectral density."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wsam.curvature import plotting
from wsam.curvature.operator import TITLES

if TYPE_CHECKING:
    from wsam.curvature.spectral_density import Density


def save_density(found: Density, path: str | Path, marks: Sequence[float] | None = None) -> None:
    """Write a spectral density as a figure, an interactive page (`.html`) or numbers (`.json`).

    Args:
        found: The density.
        path: Its suffix selects the format: .png, .svg, .pdf, .html or .json. The folder is created.
        marks: Eigenvalues to mark in a figure or on a page.
    """
    path = Path(path)
    info = found.info.as_dict() if found.info else {}
    if path.suffix.lower() == ".json":
        plotting.write_json(path, {"info": info, **found.as_dict()})
        return
    marked = [float(mark) for mark in (() if marks is None else marks)]
    title = f"Density of the eigenvalues of the {TITLES.get(info.get('kind', ''), 'operator')}"
    note = plotting.data_note(info)
    if path.suffix.lower() == ".html":
        band = "Band: within two standard errors. " if len(found.nodes) > 1 else ""
        page = {
            "surface": False,
            "x": found.grid.tolist(),
            "y": found.values.clamp_min(_lowest_shown(found)).tolist(),
            "error": found.standard_error.tolist() if band else None,
            "labels": ["eigenvalue"],
            "value": "density",
            "log": True,
            "marks": marked,
            "legend": band + (f"Dotted: {_marks_label(marked)}." if marked else ""),
        }
        plotting.write_page(path, title, note, page)
        return
    with plotting.saved_figure(path, title, note) as (_, axes):
        _draw_density(axes, found, marked)


def _marks_label(marks: Sequence[float]) -> str:
    if len(marks) > 4:
        return f"{len(marks)} eigenvalues from {min(marks):.4g} to {max(marks):.4g}"
    return f"eigenvalue{'s' if len(marks) > 1 else ''} " + ", ".join(f"{m:.4g}" for m in marks)


def _lowest_shown(found: Density) -> float:
    """Return the lower end of the axis: the tails of the Gaussians would add many decades."""
    return 1e-8 * float(found.values.max())


def _draw_density(axes: Any, found: Density, marks: Sequence[float]) -> None:
    lowest, color = _lowest_shown(found), plotting.CURVE_COLOR
    label = f"density, smoothed by a Gaussian of width {found.sigma:.2g}"
    values = found.values.clamp_min(lowest)
    axes.semilogy(found.grid.tolist(), values.tolist(), color=color, linewidth=1.8, label=label)
    if len(found.nodes) > 1:
        ends = [
            (found.values + side * 2 * found.standard_error).clamp_min(lowest).tolist()
            for side in (-1, 1)
        ]
        label = "within two standard errors"
        axes.fill_between(
            found.grid.tolist(), *ends, color=color, alpha=0.2, linewidth=0, label=label
        )
    if marks:
        plotting.draw_marks(axes, marks, _marks_label(marks))
    axes.set(xlabel="eigenvalue", ylabel="density", ylim=(lowest, None))
