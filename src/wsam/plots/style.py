"""The look that the project's figures share, and how they are written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from wsam.looks import LOOKS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#1d2430"
SOFT = "#5b6472"
COLORS = {method: look.printed or look.light for method, look in LOOKS.items()}
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


def with_colors(style: str) -> str:
    """Return a style sheet with the methods' colours, ``--wsam`` and so on, where it asks for them.

    Args:
        style: It has the marks ``/*LIGHT*/`` and ``/*DARK*/``, one for each scheme.
    """
    light = " ".join(f"--{method}: {look.light};" for method, look in LOOKS.items())
    dark = " ".join(f"--{method}: {look.dark};" for method, look in LOOKS.items())
    return style.replace("/*LIGHT*/", light).replace("/*DARK*/", dark)


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
