"""Tables in Markdown files that are generated from records.

Two comments mark a table; the text between them is generated::

    <!-- wsam paper table cifar --only "ResNet18/*" -->
    <!-- end -->

Here the marker is ``wsam paper table``; the words after it select the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from wsam.lab.files import write_atomic

Render = Callable[[str], str]
"""Returns the Markdown of a table, given the words after its marker."""


def find_markers(text: str, marker: str) -> list[str]:
    """Return the words after each occurrence of a marker."""
    return [found["words"] for found in _pattern(marker).finditer(text)]


def fill_tables(text: str, marker: str, render: Render) -> str:
    """Return a text with all marked tables generated again.

    Args:
        text: Markdown.
        marker: The first words of the tables' comments.
        render: Generates a table.
    """

    def fill(found: re.Match[str]) -> str:
        return f"{found['begin']}\n\n{render(found['words']).strip()}\n\n<!-- end -->"

    return _pattern(marker).sub(fill, text)


def update_tables(path: Path, marker: str, render: Render, check: bool = False) -> bool:
    """Generate all marked tables of a file again and return whether they changed.

    Args:
        path: The file.
        marker: The first words of the tables' comments.
        render: Generates a table.
        check: Do not write the file.

    Raises:
        ValueError: The file has no such marker.
    """
    text = path.read_text(encoding="utf-8")
    if not find_markers(text, marker):
        raise ValueError(f"{path} has no line '<!-- {marker} ... -->' with its '<!-- end -->'")
    new = fill_tables(text, marker, render)
    if new != text and not check:
        write_atomic(path, new.encode())
    return new != text


def _pattern(marker: str) -> re.Pattern[str]:
    begin = rf"(?P<begin><!-- {re.escape(marker)} (?P<words>[^\n]*?) -->)"
    return re.compile(begin + r".*?<!-- end -->", re.DOTALL)
