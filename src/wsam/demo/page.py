"""The demonstration's report: the report on its folder, and what is to be said about it."""

from __future__ import annotations

import math

from wsam._format import format_mean_std
from wsam.demo.choice import TIE, Choice
from wsam.demo.setting import BASE, EPOCHS, LR, NOISE, SAM, TUNED, WSAM, contenders
from wsam.demo.summary import ONE_SEED, Summary, error_text, names
from wsam.demo.work import RADIUS
from wsam.lab.environment import short_commit
from wsam.report import page as report_page
from wsam.report.charts import told
from wsam.report.heat import heat
from wsam.report.html import Section, cell, escape, figure, paragraph, table
from wsam.report.labels import experiments
from wsam.report.svg import swatch
from wsam.theory import effective_weight

HEADS = ("", "test error (%)", "train loss", "sharpness", "top eigenvalue", "seconds")


def table_rows(summary: Summary, narrow: bool = False) -> list[list[str]]:
    """Return the texts of the demonstration's table.

    Args:
        summary: The figures.
        narrow: Give the deviation of the test error alone, for a terminal.
    """
    forms = {
        "test_error": "{:.2f}",
        "train_loss": "{:.3f}",
        "sharpness": "{:.3f}",
        "top_eigenvalue": "{:.1f}",
        "seconds": "{:.1f}",
    }
    rows = []
    for name, row in summary.rows.items():
        texts = [
            format_mean_std(*row.figures[figure_name], form.format)
            for figure_name, form in forms.items()
        ]
        first = 1 if narrow else len(texts) - 1
        texts[first:] = [text.partition(" ")[0] for text in texts[first:]]
        rows.append([name, *texts])
    return rows


def page(summary: Summary, choice: Choice) -> str:
    """Return the demonstration's report as one HTML text."""
    return report_page(
        summary.folder,
        title="Wrong labels, right answers: WSAM on noisy digits",
        lead=_lead(summary),
        first=[_result(summary), _setting(summary)],
        extra=[_choice(choice)],
        names=names(),
        tables=False,
    )


def _lead(summary: Summary) -> str:
    gap, spread = summary.lower(WSAM, BASE)
    ours, theirs = (error_text(summary.rows[n]) for n in (WSAM, BASE))
    if spread is None:
        strength = f" ({ONE_SEED})"
    else:
        strength = "" if abs(gap) > spread else " (within their deviations)"
    return (
        f'<p class="lead">A small network learns digits while {100 * NOISE:g}% of its labels are '
        f"drawn at random. On clean test images SGD errs in <strong>{escape(theirs)}%</strong>, "
        f"WSAM in <strong>{escape(ours)}%</strong>{strength}.</p>"
    )


def _result(summary: Summary) -> Section:
    lines = {
        line.name: line for one in experiments(summary.folder.groups, names()) for line in one.lines
    }
    rows = [[cell(name, swatch(lines[name].look)), *rest] for name, *rest in table_rows(summary)]
    note = (
        f"{_over(summary)}, after the last epoch. Sharpness: rise of the "
        f"training loss within a radius of {RADIUS:g}, by one ascent step over all training images; "
        "the same radius for all. The top eigenvalue is that of the Hessian of the training loss, "
        "BatchNorm in evaluation."
    )
    body = (
        table(HEADS, rows)
        + paragraph(note, "note")
        + '<ul class="plain">'
        + "".join(f"<li>{escape(sentence)}</li>" for sentence in summary.claims)
        + "</ul>"
        + paragraph(_why(summary))
    )
    return Section("What came out", body)


def _over(summary: Summary) -> str:
    """Say what the figures of the table are taken over."""
    if len(summary.seeds) == 1:
        return f"One run each, of seed {summary.seeds[0]}, so without deviations"
    return f"Mean ± sample deviation over seeds {', '.join(map(str, summary.seeds))}"


def _why(summary: Summary) -> str:
    losses = {name: row.figures["train_loss"][0] for name, row in summary.rows.items()}
    right = 1 - 0.9 * NOISE
    honest = -right * math.log(right) - (1 - right) * math.log((1 - right) / 9)
    return (
        "How to read it: a network that had learnt the digits and not one wrong label would have a "
        f"training loss of about {honest:.2f}. {BASE} ends at {losses[BASE]:.2f}: it knows the wrong "
        f"labels by heart. {WSAM} ends at {losses[WSAM]:.2f}. Curvature is comparable between minima "
        "of like training loss only: where a network is sure of every label, as "
        f"{BASE} is here, the cross-entropy is flat however the labels were learnt."
    )


