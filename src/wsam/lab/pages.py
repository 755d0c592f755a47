"""Pages whose tables are made from records: no figure in them is typed by hand.

A page marks the place of a table by two comments; what stands between them is made anew::

    <!-- wsam paper table cifar --only "ResNet18/*" -->
    <!-- end -->

The mark here is ``wsam paper table``, the rest are the words that say which table.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from wsam.lab.files import write_atomic

Render = Callable[[str], str]
"""Makes the Markdown of a place out of the words after its mark."""


def places(text: str, mark: str) -> list[str]:
    """Return the words of all places with a mark."""
    return [found["words"] for found in _pattern(mark).finditer(text)]


def renewed(text: str, mark: str, render: Render) -> str:
    """Return a page with all of its marked places made anew.

    Args:
        text: The page.
        mark: What the places' comments begin with.
        render: Makes what stands there.
    """

    def fill(found: re.Match[str]) -> str:
        return f"{found['begin']}\n\n{render(found['words']).strip()}\n\n<!-- end -->"

    return _pattern(mark).sub(fill, text)


def renew(path: Path, mark: str, render: Render, check: bool = False) -> bool:
    """Make a page's marked places anew; return whether that changed it.

    Args:
        path: The page.
        mark: What the places' comments begin with.
        render: Makes what stands there.
        check: Write nothing.

    Raises:
        ValueError: The page has no such place.
    """
    text = path.read_text(encoding="utf-8")
    if not places(text, mark):
        raise ValueError(f"{path} has no line '<!-- {mark} ... -->' with its '<!-- end -->'")
    new = renewed(text, mark, render)
    if new != text and not check:
        write_atomic(path, new.encode())
    return new != text


def _pattern(mark: str) -> re.Pattern[str]:
    begin = rf"(?P<begin><!-- {re.escape(mark)} (?P<words>[^\n]*?) -->)"
    return re.compile(begin + r".*?<!-- end -->", re.DOTALL)
