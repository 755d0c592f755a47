"""WSAM's test error over gamma: ResNet18 on CIFAR-10."""

from pathlib import Path

from matplotlib.figure import Figure

from wsam._utils.plot_style import METHOD_STYLES, MUTED_COLOR, label_points, method_title, set_title
from wsam.lab.records import record_path
from wsam.paper import Table, find, gather, plot


def tables() -> tuple[Table, Table]:
    """Return the runs of WSAM for each gamma, and those of SGD and SAM."""
    weighted = find("sensitivity").select("*/ResNet18 CIFAR-10")
    return weighted, find("cifar").select("ResNet18/S*/CIFAR-10")


def record_names(results: Path) -> list[str]:
    """Return the names of the records that the figure shows."""
    paths = {record_path(results, run) for table in tables() for run in table.runs}
    return [path.name for path in paths if path.exists()]


def draw_sensitivity(results: Path) -> Figure:
    """Draw WSAM's error by gamma, with those of SGD and SAM."""
    table, others = tables()
    entries = gather(table, results)
    figure = plot.draw(table, entries)
    axes = figure.axes[0]
    axes.set_title("ResNet18, CIFAR-10", loc="left", fontsize=10, color=MUTED_COLOR)
    axes.set(xlabel="γ", ylim=(3.4, 4.7))
    labels, end = [], axes.get_xlim()[1]
    for entry in gather(others, results):
        ours, color = entry.ours, METHOD_STYLES[entry.cell.runs[0].method].light
        assert ours.mean is not None
        axes.axhline(ours.mean, color=color, linestyle="--", linewidth=1.3)
        name = method_title(entry.cell.runs[0].method)
        labels.append((end, ours.mean, f"{name} {ours.mean:.2f}\n(n = {ours.n})", color))
    known = sorted((e.ours.mean, e.cell.row[0]) for e in entries if e.ours.n)
    (_, best), *_, (_, worst) = known
    set_title(figure, f"WSAM's error is lowest at γ = {best} and highest at {worst}")
    label_points(axes, labels)
    return figure
