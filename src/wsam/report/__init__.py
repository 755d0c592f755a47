"""The report on a results folder, as one self-contained HTML file."""

from wsam.report.page import page, write
from wsam.report.results import Folder, gather

__all__ = ["Folder", "gather", "page", "write"]
