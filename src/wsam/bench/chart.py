"""Records as pictures: bars for a step, lines for scaling. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from wsam.plot_style import COLORS, RC_PARAMS, TEXT_COLOR, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHADES = {"floor": TEXT_COLOR, "base": COLORS["sgd"], "ours": COLORS["wsam"], "peer": COLORS["sam"]}
NAMES = {"floor": "two passes", "base": "plain SGD", "ours": "wsam", "peer": "others"}
DASHES = {"eager": "--", "captured": "-"}


def draw(record: dict[str, Any], path: Path) -> Path:
    """Draw a record into a picture file and return its path."""
    from matplotlib import rc_context

    with rc_context(RC_PARAMS):
        drawn = lines(record) if record["kind"] == "scaling" else bars(record)
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, dpi=140)
    return path


def bars(record: dict[str, Any]) -> Figure:
    """Draw each case's ratio to the best floor, quartiles as whiskers."""
    rows = record["cases"][::-1]
    several = len({row["form"] for row in rows}) > 1
    drawn = new_figure(8.5, 1.3 + 0.27 * len(rows))
    panel: Axes = drawn.subplots()
    middles = [row["of_best_floor"]["median"] for row in rows]
    below = [row["of_best_floor"]["median"] - row["of_best_floor"]["low"] for row in rows]
    above = [row["of_best_floor"]["high"] - row["of_best_floor"]["median"] for row in rows]
    colors = [SHADES[row["kind"]] for row in rows]
    whiskers = {"ecolor": TEXT_COLOR, "elinewidth": 0.8}
    panel.barh(range(len(rows)), middles, xerr=[below, above], color=colors, error_kw=whiskers)
    for place, (middle, more) in enumerate(zip(middles, above, strict=True)):
        text = f" {middle:.3f}"
        panel.text(middle + more, place, text, va="center", fontsize=8, color=TEXT_COLOR)
    names = [f"{row['name']}, {row['form']}" if several else row["name"] for row in rows]
    panel.set_yticks(range(len(rows)), names, fontsize=8)
    panel.axvline(1.0, color=TEXT_COLOR, linewidth=0.8, linestyle=":")
    panel.set_xlabel(
        "time of a step, relative to two forward-backward passes in their fastest form"
    )
    problem = record["problem"]
    where = record["hardware"].get("gpu") or record["hardware"]["cpu"]
    title = f"{problem['model']}, batch {problem['batch']}, {problem['precision']}, {where}"
    panel.set_title(title, loc="left")
    present = dict.fromkeys(row["kind"] for row in record["cases"])
    marks = [panel.barh(0, 0, color=SHADES[kind], label=NAMES[kind]) for kind in present]
    drawn.legend(handles=marks, loc="outside lower center", ncols=4, fontsize=8)
    panel.margins(x=0.12)
    return drawn


def lines(record: dict[str, Any]) -> Figure:
    """Draw each case's own part against tensors or weights."""
    axis = record["axis"]
    drawn = new_figure(8.5, 5.0)
    panel: Axes = drawn.subplots()
    series: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for point in record["points"]:
        for row in point["cases"]:
            key = (row["name"], row["form"], row["kind"])
            if row["own_us"]["median"] > 0:
                series.setdefault(key, []).append((point[axis], row["own_us"]["median"]))
    marks = "osD^vP*X"
    several = len({form for _, form, _ in series}) > 1
    for number, ((name, form, kind), found) in enumerate(series.items()):
        xs, ys = zip(*found, strict=True)
        style: Any = {
            "color": SHADES[kind],
            "linestyle": DASHES[form] if several else "-",
            "marker": marks[number % 8],
        }
        panel.plot(xs, ys, label=f"{name}, {form}", markersize=4, linewidth=1.2, **style)
    other = "weights" if axis == "tensors" else "tensors"
    panel.set(xscale="log", yscale="log", xlabel=axis, ylabel="optimizer's own part, µs per step")
    where = record["hardware"].get("gpu") or record["hardware"]["cpu"]
    panel.set_title(f"{record['points'][0][other]:,} {other}, {where}", loc="left")
    panel.legend(fontsize=8)
    return drawn
