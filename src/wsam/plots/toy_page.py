"""The interactive page of the toy example: one file, no network, recomputed in the browser."""

import json
from dataclasses import asdict
from importlib.resources import files

from wsam.geometry import Adaptive, Fisher
from wsam.plot_style import with_colors
from wsam.plots.toy import LEVELS, REGION
from wsam.toy import RULES, Setting, places
from wsam.toy.landscape import BASIN_RADIUS, COMPONENTS


def toy_page() -> str:
    """Return the page as one self-contained HTML text.

    Everything the page computes with (the loss, its stationary points, the defaults) is taken from
    the library; the update itself is written a second time, in JavaScript, and a test holds the
    two to each other.
    """
    data = {
        "wells": [asdict(component) for component in COMPONENTS],
        "places": [asdict(place) for place in places()],
        "reach": BASIN_RADIUS,
        "adaptiveEta": Adaptive().eta,
        "fisherEta": Fisher().eta,
        "defaults": asdict(Setting()),
        "rules": RULES,
        "region": REGION,
        "levels": LEVELS,
    }
    page = _asset("toy.html")
    for mark, text in (
        ("/*STYLE*/", with_colors(_asset("toy.css"))),
        ("/*DATA*/", json.dumps(data, allow_nan=False)),
        ("/*MATH*/", _asset("toy_math.js")),
        ("/*MAP*/", _asset("toy_map.js")),
        ("/*VIEW*/", _asset("toy_view.js")),
    ):
        page = page.replace(mark, text.strip())
    return page


def _asset(name: str) -> str:
    return files("wsam.plots").joinpath("assets", name).read_text(encoding="utf-8")
