"""The report as one HTML text: no network, no scripts, light and dark."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from wsam.lab.files import write_atomic
from wsam.plot_style import BACKGROUNDS, METHOD_STYLES, SHADE_COUNT, shades, with_colors
from wsam.report import sections
from wsam.report.gather import Folder, gather
from wsam.report.html import Section, escape
from wsam.report.labels import experiments, named

_NO_BYTES = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Surrogates that stand for no byte: a damaged record may hold them."""
_TONE_ENDS = tuple(f"_{number}" for number in range(SHADE_COUNT))


def page(
    folder: Folder,
    *,
    title: str | None = None,
    lead: str | None = None,
    first: Sequence[Section] = (),
    extra: Sequence[Section] = (),
    names: Mapping[str, str] | None = None,
    tables: bool = True,
) -> str:
    """Return the report on a results folder.

    Args:
        folder: As `gather` returns it.
        title: Its heading; default: the folder's name.
        lead: HTML below the heading; default: how many runs there are.
        first: Sections that come before the experiments.
        extra: Sections that come after the experiments.
        names: Names of one's own for some groups, by `gather.group_key`.
        tables: Whether each experiment begins with the table of its groups.
    """
    found = experiments(folder.groups, names)
    optional = (sections.beside_paper(folder), sections.troubles(folder))
    parts: list[Section | None] = [*first, *(sections.experiment(one, tables) for one in found)]
    parts += [*extra, *optional, sections.environments(folder.results)]
    parts += [sections.reproduce(found)] if found else []
    body = "".join(part.html for part in parts if part is not None)
    heading = title or f"Results in {named(folder.path)}"
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    text = _asset("report.html")
    for mark, value in (
        ("/*STYLE*/", _style()),
        ("<!--TITLE-->", escape(heading)),
        ("<!--LEAD-->", lead or sections.overview(folder)),
        ("<!--MADE-->", made),
        ("<!--BODY-->", body),  # last: nothing in it is taken for a mark
    ):
        text = text.replace(mark, value)
    return _as_unicode(text)


def write(folder: Path, out: Path | None = None) -> tuple[Path, Folder]:
    """Write the report on a results folder; return its path and what was found.

    Args:
        folder: The results.
        out: The file; default ``report.html`` in the folder of the records, which of the
            demonstration is its folder ``runs``: its own report stays as it is.

    Example:
        >>> import tempfile
        >>> from wsam.lab.run import Run
        >>> from wsam.lab.train import train
        >>> results = Path(tempfile.mkdtemp())
        >>> _ = train(Run(method="sam", epochs=1, train_limit=64), results)
        >>> write(results)[0].name
        'report.html'
    """
    found = gather(folder)
    path = out or found.path / "report.html"
    write_atomic(path, page(found).encode())
    return path, found


def _as_unicode(text: str) -> str:
    """Return a text that can be written; what is no text, as in names of some folders, becomes �.

    Python keeps the bytes of a name that it cannot decode as single surrogates: where it cannot
    only because of the locale, these bytes are UTF-8 all the same.
    """
    kept = _NO_BYTES.sub("\ufffd", text).encode("utf-8", "surrogateescape")
    return kept.decode("utf-8", "replace")


def _style() -> str:
    """Return the style sheet, with a rule for every colour and every tone of it."""
    names = [f"{method}{end}" for method in METHOD_STYLES for end in ("", *_TONE_ENDS)]
    rules = (
        f".c-{name} {{ stroke: var(--{name}); }} .f-{name} {{ fill: var(--{name}); }}"
        for name in names
    )
    text = _asset("report.css").strip().replace("/*METHODS*/", "\n".join(rules))
    for scheme in BACKGROUNDS:
        text = text.replace(f"/*{scheme.upper()} TONES*/", _tones(scheme))
    return with_colors(text)


def _tones(scheme: str) -> str:
    """Return the declarations of all shades on a light or a dark page."""
    colors = {method: getattr(look, scheme) for method, look in METHOD_STYLES.items()}
    return " ".join(
        f"--{method}{end}: {tone};"
        for method, color in colors.items()
        for end, tone in zip(_TONE_ENDS, shades(color, BACKGROUNDS[scheme]), strict=True)
    )


def _asset(name: str) -> str:
    return files("wsam.report").joinpath("assets", name).read_text(encoding="utf-8")
