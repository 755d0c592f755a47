"""Figures of the toy example and HTML templates. matplotlib and jinja2 are imported on first use."""
