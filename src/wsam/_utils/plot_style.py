"""Titles, colors and dashes of the methods, and the style of all figures.

matplotlib is imported only when a figure is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEXT_COLOR = "#1d2430"
MUTED_COLOR = "#5b6472"
RC_PARAMS: Any = {  # Any: matplotlib's stubs list every key as a literal
    # An SVG lists these fonts, so that a device without the first one uses a similar one.
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "font.size": 11,
    "text.color": TEXT_COLOR,
    "axes.edgecolor": "#9aa1ab",
    "axes.labelcolor": MUTED_COLOR,
    "axes.titlecolor": TEXT_COLOR,
    "axes.titlesize": 12,
    "legend.fontsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED_COLOR,
    "ytick.color": MUTED_COLOR,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    # Reproducible files: no random identifiers, and text is written as text.
    "svg.hashsalt": "wsam",
    "svg.fonttype": "none",
}
"""matplotlib's rcParams for every figure of the project."""
FIGURE_WIDTH = 5.8
"""Width of a figure in inches: scaled to the width of a phone, its text is still readable."""
GRID_COLOR = "#eceef1"


@dataclass(frozen=True)
class MethodStyle:
    """Title, colors and dashes of a method.

    Args:
        title: The displayed name.
        light: Its color on a light background.
        dark: Its color on a dark background.
        dashes: On and off lengths of its lines; empty for a solid line. Unique per method, so that
            lines are distinguishable without color.
        printed: Its color in figure files, if it is not `light`.
    """

    title: str
    light: str
    dark: str
    dashes: tuple[float, ...]
    printed: str | None = None


_BASE = MethodStyle("SGD", "#6b7280", "#aab2bf", (2, 4))
METHOD_STYLES = {
    "sgd": _BASE,  # the base optimizer in the toy example
    "vanilla": _BASE,  # the base optimizer in runs
    # In the toy example GSAM's path covers SAM's, so figures draw SAM light and GSAM dark.
    "sam": MethodStyle("SAM", "#0b77bd", "#5db4f0", (7, 5), printed="#59aee6"),
    "asam": MethodStyle("ASAM", "#165e79", "#0f7799", (14, 4, 6, 4)),
    "fisher_sam": MethodStyle("Fisher SAM", "#6a3a06", "#a25d15", (3, 2, 3, 8)),
    "esam": MethodStyle("ESAM", "#b68914", "#f7bc2b", (9, 3, 2, 3, 2, 3)),
    "gsam": MethodStyle("GSAM", "#00805c", "#3ccfa0", (10, 4, 2, 4), printed="#005c42"),
    "looksam": MethodStyle("LookSAM", "#609c85", "#60a28a", (12, 3, 3, 3)),
    "vasso": MethodStyle("VaSSO", "#2492f9", "#9ac9fe", (5, 2)),
    "friendly_sam": MethodStyle("FriendlySAM", "#753dfc", "#9785fc", (6, 2, 1, 2)),
    "msam": MethodStyle("MSAM", "#6409b0", "#9337f5", (4, 6)),
    "coupled_wsam": MethodStyle("Coupled-WSAM", "#dc1fbf", "#e329c5", (16, 4)),
    "wsam_reuse": MethodStyle("WSAM reuse", "#903d3b", "#d25c59", (22, 3)),
    "wsam": MethodStyle("WSAM", "#c94f00", "#ff914d", ()),
}
"""Styles by the names of `wsam.METHODS`, in the order in which reports list the methods.

Colors differ also for readers with protanopia, deuteranopia or tritanopia; a test simulates them. A
name with an option, such as ``wsam_reuse``, is a method with that option on (`variant_name`).
"""
COLORS = {method: style.printed or style.light for method, style in METHOD_STYLES.items()}
"""Colors of the methods in figure files."""


def method_title(method: str) -> str:
    """Return the displayed name of a method; an unknown method keeps its own name.

    Example:
        >>> method_title("gsam"), method_title("my.py:RandomSAM")
        ('GSAM', 'RandomSAM')
    """
    return METHOD_STYLES[method].title if method in METHOD_STYLES else method.rpartition(":")[2]


def method_color(method: str) -> str:
    """Return the color of a method on a light background; gray for an unknown method."""
    return METHOD_STYLES[method].light if method in METHOD_STYLES else MUTED_COLOR


