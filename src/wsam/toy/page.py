"""The interactive page of the toy example: one file, no network, computed in the browser."""

from dataclasses import asdict

from wsam._utils.html import render
from wsam.geometry import Adaptive, Fisher
from wsam.toy import RULES, Setting, places
from wsam.toy.landscape import BASIN_RADIUS, COMPONENTS
from wsam.toy.plot_trajectories import LEVELS, REGION


def toy_page() -> str:
    """Return the page as one self-contained HTML text.

    The loss, its stationary points and the defaults come from the library. The update is written a
    second time, in JavaScript; a test compares both.
    """
    data = {
        "components": [asdict(component) for component in COMPONENTS],
        "places": [asdict(place) for place in places()],
        "basinRadius": BASIN_RADIUS,
        "adaptiveEta": Adaptive().eta,
        "fisherEta": Fisher().eta,
        "defaults": asdict(Setting()),
        "rules": RULES,
        "region": REGION,
        "levels": LEVELS,
    }
    return render("toy/templates/toy.html", data=data)
