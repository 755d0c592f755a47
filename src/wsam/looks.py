"""What a method is called and how it is drawn, and the look that all figures share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

INK = "#1d2430"
SOFT = "#5b6472"
SETTINGS: Any = {  # matplotlib types its names one by one
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": "#9aa1ab",
    "axes.labelcolor": SOFT,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    # The same figure is the same file: no random identifiers, text stays text.
    "svg.hashsalt": "wsam",
    "svg.fonttype": "none",
}
"""Of matplotlib, for every figure of the project."""


@dataclass(frozen=True)
class MethodLook:
    """Name, colours and dashes of a method.

    Args:
        title: What people read.
        light: Its colour on a light page.
        dark: Its colour on a dark page.
        dashes: Of its lines, as SVG writes them; empty for a whole line. No two methods share them,
            so that lines are told apart without colours.
        printed: Its colour in figures, where it is not `light`.
    """

    title: str
    light: str
    dark: str
    dashes: str
    printed: str | None = None


_BASE = MethodLook("SGD", "#6b7280", "#aab2bf", "2 4")
LOOKS = {
    "sgd": _BASE,  # as the toy example calls the base alone
    "vanilla": _BASE,  # as runs do, whatever the base
    # In figures SAM is light and GSAM dark: in the toy example one lies on the other's path.
    "sam": MethodLook("SAM", "#0b77bd", "#5db4f0", "7 5", printed="#59aee6"),
    "asam": MethodLook("ASAM", "#2f6f8f", "#83c5de", "14 4 6 4"),
    "fisher_sam": MethodLook("Fisher SAM", "#7a5230", "#d3a57c", "3 2 3 8"),
    "esam": MethodLook("ESAM", "#96740a", "#d9b64a", "9 3 2 3 2 3"),
    "gsam": MethodLook("GSAM", "#00805c", "#3ccfa0", "10 4 2 4", printed="#005c42"),
    "coupled_wsam": MethodLook("Coupled-WSAM", "#93318e", "#e08bdc", "16 4"),
    "wsam": MethodLook("WSAM", "#c94f00", "#ff914d", ""),
}
"""By the names of `wsam.METHODS`, in the order in which reports list them."""


def title(method: str) -> str:
    """Return what people call a method; one without a look has its name alone."""
    return LOOKS[method].title if method in LOOKS else method


GROUNDS = {"light": "#ffffff", "dark": "#1a202a"}
"""What reports draw on, by the reader's setting."""
_CONTRASTS = (3.1, 4.65, 7.0, 10.5)
"""Of the tones with the ground: 3 is the least at which lines are well seen, and equal ratios
look like equal steps."""
TONES = len(_CONTRASTS)
Light = tuple[float, float, float]


def tones(color: str, ground: str) -> list[str]:
    """Return a colour in several lightnesses, from the faintest to the strongest on a ground.

    Args:
        color: As ``#rrggbb``. Its hue stays.
        ground: What is drawn on, darker or lighter than all of them.

    Example:
        >>> tones("#c94f00", "#ffffff")
        ['#f86300', '#c74e00', '#9a3b00', '#702900']

    Reference:
        WCAG 2.2, contrast of graphical objects.
    """
    behind = luminance(_light(ground)) + 0.05
    on_light = behind > 0.5
    wanted = [behind / ratio if on_light else behind * ratio for ratio in _CONTRASTS]
    return [_text(_brought_to(_light(color), total - 0.05)) for total in wanted]


def luminance(light: Light) -> float:
    """Return how bright light of three primaries looks, from 0 to 1."""
    red, green, blue = light
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _brought_to(light: Light, wanted: float) -> Light:
    """Return light of the same hue and another luminance: less or more of it, then white added."""
    factor = min(wanted / luminance(light), 1 / max(light))
    red, green, blue = (factor * part for part in light)
    now = luminance((red, green, blue))
    white = (wanted - now) / (1 - now)
    return red + white * (1 - red), green + white * (1 - green), blue + white * (1 - blue)


def _light(color: str) -> Light:
    """Return the light of a colour: what sRGB's numbers stand for."""
    red, green, blue = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return _linear(red), _linear(green), _linear(blue)


def _linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4


def _text(light: Light) -> str:
    parts = (12.92 * p if p <= 0.0031308 else 1.055 * p ** (1 / 2.4) - 0.055 for p in light)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)
