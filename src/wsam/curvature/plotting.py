"""Output files of landscapes and densities: figures, self-contained HTML pages, JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wsam._utils.html import render
from wsam._utils.plot_style import FIGURE_WIDTH, MUTED_COLOR, RC_PARAMS, new_figure, set_title

CURVE_COLOR, MARK_COLOR, GAP_COLOR = "#2a6fb0", "#c0392b", "#d5dae1"  # as on the page, light mode
_LONGEST_LABEL = 50
"""Number of characters of an axis label that fit below the axes."""
_NO_DATE: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def data_note(info: dict[str, Any]) -> str:
    """Return one line with the data, mode and precision, without which plots are not comparable."""
    if not info:
        return ""
    return (
        f"{info['parameters']:,} weights, {info['samples']:,} samples, {info['mode']} mode, "
        f"{info['dtype']}{' with TF32' if info['tf32'] else ''}, loss {info['loss']:.4g}"
    )


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write numbers as JSON; create the folder."""
    _write_text(path, json.dumps(data, allow_nan=False))


def write_page(path: Path, title: str, note: str, plot: dict[str, Any]) -> None:
    """Write an interactive page that needs no network; create the folder.

    Args:
        path: Of the page.
        title: Heading of the page.
        note: Text below the heading.
        plot: Data of the plot, as the script of `plot_page.html` reads it.
    """
    template = "curvature/templates/plot_page.html"
    _write_text(path, render(template, title=title, note=note, data={"title": title, **plot}))


@contextmanager
def saved_figure(path: Path, title: str, note: str) -> Iterator[tuple[Any, Any]]:
    """Yield a styled matplotlib figure and its axes; write it to `path` on exit."""
    from matplotlib import rc_context

    with rc_context(RC_PARAMS):
        figure = new_figure(FIGURE_WIDTH, 4.4)
        axes = figure.subplots()
        yield figure, axes
        set_title(figure, textwrap.fill(title, 54, break_on_hyphens=False))
        lines = [textwrap.fill(line, 66) for line in note.splitlines()]
        axes.set_title("\n".join(lines), loc="left", fontsize=9, color=MUTED_COLOR)
        if len(axes.get_xlabel()) > _LONGEST_LABEL:
            axes.set_xlabel("position on the line")  # the title has the label
        axes.locator_params(axis="x", nbins=6)
        figure.legend(loc="outside lower left")
        path.parent.mkdir(parents=True, exist_ok=True)
        suffix = path.suffix.lower()
        # Without `format`, matplotlib would add a suffix to a path that has none.
        figure.savefig(path, dpi=150, format=suffix[1:], metadata=_NO_DATE.get(suffix))


def draw_marks(axes: Any, marks: Sequence[float], label: str) -> None:
    """Draw dotted vertical lines, with one legend entry for all."""
    for mark in marks:
        axes.axvline(mark, color=MARK_COLOR, linewidth=1, linestyle=":", label=label)
        label = "_"  # matplotlib leaves labels with an underscore out of the legend


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
