"""Charts as inline SVG with the colors of the page.

Colors are CSS variables of the page, so that one drawing serves the light and the dark scheme. A
chart is as wide as a phone: nothing in it has to shrink there. Its text is text, in the page's font.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from wsam._utils.html import to_unicode
from wsam._utils.plot_style import METHOD_STYLES, RC_PARAMS, SHADE_COUNT

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes

WIDTH = 400
"""Of a chart in CSS pixels, at its natural size."""
FONT_SIZE = 13
_VARIABLES = (
    *("ink", "soft", "grid", "card"),
    *METHOD_STYLES,
    *(f"{method}_{number}" for method in METHOD_STYLES for number in range(SHADE_COUNT)),
)
_PLACEHOLDERS = {name: f"#00{number:02x}ff" for number, name in enumerate(_VARIABLES)}


def color(variable: str) -> str:
    """Return the placeholder of a CSS variable. `to_svg` replaces it by ``var(--variable)``."""
    return _PLACEHOLDERS[variable]


@contextmanager
def new_chart(
    height: float, *, left: float, right: float, top: float, bottom: float
) -> Iterator[Axes]:
    """Yield the axes of an empty chart, with margins in pixels."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ink, soft = color("ink"), color("soft")
    style = RC_PARAMS | {
        "font.size": FONT_SIZE,
        "text.color": ink,
        "axes.edgecolor": soft,
        "axes.labelcolor": soft,
        "axes.axisbelow": True,
        "xtick.color": soft,
        "xtick.major.pad": 6,
        "ytick.color": soft,
        "grid.color": color("grid"),
        "grid.linewidth": 1,
        "lines.scale_dashes": False,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        # A label may hold any text: "$" does not start a formula.
        "text.parse_math": False,
    }
    with rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the page may use another font
        figure = Figure(figsize=(WIDTH / 72, height / 72))
        box = (left / WIDTH, bottom / height, (WIDTH - left - right) / WIDTH)
        yield figure.add_axes((*box, (height - top - bottom) / height))


def to_svg(axes: Axes, description: str) -> Markup:
    """Return a figure as an inline SVG element with CSS variables as colors.

    Args:
        axes: The axes of the figure.
        description: Alternative text.
    """
    from markupsafe import Markup
    from matplotlib import rc_context
    from matplotlib.text import Text

    description = to_unicode(description)
    figure: Any = axes.figure
    for text in figure.findobj(Text):
        text.set_text(to_unicode(text.get_text()))
    file = io.StringIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.hashsalt": description}):  # identifiers that are unique on the page
        figure.savefig(file, format="svg", metadata=metadata)
    whole = file.getvalue()
    # Without the header and its style sheet, which would apply to the whole page.
    body = whole[whole.index("</defs>") + len("</defs>") : whole.rindex("</svg>")]
    body = re.sub(r' id="[\w.]+_\d+"', "", body)  # of the elements; others are referenced
    body = re.sub(r"font-family: [^;\"]*(; |(?=\"))", "", body)
    body = re.sub(r' d="([^"]*)"', lambda found: f' d="{_compact(found[1])}"', body)
    for variable, placeholder in _PLACEHOLDERS.items():
        body = body.replace(placeholder, f"var(--{variable})")
    width, height = figure.get_size_inches() * 72
    return Markup(
        '<svg class="chart" viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}">{}</svg>'
    ).format(width, height, description, Markup(re.sub(r"\s*\n\s*", "", body)))


def _compact(path: str) -> str:
    """Return the data of a path with one decimal and no superfluous spaces."""
    rounded = re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.1f}", path)
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", rounded)
