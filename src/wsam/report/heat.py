"""A map of numbers over two settings, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from wsam.report.html import table
from wsam.report.scale import short
from wsam.report.svg import WIDTH

STOPS = ((16, 94, 122), (72, 160, 150), (240, 214, 150), (219, 122, 68), (140, 45, 42))
"""From low to high: blue is good, brown is bad, in light and in dark."""
_LEFT, _TOP, _BOTTOM = 56, 26, 46
_ROW = 40
_LINE = 15
"""From a line of text to the next."""


def shade(share: float) -> tuple[int, int, int]:
    """Return the colour of a share from 0 to 1.

    Example:
        >>> shade(0.0), shade(1.0)
        ((16, 94, 122), (140, 45, 42))
    """
    at = min(max(share, 0.0), 1.0) * (len(STOPS) - 1)
    first = min(int(at), len(STOPS) - 2)
    pairs = zip(STOPS[first], STOPS[first + 1], strict=True)
    red, green, blue = (round(a + (at - first) * (b - a)) for a, b in pairs)
    return red, green, blue


def is_light(color: tuple[int, int, int]) -> bool:
    """Tell whether dark letters are read better on a colour than white ones, by its luma."""
    red, green, blue = color
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140


def shares(values: Sequence[float]) -> dict[float, float]:
    """Return where each value stands between the least and the greatest, by their logarithms.

    Zero has no logarithm: it stands at half of the least value above it.
    """
    above = [value for value in values if value > 0]
    if not above or min(values) == max(values):
        return dict.fromkeys(values, 0.5)
    low = min(above) if len(above) == len(values) else min(above) / 2
    span = math.log(max(above) / low)
    return {value: math.log(max(value, low) / low) / span for value in values}


def heat(
    title: str,
    axes: tuple[tuple[str, Sequence[float]], tuple[str, Sequence[float]]],
    cells: Mapping[tuple[float, float], float | str],
    chosen: tuple[float, float] | None = None,
) -> str:
    """Return a map and, to be opened below it, its table: a reader of the screen has that alone.

    The first axis runs to the right, the second upwards.

    Args:
        title: What is seen, for those who do not see it.
        axes: Name and values of each.
        cells: The number at each place; words, each on a line, where training broke down.
        chosen: A place to point out.
    """
    (x_name, xs), (y_name, ys) = axes
    wide = (WIDTH - _LEFT - 8) / len(xs)
    height = _TOP + _ROW * len(ys) + _BOTTOM
    known = [value for value in cells.values() if not isinstance(value, str)]
    share = shares(known) if known else {}
    parts = []
    for row, y in enumerate(reversed(ys)):
        top = _TOP + _ROW * row
        text = f'<text x="{_LEFT - 8}" y="{top + _ROW / 2}" dy=".35em" class="end">'
        parts.append(f"{text}{escape(short(y))}</text>")
        for column, x in enumerate(xs):
            if (x, y) not in cells:
                continue
            place = (_LEFT + wide * column, top, wide, _ROW)
            parts.append(_cell(place, cells[x, y], share, (x, y) == chosen))
    bottom = _TOP + _ROW * len(ys)
    for column, x in enumerate(xs):
        at = _LEFT + wide * (column + 0.5)
        text = f'<text x="{at:.1f}" y="{bottom + 17}" class="mid">'
        parts.append(f"{text}{escape(short(x))}</text>")
    middle = _LEFT + wide * len(xs) / 2
    parts.append(f'<text x="{middle:.1f}" y="{height - 6}" class="mid">{escape(x_name)}</text>')
    parts.append(f'<text x="2" y="14" class="name">{escape(y_name)}</text>')
    head = f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img"'
    drawn = f'{head} aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return drawn + _table(axes, cells, chosen)


def _table(
    axes: tuple[tuple[str, Sequence[float]], tuple[str, Sequence[float]]],
    cells: Mapping[tuple[float, float], float | str],
    chosen: tuple[float, float] | None,
) -> str:
    """Return what a map shows as a table, its rows in the map's order."""
    (x_name, xs), (y_name, ys) = axes

    def text(place: tuple[float, float]) -> str:
        value = cells.get(place, "–")
        told = value if isinstance(value, str) else _figure(value)
        return f"{told} (chosen)" if place == chosen else told

    heads = [f"{y_name} ↓ {x_name} →", *(f"{x_name} {short(x)}" for x in xs)]
    rows = [[f"{y_name} {short(y)}", *(text((x, y)) for x in xs)] for y in reversed(ys)]
    return f"<details><summary>As a table</summary>{table(heads, rows)}</details>"


def _cell(
    place: tuple[float, float, float, float],
    value: float | str,
    share: Mapping[float, float],
    chosen: bool,
) -> str:
    x, y, wide, high = place
    box = f'x="{x + 1:.1f}" y="{y + 1:.1f}" width="{wide - 2:.1f}" height="{high - 2:.1f}" rx="4"'
    middle = f'x="{x + wide / 2:.1f}" y="{y + high / 2:.1f}" dy=".35em"'
    ring = f'<rect {box} class="chosen"/>' if chosen else ""
    if isinstance(value, str):
        return f'<rect {box} class="gone"/>{_words(value, x + wide / 2, y + high / 2)}{ring}'
    color = shade(share[value])
    fill = f"#{color[0]:02x}{color[1]:02x}{color[2]:02x}"
    ink = "#1d2430" if is_light(color) else "#ffffff"
    number = f'<text {middle} class="mid value" style="fill:{ink}">{_figure(value)}</text>'
    return f'<rect {box} fill="{fill}"/>{number}{ring}'


def _figure(value: float) -> str:
    """Return a number with one decimal: all in a map have as many, or they look of unequal weight."""
    return f"{value:.1f}"


def _words(text: str, x: float, y: float) -> str:
    """Return words below each other around a place: side by side they are wider than a cell."""
    words = text.split()
    first = y - _LINE * (len(words) - 1) / 2
    return "".join(
        f'<text x="{x:.1f}" y="{first + _LINE * number:.1f}" dy=".35em" class="mid">'
        f"{escape(word)}</text>"
        for number, word in enumerate(words)
    )
