"""Figures and pages. matplotlib is imported only where a figure is drawn."""
