"""The look that the project's figures share, and how they are written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from wsam.looks import INK, LOOKS, SETTINGS, SOFT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLORS", "INK", "SETTINGS", "SOFT", "figure", "save", "with_colors"]

COLORS = {method: look.printed or look.light for method, look in LOOKS.items()}


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
