"""Colors of methods and their shades: visible, distinguishable, of the same hue."""

import colorsys
import re
from importlib.resources import files
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

import wsam
from wsam._utils import plot_style
from wsam._utils.plot_style import BACKGROUNDS, METHOD_STYLES, shades, variant_name

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
    """Colors are defined once; no two styles share dashes."""
    assert set(wsam.METHODS) <= set(METHOD_STYLES)
    styles = set(METHOD_STYLES.values())
    assert len({style.dashes for style in styles}) == len(styles)
    colors = {c for style in styles for c in (style.light, style.dark, style.printed) if c}
    for path in Path(wsam.__file__).parent.rglob("*"):
        if path.suffix in {".py", ".css", ".js", ".html"} and path.name != "plot_style.py":
            again = [color for color in colors if color in path.read_text().lower()]
            assert not again, f"{path} repeats {again}"


def test_colors_are_defined_in_one_place():
    styles = METHOD_STYLES.values()
    colors = {c for s in styles for c in (s.light, s.dark, s.printed) if c}
    for path in Path(plot_style.__file__).parent.rglob("*"):
        if path.suffix in {".py", ".css", ".js", ".html"} and path.name != "plot_style.py":
            repeated = [color for color in colors if color in path.read_text().lower()]
            assert not repeated, path


# Machado, Oliveira and Fernandes (2009), severity 1, for linear RGB.
DEFICIENCIES = {
    "none": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
TO_OKLAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]


def oklab(color, deficiency):
    parts = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(DEFICIENCIES[deficiency]) @ linear, 0, 1)
    return np.array(TO_OKLAB) @ np.cbrt(np.array(TO_CONES) @ seen)


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
@pytest.mark.parametrize("scheme", BACKGROUNDS)
def test_colors_differ_for_color_blind_readers(scheme, deficiency):
    """By 0.04 in OKLab; 0.02 is just noticeable."""
    styles = {id(style): style for style in METHOD_STYLES.values()}.values()
    seen = {style.title: oklab(getattr(style, scheme), deficiency) for style in styles}
    close = [
        (one, other)
        for one, other in combinations(seen, 2)
        if np.linalg.norm(seen[one] - seen[other]) < 0.04
    ]
    assert not close


def test_variants_have_a_style_of_their_own():
    assert variant_name("wsam", {"reuse": True, "every": 5}) == "wsam_reuse"
    assert variant_name("wsam", {"reuse": False}) == "wsam"
    assert variant_name("sam", {"max_norm": 1.0}) == "sam"
    planned = ("looksam", "vasso", "friendly_sam", "msam", "wsam_reuse")
    assert set(planned) <= set(METHOD_STYLES)