def variant_name(method: str, options: Mapping[str, object]) -> str:
    """Return the name in `METHOD_STYLES` of a method with options, such as ``wsam_reuse``.

    Args:
        method: A name in `wsam.METHODS`.
        options: Its options. One that is on and has a style of its own selects that style.
    """
    names = (f"{method}_{option}" for option, value in options.items() if value)
    return next((name for name in names if name in METHOD_STYLES), method)


# ---- shades of a color ----

BACKGROUNDS = {"light": "#ffffff", "dark": "#1a202a"}
"""Background of the report's charts in each color scheme."""
_CONTRASTS = (3.1, 4.65, 7.0, 10.5)
"""Contrast ratios of the shades with the background, in equal ratios. 3 is the minimum for lines."""
SHADE_COUNT = len(_CONTRASTS)
LinearRGB = tuple[float, float, float]


def shades(color: str, background: str) -> list[str]:
    """Return a color in several lightnesses, from the lowest contrast to the highest.

    Args:
        color: ``#rrggbb``. The hue is kept.
        background: The background, ``#rrggbb``.

    Example:
        >>> shades("#c94f00", "#ffffff")
        ['#f86300', '#c74e00', '#9a3b00', '#702900']

    Reference:
        WCAG 2.2, contrast of graphical objects.
    """
    behind = luminance(_to_linear(background)) + 0.05
    on_light = behind > 0.5
    wanted = [behind / ratio if on_light else behind * ratio for ratio in _CONTRASTS]
    return [_to_hex(_with_luminance(_to_linear(color), total - 0.05)) for total in wanted]


def luminance(rgb: LinearRGB) -> float:
    """Return the relative luminance of a linear RGB color, from 0 to 1."""
    red, green, blue = rgb
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _with_luminance(rgb: LinearRGB, wanted: float) -> LinearRGB:
    """Scale a color to a luminance. White is added where scaling alone would clip a channel."""
    factor = min(wanted / luminance(rgb), 1 / max(rgb))
    red, green, blue = (factor * part for part in rgb)
    now = luminance((red, green, blue))
    white = (wanted - now) / (1 - now)
    return red + white * (1 - red), green + white * (1 - green), blue + white * (1 - blue)


def _to_linear(color: str) -> LinearRGB:
    red, green, blue = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return _srgb_to_linear(red), _srgb_to_linear(green), _srgb_to_linear(blue)


def _srgb_to_linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4


def _to_hex(rgb: LinearRGB) -> str:
    parts = (12.92 * p if p <= 0.0031308 else 1.055 * p ** (1 / 2.4) - 0.055 for p in rgb)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


# ---- figures ----


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure that uses neither pyplot's global state nor a display.

    Args:
        width: In inches.
        height: In inches.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def set_title(figure: Figure, text: str) -> None:
    """Write the message of a figure above it, at the left edge."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=12, color=TEXT_COLOR)


def label_points(
    axes: Axes, labels: Iterable[tuple[float, float, str, str]], right: float = 7
) -> None:
    """Write labels to the right of points or ends of lines, at least 15 points apart.

    Call it after the limits of the axes are set.

    Args:
        axes: The axes.
        labels: The point in data coordinates, text and color of each label.
        right: Distance of a label from its point in points.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # computes the layout, and with it the height of the axes
    ends = sorted(labels, key=lambda label: label[1])
    scale = 72 / figure.dpi
    wanted = [scale * axes.transData.transform((x, y))[1] for x, y, _, _ in ends]
    for (x, y, text, color), now, height in zip(ends, wanted, _spread(wanted, 15), strict=True):
        offset = (right, height - now)
        style: Any = {"color": color, "ha": "left", "va": "center", "annotation_clip": False}
        axes.annotate(text, (x, y), offset, textcoords="offset points", **style)


def _spread(heights: Sequence[float], gap: float) -> list[float]:
    """Return the nearest heights that are at least `gap` apart. The argument is ascending."""
    groups: list[list[float]] = []  # of labels that touch: their heights less multiples of gap
    for number, height in enumerate(heights):
        groups.append([height - number * gap])
        while len(groups) > 1 and fmean(groups[-2]) > fmean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    lowered = [fmean(group) for group in groups for _ in group]
    return [height + number * gap for number, height in enumerate(lowered)]


def save_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and SVG into a folder, which is created; return both paths."""
    from matplotlib import rc_context

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    with rc_context(RC_PARAMS):
        figure.savefig(paths[0], dpi=160)
        figure.savefig(paths[1], dpi=110, metadata={"Date": None})
    return paths
