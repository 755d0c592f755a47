"""The page of the demonstration: that of the comparison, with an explanation."""

from __future__ import annotations

from wsam._utils.html import render
from wsam._utils.text import pluralize
from wsam.compare import Summary
from wsam.compare import page as comparison_page
from wsam.compare.formatting import format_number
from wsam.report.elements import Section

OWN_DATA = (
    "wsam compare --model my.py:net --data my.py:data --base adamw --lr 3e-4 --weight-decay 0.05 "
    "--batch-size 64 --epochs 50 --budget 20m"
)
"""The command for the reader's own model, data and settings."""


def page(summary: Summary) -> str:
    """Return the page of the demonstration as HTML."""
    section = Section("Now your own data", render("demo/templates/own_data.html", command=OWN_DATA))
    return comparison_page.page(
        summary, title="Digits with wrong labels", lead=lead(summary), last=[section]
    )


def lead(summary: Summary) -> str:
    """Return what was compared: errors, search effort and number of runs."""
    request, unit = summary.state.request, summary.metric["unit"]
    errors = [
        f"{row.method.title} {format_number(row.mean, unit, row.interval)}%"
        for row in summary.rows.values()
        if row.mean is not None
    ]
    return (
        f"A small network learns digits while {request.run.noise:.0%} of its training labels are "
        f"redrawn at random. Test error: {', '.join(errors)} (n = {len(request.seeds)}). Every method, "
        f"SGD included, was tuned with the same effort: {pluralize(summary.state.trials, 'setting')} "
        "each, chosen on a validation split. All used the same number of passes. The test set was read "
        "once, at the end."
    )
