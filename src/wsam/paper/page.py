"""Pages whose tables are made from records: no figure in them is typed by hand.

A page marks the place of a table by two comments; what stands between them is made anew::

    <!-- wsam paper table cifar --only "ResNet18/*" -->
    <!-- end -->
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

from wsam.lab.files import write_atomic

_BLOCK = re.compile(
    r"(<!-- wsam paper table (?P<words>[^\n]*?) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL
)

Render = Callable[[list[str]], str]
"""Makes the Markdown of a table out of the words after ``wsam paper table``."""


def renewed(text: str, render: Render) -> str:
    """Return a page with all of its tables made anew.

    Args:
        text: The page.
        render: Makes a table.
    """

    def fill(block: re.Match[str]) -> str:
        made = render(shlex.split(block["words"]))
        return f"{block[1]}\n{made.strip()}\n\n{block[4]}"

    return _BLOCK.sub(fill, text)


def renew(path: Path, render: Render, check: bool = False) -> bool:
    """Make a page's tables anew; return whether that changed it.

    Args:
        path: The page.
        render: Makes a table.
        check: Write nothing.

    Raises:
        ValueError: The page holds no table.
    """
    text = path.read_text(encoding="utf-8")
    if not _BLOCK.search(text):
        raise ValueError(
            f"{path} has no line '<!-- wsam paper table NAME -->' with its '<!-- end -->'"
        )
    new = renewed(text, render)
    if new != text and not check:
        write_atomic(path, new.encode())
    return new != text
