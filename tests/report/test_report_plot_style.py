"""Colors of methods and their shades: visible, distinguishable, of the same hue."""

import colorsys
import re
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import pytest

import wsam
from wsam import plot_style
from wsam.plot_style import BACKGROUNDS, METHOD_STYLES, shades

CASES = [(method, scheme) for method in METHOD_STYLES for scheme in BACKGROUNDS]


def luminance(color):
    """Return the relative luminance as WCAG defines it."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def hue(color):
    return colorsys.rgb_to_hls(*(int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)))[0]


@pytest.mark.parametrize(("method", "scheme"), CASES)
def test_shades_are_visible_and_distinguishable(method, scheme):
    found = shades(getattr(METHOD_STYLES[method], scheme), BACKGROUNDS[scheme])
    ratios = [contrast(shade, BACKGROUNDS[scheme]) for shade in found]
    assert len(found) == plot_style.SHADE_COUNT
    assert ratios[0] >= 3, "the minimum of WCAG for lines"
    assert all(contrast(one, other) > 1.4 for one, other in pairwise(found))
    assert ratios == sorted(ratios)


@pytest.mark.parametrize(("method", "scheme"), CASES)
def test_shades_keep_the_hue(method, scheme):
    color = getattr(METHOD_STYLES[method], scheme)
    for shade in shades(color, BACKGROUNDS[scheme]):
        away = abs(hue(shade) - hue(color))
        assert min(away, 1 - away) < 0.035


@pytest.mark.parametrize("scheme", BACKGROUNDS)
def test_the_color_of_a_method_is_visible(scheme):
    for style in METHOD_STYLES.values():
        assert contrast(getattr(style, scheme), BACKGROUNDS[scheme]) >= 3


def test_backgrounds_equal_those_of_the_page():
    style = files("wsam.report").joinpath("templates", "report.css").read_text(encoding="utf-8")
    assert re.findall(r"--card: (#[0-9a-f]{6})", style) == [
        BACKGROUNDS["light"],
        BACKGROUNDS["dark"],
    ]


def test_each_method_has_one_style():
    """Colours are defined once; no two styles share dashes."""
    assert set(wsam.METHODS) <= set(METHOD_STYLES)
    styles = set(METHOD_STYLES.values())
    assert len({style.dashes for style in styles}) == len(styles)
    colors = {c for style in styles for c in (style.light, style.dark, style.printed) if c}
    for path in Path(wsam.__file__).parent.rglob("*"):
        if path.suffix in {".py", ".css", ".js", ".html"} and path.name != "plot_style.py":
            again = [color for color in colors if color in path.read_text().lower()]
            assert not again, f"{path} repeats {again}"


def test_every_method_has_a_style_with_unique_dashes():
    assert set(wsam.METHODS) <= set(METHOD_STYLES)
    styles = set(METHOD_STYLES.values())
    assert len({style.dashes for style in styles}) == len(styles)


def test_colors_are_defined_in_one_place():
    styles = METHOD_STYLES.values()
    colors = {c for s in styles for c in (s.light, s.dark, s.printed) if c}
    for path in Path(plot_style.__file__).parent.rglob("*"):
        if path.suffix in {".py", ".css", ".js", ".html"} and path.name != "plot_style.py":
            repeated = [color for color in colors if color in path.read_text().lower()]
            assert not repeated, path
