"""Charts of records: bars for steps, lines for scaling. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from wsam._utils.plot_style import COLORS, RC_PARAMS, TEXT_COLOR, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KIND_COLORS = {
    "floor": TEXT_COLOR,
    "base": COLORS["sgd"],
    "ours": COLORS["wsam"],
    "peer": COLORS["sam"],
}
KIND_NAMES = {"floor": "two passes", "base": "SGD", "ours": "wsam", "peer": "other libraries"}
FORM_LINES = {"eager": "--", "captured": "-"}


def draw(record: dict[str, Any], path: Path) -> Path:
    """Draw a record, save the chart and return its path."""
    from matplotlib import rc_context

    with rc_context(RC_PARAMS):
        chart = draw_lines(record) if record["kind"] == "scaling" else draw_bars(record)
        path.parent.mkdir(parents=True, exist_ok=True)
        chart.savefig(path, dpi=140)
    return path


def draw_bars(record: dict[str, Any]) -> Figure:
    """Draw the ratio of each case to the fastest floor, with quartiles."""
    rows = record["cases"][::-1]
    several_forms = len({row["form"] for row in rows}) > 1
    chart = new_figure(8.5, 1.3 + 0.27 * len(rows))
    panel: Axes = chart.subplots()
    medians = [row["of_best_floor"]["median"] for row in rows]
    below = [row["of_best_floor"]["median"] - row["of_best_floor"]["low"] for row in rows]
    above = [row["of_best_floor"]["high"] - row["of_best_floor"]["median"] for row in rows]
    colors = [KIND_COLORS[row["kind"]] for row in rows]
    error_style = {"ecolor": TEXT_COLOR, "elinewidth": 0.8}
    panel.barh(range(len(rows)), medians, xerr=[below, above], color=colors, error_kw=error_style)
    for y, (median, error) in enumerate(zip(medians, above, strict=True)):
        text = f" {median:.3f}"
        panel.text(median + error, y, text, va="center", fontsize=8, color=TEXT_COLOR)
    names = [f"{row['name']}, {row['form']}" if several_forms else row["name"] for row in rows]
    panel.set_yticks(range(len(rows)), names, fontsize=8)
    panel.axvline(1.0, color=TEXT_COLOR, linewidth=0.8, linestyle=":")
    panel.set_xlabel("time of a step relative to two forward-backward passes in their fastest form")
    problem = record["problem"]
    machine = record["hardware"].get("gpu") or record["hardware"]["cpu"]
    title = f"{problem['model']}, batch {problem['batch']}, {problem['precision']}, {machine}"
    panel.set_title(title, loc="left")
    present = dict.fromkeys(row["kind"] for row in record["cases"])
    handles = [
        panel.barh(0, 0, color=KIND_COLORS[kind], label=KIND_NAMES[kind]) for kind in present
    ]
    chart.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    panel.margins(x=0.12)
    return chart


def draw_lines(record: dict[str, Any]) -> Figure:
    """Draw the optimizer's time over the number of tensors or weights."""
    axis = record["axis"]
    chart = new_figure(8.5, 5.0)
    panel: Axes = chart.subplots()
    series: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for point in record["points"]:
        for row in point["cases"]:
            key = (row["name"], row["form"], row["kind"])
            if row["own_us"]["median"] > 0:
                series.setdefault(key, []).append((point[axis], row["own_us"]["median"]))
    markers = "osD^vP*X"
    several_forms = len({form for _, form, _ in series}) > 1
    for number, ((name, form, kind), points) in enumerate(series.items()):
        xs, ys = zip(*points, strict=True)
        style: Any = {
            "color": KIND_COLORS[kind],
            "linestyle": FORM_LINES[form] if several_forms else "-",
            "marker": markers[number % 8],
        }
        panel.plot(xs, ys, label=f"{name}, {form}", markersize=4, linewidth=1.2, **style)
    other = "weights" if axis == "tensors" else "tensors"
    panel.set(xscale="log", yscale="log", xlabel=axis, ylabel="time of the optimizer, µs per step")
    machine = record["hardware"].get("gpu") or record["hardware"]["cpu"]
    panel.set_title(f"{record['points'][0][other]:,} {other}, {machine}", loc="left")
    panel.legend(fontsize=8)
    return chart
