"""What a method is called and how it is drawn: one table for all figures and pages."""

from __future__ import annotations

from dataclasses import dataclass


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
