"""HTML pages from jinja2 templates.

Autoescaping is on: text from records is untrusted and stays inert.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from wsam._utils.plot_style import BACKGROUNDS, METHOD_STYLES, shades

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_NOT_A_BYTE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Surrogates that `surrogateescape` cannot encode. A damaged record may contain them."""


def render(template: str, **context: Any) -> Markup:
    """Return a template filled with values, as safe HTML.

    Args:
        template: Its path in the `wsam` package, such as ``report/templates/page.html``.
        **context: The values. Plain strings are escaped; `markupsafe.Markup` is inserted as it is.
    """
    from markupsafe import Markup

    return Markup(_environment().get_template(template).render(context))


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("wsam", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}  # and keep the order of keys
    environment.globals["method_colors"] = {scheme: method_colors(scheme) for scheme in BACKGROUNDS}
    return environment


def method_colors(scheme: str) -> dict[str, str]:
    """Return the colors of all methods and their shades by CSS variable: ``wsam``, ``wsam_0``, ...

    Args:
        scheme: "light" or "dark".
    """
    found = {}
    for method, style in METHOD_STYLES.items():
        color = getattr(style, scheme)
        found[method] = color
        for number, shade in enumerate(shades(color, BACKGROUNDS[scheme])):
            found[f"{method}_{number}"] = shade
    return found


def to_unicode(text: str) -> str:
    """Return text that can be encoded as UTF-8; what is not text becomes �.

    Python decodes the bytes of a file name that the locale cannot decode to single surrogates. Most
    often these bytes are UTF-8.
    """
    kept = _NOT_A_BYTE.sub("\ufffd", text).encode("utf-8", "surrogateescape")
    return kept.decode("utf-8", "replace")
