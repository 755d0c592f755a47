"""Charts as inline SVG: colours come from the page's style, so they follow light and dark.

Drawn about as wide as a telephone, so that nothing in them has to be made smaller there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from wsam._format import format_mean_std
from wsam.report.scale import Scale, fit, short

WIDTH, HEIGHT = 400, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 14, 12, 42


@dataclass(frozen=True)
class Look:
    """How a series is told from others: by a colour of the style sheet and by the dashes of its line.

    Args:
        color: A method, or ``ink``.
        dashes: On and off lengths, empty for a whole line; None where no line is drawn.
        tone: Which of the colour's tones (`plot_style.shades`); None for the colour itself.
    """

    color: str = "ink"
    dashes: tuple[float, ...] | None = None
    tone: int | None = None

    @property
    def paint(self) -> str:
        """The colour and its tone, as the names of the style sheet end."""
        return self.color if self.tone is None else f"{self.color}_{self.tone}"

    @property
    def style(self) -> str:
        """Attributes of a stroked element."""
        lengths = " ".join(map(str, self.dashes or ()))
        dashed = f' stroke-dasharray="{lengths}"' if lengths else ""
        return f'class="c-{self.paint}"{dashed}'


@dataclass(frozen=True)
class Series:
    """A line with a band around it.

    Args:
        name: For the reader who points at it.
        look: Its colour and dashes.
        points: (x, middle, low, high); a gap where the middle is None.
    """

    name: str
    look: Look
    points: Sequence[tuple[float, float | None, float, float]]


@dataclass(frozen=True)
class Bar:
    """A mean with its deviation and the values it is the mean of."""

    name: str
    look: Look
    values: Sequence[float]
    mean: float
    deviation: float | None


def swatch(look: Look) -> str:
    """Return a short piece of a line, for legends and tables; a dot where no line is drawn."""
    line = f'<path d="M1 5H41" {look.style}/>'
    dot = f'<circle cx="21" cy="5" r="4" class="f-{look.paint}"/>'
    inside = dot if look.dashes is None else line
    return f'<svg class="swatch" viewBox="0 0 42 10" aria-hidden="true">{inside}</svg>'


def lines(
    title: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    log: bool = False,
    whole: bool = False,
) -> str:
    """Return a chart of lines.

    Args:
        title: What is seen, for those who do not see it.
        series: The lines.
        x_label: Below the horizontal axis.
        y_label: Above the vertical axis.
        log: Take a logarithmic scale where the values span much.
        whole: Write whole numbers alone below the horizontal axis, which counts something.
    """
    known = [point for one in series for point in one.points if point[1] is not None]
    across = fit([p[0] for p in known], _LEFT, WIDTH - _RIGHT)
    across = Scale(across.low, max(p[0] for p in known), _LEFT, WIDTH - _RIGHT)
    middles = [p[1] for p in known if p[1] is not None]
    up = fit(middles, HEIGHT - _BOTTOM, _TOP + 16, zero=True, log=log)
    parts = [_frame(across, up, (x_label, y_label), whole)]
    parts += [_band(one, across, up) for one in series]
    parts += [_line(one, across, up) for one in series]  # above all bands
    return _svg(title, "".join(parts))


def _stretches(series: Series) -> list[list[tuple[float, float, float, float]]]:
    """Return the points between the gaps of a series; a value that is not finite is a gap."""
    found: list[list[tuple[float, float, float, float]]] = [[]]
    for x, middle, low, high in series.points:
        if middle is None or not math.isfinite(middle):
            found.append([])
        else:
            found[-1].append((x, middle, low, high))
    return [stretch for stretch in found if stretch]


def _line(series: Series, across: Scale, up: Scale) -> str:
    name = f"<title>{escape(series.name)}</title>"
    path, dots = "", ""
    for stretch in _stretches(series):
        places = [f"{across(x):.1f} {up(middle):.1f}" for x, middle, _, _ in stretch]
        if len(places) > 1:
            path += f"M{'L'.join(places)}"
        else:  # a line from a point to itself would not be seen
            x, y = places[0].split()
            dots += f'<circle cx="{x}" cy="{y}" r="4" class="f-{series.look.paint}">{name}</circle>'
    line = f'<path d="{path}" {series.look.style}>{name}</path>' if path else ""
    return line + dots


def _band(series: Series, across: Scale, up: Scale) -> str:
    bands = []
    for stretch in _stretches(series):
        if len(stretch) < 2 or all(low == high for _, _, low, high in stretch):
            continue
        above = [f"{across(x):.1f} {up(high):.1f}" for x, _, _, high in stretch]
        below = [f"{across(x):.1f} {up(low):.1f}" for x, _, low, _ in reversed(stretch)]
        points = " ".join([*above, *below])
        paint = series.look.paint
        bands.append(f'<polygon points="{points}" class="band f-{paint} c-{paint}"/>')
    return "".join(bands)


def _frame(across: Scale, up: Scale, labels: tuple[str, str], whole: bool) -> str:
    bottom = HEIGHT - _BOTTOM
    x_label, y_label = labels
    parts = []
    for tick, text in up.marks():
        y = f"{up(tick):.1f}"
        parts.append(f'<path d="M{_LEFT} {y}H{WIDTH - _RIGHT}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{y}" dy=".35em" class="end">{text}</text>')
    for tick, text in across.marks(6, whole):
        x = f"{across(tick):.1f}"
        parts.append(f'<path d="M{x} {bottom}v4" class="axis"/>')
        parts.append(f'<text x="{x}" y="{bottom + 18}" class="mid">{text}</text>')
    parts.append(f'<path d="M{_LEFT} {bottom}H{WIDTH - _RIGHT}" class="axis"/>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" class="mid">{escape(x_label)}</text>')
    parts.append(f'<text x="2" y="{_TOP + 2}" class="name">{escape(y_label)}</text>')
    return "".join(parts)


def bars(title: str, rows: Sequence[Bar], label: str, *, log: bool = False) -> str:
    """Return a chart of means with deviations as whiskers, a row each, its values as small dots.

    Args:
        title: What is seen, for those who do not see it.
        rows: From top to bottom.
        label: Below the axis.
        log: Take a logarithmic scale where the values span much.
    """
    step, bottom = 46, 40
    height = step * len(rows) + bottom + 6
    everything = [value for row in rows for value in row.values]
    ends = [row.mean + sign * (row.deviation or 0) for row in rows for sign in (-1, 1)]
    low, right = 8, WIDTH - 16
    across = fit([*everything, *ends], low, right, log=log)
    if not across.log:  # dots need no zero, but room on both sides
        room = 0.12 * (across.high - across.low)
        across = Scale(max(0.0, across.low - room), across.high + room, low, right)
    parts = []
    for tick, text in across.marks(5):
        x = f"{across(tick):.1f}"
        parts.append(f'<path d="M{x} 4V{height - bottom}" class="grid"/>')
        parts.append(f'<text x="{x}" y="{height - bottom + 16}" class="mid">{text}</text>')
    for number, row in enumerate(rows):
        parts.append(_bar(row, across, step * number + 32))
    parts.append(f'<text x="{WIDTH / 2}" y="{height - 6}" class="mid">{escape(label)}</text>')
    return _svg(title, "".join(parts), height)


def _bar(row: Bar, across: Scale, y: float) -> str:
    x, color = across(row.mean), row.look.paint
    parts = [f'<text x="8" y="{y - 14}" class="name">{escape(row.name)}</text>']
    parts += [
        f'<circle cx="{across(value):.1f}" cy="{y}" r="3" class="dot f-{color}"/>'
        for value in row.values
    ]
    told = format_mean_std(row.mean, row.deviation, short)
    if row.deviation is not None:
        left, right = across(row.mean - row.deviation), across(row.mean + row.deviation)
        whisker = f"M{left:.1f} {y}H{right:.1f}M{left:.1f} {y - 5}v10M{right:.1f} {y - 5}v10"
        parts.append(f'<path d="{whisker}" class="c-{color}"/>')
    parts.append(
        f'<circle cx="{x:.1f}" cy="{y}" r="5.5" class="f-{color}">'
        f"<title>{escape(row.name)}: {told}</title></circle>"
    )
    return "".join(parts)


def _svg(title: str, inside: str, height: float = HEIGHT) -> str:
    head = f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img"'
    return f'{head} aria-label="{escape(title)}">{inside}</svg>'
