"""Colours of methods and their tones: seen on their ground, told apart, of the method's hue."""

import colorsys
import re
from importlib.resources import files
from itertools import pairwise

import pytest

from wsam import looks
from wsam.looks import GROUNDS, LOOKS, tones

CASES = [(method, scheme) for method in LOOKS for scheme in GROUNDS]


def luminance(color):
    """Return WCAG's relative luminance, by its own words."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def hue(color):
    return colorsys.rgb_to_hls(*(int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)))[0]


@pytest.mark.parametrize(("method", "scheme"), CASES)
def test_tones_are_seen_and_told_apart(method, scheme):
    found = tones(getattr(LOOKS[method], scheme), GROUNDS[scheme])
    ratios = [contrast(tone, GROUNDS[scheme]) for tone in found]
    assert len(found) == looks.TONES
    assert ratios[0] >= 3, "WCAG asks this of lines"
    assert all(contrast(one, other) > 1.4 for one, other in pairwise(found))
    assert ratios == sorted(ratios)


@pytest.mark.parametrize(("method", "scheme"), CASES)
def test_tones_keep_the_hue(method, scheme):
    color = getattr(LOOKS[method], scheme)
    for tone in tones(color, GROUNDS[scheme]):
        away = abs(hue(tone) - hue(color))
        assert min(away, 1 - away) < 0.035


@pytest.mark.parametrize("scheme", GROUNDS)
def test_a_method_alone_is_seen_too(scheme):
    for look in LOOKS.values():
        assert contrast(getattr(look, scheme), GROUNDS[scheme]) >= 3


def test_the_grounds_are_those_of_the_page():
    style = files("wsam.report").joinpath("assets", "report.css").read_text(encoding="utf-8")
    assert re.findall(r"--card: (#[0-9a-f]{6})", style) == [GROUNDS["light"], GROUNDS["dark"]]
