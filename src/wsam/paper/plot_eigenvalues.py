"""Top Hessian eigenvalues at the minima of a table, by the way in which they are measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from wsam.paper.comparison import Entry
from wsam.paper.plot import draw_markers, legend
from wsam.paper.table import Measure, Table
from wsam.plot_style import FIGURE_WIDTH, new_figure, set_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = {
    Measure.TOP_EIGENVALUE: "training images, BatchNorm in evaluation mode",
    Measure.EIGENVALUE_BY_BATCHES: "training images, BatchNorm in training mode",
    Measure.EIGENVALUE_ON_TEST: "test images, BatchNorm in evaluation mode",
}
MESSAGE = """\
Which minimum is sharpest depends on the measurement:
SGDM's is the flattest in one way, the sharpest in two"""


def draw_eigenvalues(table: Table, entries: Sequence[Entry]) -> Figure:
    """Draw one panel for each way of measuring; all axes begin at 0."""
    figure = new_figure(FIGURE_WIDTH, 5.6)
    for panel, (measure, title) in zip(figure.subplots(3, 1), PANELS.items(), strict=True):
        shown = [entry for entry in entries if entry.cell.measure is measure]
        draw_markers(panel, table, shown)
        panel.set_xlim(0, None)
        panel.set_title(title, loc="left", fontsize=11)
    panel.set_xlabel("top Hessian eigenvalue")
    set_title(figure, MESSAGE)
    eigenvalues = [entry for entry in entries if entry.cell.measure in PANELS]
    figure.legend(*legend(eigenvalues), loc="outside lower left", ncols=3)
    return figure
