"""The look that the project's figures share, and how they are written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#1d2430"
SOFT = "#5b6472"
COLORS = {
    "sgd": "#6b7280",
    "sam": "#59aee6",
    "gsam": "#005c42",
    "wsam": "#c94f00",
    "coupled_wsam": "#93318e",
}
SETTINGS: Any = {  # matplotlib types its names one by one
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": "#9aa1ab",
    "axes.labelcolor": SOFT,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    # The same figure is the same file: no random identifiers, text stays text.
    "svg.hashsalt": "wsam",
    "svg.fonttype": "none",
}


def figure(width: float, height: float) -> Figure:
    """Return an empty figure without touching matplotlib's global state or a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawn)
    return drawn


def save(drawn: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and SVG into a folder, making the folder; return both paths."""
    from matplotlib import rc_context

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    with rc_context(SETTINGS):
        drawn.savefig(paths[0], dpi=160)
        drawn.savefig(paths[1], dpi=110, metadata={"Date": None})
    return paths
