"""The paper's tables and figures as data: each cell holds its runs and the published figure.

    >>> from wsam.paper import find
    >>> table = find("cifar")
    >>> cell = table.cell(("ResNet18", "WSAM"), "CIFAR-10")
    >>> cell.paper.mean, len(cell.runs)
    (3.62, 5)

Reference:
    Yue et al., Sharpness-Aware Minimization Revisited: Weighted Sharpness as a Regularization Term,
    KDD 2023.
"""

from wsam.paper.comparison import Entry, Ours, gather
from wsam.paper.profile import Profile
from wsam.paper.registry import GRIDS, TABLES, find, find_grid, names
from wsam.paper.table import Cell, Kind, Measure, Quoted, Table

__all__ = [
    "GRIDS",
    "TABLES",
    "Cell",
    "Entry",
    "Kind",
    "Measure",
    "Ours",
    "Profile",
    "Quoted",
    "Table",
    "find",
    "find_grid",
    "gather",
    "names",
]
