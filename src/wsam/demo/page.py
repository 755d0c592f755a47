"""The report of the demonstration: the report on its folder, with an explanation."""

from __future__ import annotations

import math

from wsam._format import format_mean_std
from wsam.demo.config import BASE, EPOCHS, LR, NOISE, SAM, TUNED, WSAM, contenders
from wsam.demo.figures import error_heat_map
from wsam.demo.jobs import RADIUS
from wsam.demo.summary import ONE_SEED, Summary, error_text, names
from wsam.demo.tuning import TIE_MARGIN, TuningResults
from wsam.lab.environment import short_commit
from wsam.plots.html import render
from wsam.report import page as report_page
from wsam.report.charts import heat_chart
from wsam.report.elements import Figure, Section, Table, heat_table
from wsam.report.experiment import format_values
from wsam.report.labels import experiments
from wsam.theory import effective_weight

HEADS = ("", "test error (%)", "train loss", "sharpness", "top eigenvalue", "seconds")
_FORMATS = {
    "test_error": "{:.2f}",
    "train_loss": "{:.3f}",
    "sharpness": "{:.3f}",
    "top_eigenvalue": "{:.1f}",
    "seconds": "{:.1f}",
}


def table_rows(summary: Summary, narrow: bool = False) -> list[list[str]]:
    """Return the cells of the table.

    Args:
        summary: The figures.
        narrow: Show only the standard deviation of the test error, for a terminal.
    """
    with_std = ["test_error"] if narrow else [name for name in _FORMATS if name != "seconds"]
    rows = []
    for name, row in summary.rows.items():
        cells = [name]
        for figure, form in _FORMATS.items():
            mean, std = row.figures[figure]
            cells.append(format_mean_std(mean, std if figure in with_std else None, form.format))
        rows.append(cells)
    return rows


def page(summary: Summary, tuning: TuningResults) -> str:
    """Return the report of the demonstration as HTML."""
    return report_page(
        summary.folder,
        title="Wrong labels, right answers: WSAM on noisy digits",
        lead=_lead(summary),
        first=[_results(summary), _setup(summary)],
        extra=[_tuning(tuning)],
        names=names(),
        tables=False,
    )


def _lead(summary: Summary) -> str:
    gap, spread = summary.error_gap(WSAM, BASE)
    if spread is None:
        remark = f" ({ONE_SEED})"
    else:
        remark = "" if abs(gap) > spread else " (within their deviations)"
    return render(
        "demo/templates/lead.html",
        noise=f"{100 * NOISE:g}",
        base=error_text(summary.rows[BASE]),
        wsam=error_text(summary.rows[WSAM]),
        remark=remark,
    )


def _results(summary: Summary) -> Section:
    found = experiments(summary.folder.groups, names())
    styles = {item.name: item.style for one in found for item in one.groups}
    rows = table_rows(summary)
    correct = 1 - 0.9 * NOISE
    body = render(
        "demo/templates/results.html",
        table=Table(HEADS, rows, styles=[styles[row[0]] for row in rows]),
        seeds=summary.seeds,
        radius=f"{RADIUS:g}",
        comparisons=summary.comparisons,
        noise_free_loss=(
            -correct * math.log(correct) - (1 - correct) * math.log((1 - correct) / 9)
        ),
        losses={name: row.figures["train_loss"][0] for name, row in summary.rows.items()},
        base=BASE,
        wsam=WSAM,
    )
    return Section("Results", body)


def _setup(summary: Summary) -> Section:
    gamma = contenders()[WSAM].run.hyper["gamma"]
    assert isinstance(gamma, float)
    body = render(
        "demo/templates/setup.html",
        noise=f"{100 * NOISE:g}",
        wrong=f"{100 * NOISE * 0.9:g}",
        weights=f"{summary.folder.results[0].record['parameters']:,}",
        lr=f"{LR:g}",
        epochs=EPOCHS,
        tuned=TUNED,
        sam_rho=_hyper_text(SAM, "rho"),
        wsam_rho=_hyper_text(WSAM, "rho"),
        gamma=f"{gamma:g}",
        weight=f"{effective_weight(gamma, 0.9):.2g}",
    )
    return Section("Setup", body)


def _hyper_text(name: str, hyper: str) -> str:
    value = contenders()[name].run.hyper[hyper]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _tuning(tuning: TuningResults) -> Section:
    heat_map = error_heat_map(tuning)
    chart = heat_chart("WSAM's test error (%) by gamma and rho", heat_map)
    caption = "Mean test error (%) of WSAM over the two tuning seeds; the frame marks the choice."
    metadata = tuning.metadata
    body = render(
        "demo/templates/tuning.html",
        figure=Figure(chart, caption, heat_table(heat_map)),
        tables=[_tuning_table(tuning, SAM, "rho"), _tuning_table(tuning, TUNED, "lr")],
        seeds=" and ".join(map(str, metadata["seeds"])),
        margin=f"{TIE_MARGIN:.2g}",
        metadata=metadata,
        versions=", ".join(f"{k} {v}" for k, v in metadata["versions"].items() if v),
        commits=", ".join(map(short_commit, metadata["commit"])),
    )
    return Section("How gamma and rho were chosen", body)


def _tuning_table(tuning: TuningResults, name: str, axis: str) -> Table:
    best = tuning.best(name)
    rows = []
    for point in tuning.points[name]:
        errors = [error for error in point.errors if error is not None]
        mark = " (chosen)" if point is best else ""
        texts = (format_values(errors, ".2f"), point.failures)
        rows.append([f"{point.hyper[axis]:g}{mark}", ", ".join(filter(None, texts))])
    return Table([f"{name}: {axis}", "test error (%)"], rows)
