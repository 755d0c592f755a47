"""The report on a results folder, as one HTML file that needs nothing else."""

from wsam.report.gather import Folder, gather
from wsam.report.page import page, write

__all__ = ["Folder", "gather", "page", "write"]