def _setting(summary: Summary) -> Section:
    run = contenders()[WSAM].run
    gamma = float(run.hyper["gamma"])  # type: ignore[arg-type]
    weight = effective_weight(gamma, 0.9)
    wrong = 100 * NOISE * 0.9
    weights = summary.folder.results[0].record["parameters"]
    items = (
        "Data: the 1,797 digits of 8 x 8 pixels that scikit-learn carries, 1,200 to train on and "
        f"597 to test on. {100 * NOISE:g}% of the training labels are drawn anew, uniformly over all "
        f"ten classes, so about {wrong:g}% are wrong; each seed draws its own. Test labels are right.",
        f"Model: three convolutions with BatchNorm, {weights:,} weights. BatchNorm's statistics move "
        "in the first pass of a step only.",
        f"Base: SGD, momentum 0.9, weight decay 0.001, batches of 64, cosine schedule. {BASE}, {SAM} "
        f"and {WSAM} use learning rate {LR:g}. SAM and WSAM, which compute two gradients a step, "
        f"train for {EPOCHS} epochs, SGD alone for {2 * EPOCHS}.",
        f"{TUNED}: the same base at the learning rate that was best for it alone. It stops short of "
        "learning the wrong labels.",
        f"{SAM}: rho {run_text(SAM, 'rho')}. {WSAM}: gamma {gamma:g}, rho {run_text(WSAM, 'rho')}. "
        f"With momentum 0.9 the sharpness of this gamma weighs k(1 - 0.9) = {weight:.2g} times SAM's.",
    )
    listed = "".join(f"<li>{escape(item)}</li>" for item in items)
    return Section("The setting", f'<ul class="plain">{listed}</ul>')


def run_text(name: str, hyper: str) -> str:
    """Return a hyperparameter of a row as text."""
    value = contenders()[name].run.hyper[hyper]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _choice(choice: Choice) -> Section:
    facts = choice.facts
    places = choice.places[WSAM]
    radii = sorted({p.point["rho"] for p in places})
    gammas = sorted({p.point["gamma"] for p in places})
    cells = {
        (p.point["rho"], p.point["gamma"]): p.failures if p.mean is None else p.mean for p in places
    }
    best = choice.best(WSAM).point
    title = "WSAM's test error (%) by gamma and rho"
    chart = heat(title, (("ρ", radii), ("γ", gammas)), cells, (best["rho"], best["gamma"]))
    seeds = " and ".join(map(str, facts["seeds"]))
    words = (
        f"Gamma, rho and SGD's own learning rate were chosen on seeds {seeds}, which are not among "
        "those shown above: for each row the value with the smallest mean test error; means within "
        f"{TIE:.2g} points of it, three test images, count as equal, and the gentlest of them is "
        "taken. Too small a product k·ρ, and WSAM learns the wrong labels like SGD; too large, and it "
        "learns nothing (90% is guessing). The valley between runs across the map: gamma and rho "
        "belong together."
    )
    versions = ", ".join(f"{k} {v}" for k, v in facts["versions"].items() if v)
    commits = ", ".join(short_commit(commit) for commit in facts["commit"])
    made = (
        f"{facts['runs']} runs, one thread each, on {facts['hardware']['cpu']}, "
        f"finished {facts['finished']}; {versions}; commit {commits}. "
        "Made again by: wsam demo --map"
    )
    other = "".join(_look(choice, name, axis) for name, axis in ((SAM, "rho"), (TUNED, "lr")))
    told_map = "Mean test error (%) of WSAM over those two seeds; the ring is the choice."
    body = (
        paragraph(words)
        + f'<div class="charts">{figure(chart, told_map)}<div>{other}</div></div>'
        + paragraph(made, "note")
    )
    return Section("How gamma and rho were chosen", body)


def _look(choice: Choice, name: str, axis: str) -> str:
    best = choice.best(name)
    rows = []
    for place in choice.places[name]:
        known = [error for error in place.errors if error is not None]
        mark = " (chosen)" if place is best else ""
        texts = (told(known, ".2f"), place.failures)
        rows.append([f"{place.point[axis]:g}{mark}", ", ".join(filter(None, texts))])
    return table([f"{name}: {axis}", "test error (%)"], rows)
