"""Figures and page of the toy example. matplotlib and jinja2 are imported on first use."""
