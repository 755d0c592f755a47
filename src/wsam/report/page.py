"""The report as one HTML file: no network, no scripts, light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from wsam.lab.files import write_atomic
from wsam.report import sections
from wsam.report.elements import Section, render_page
from wsam.report.experiment import experiment_section
from wsam.report.labels import experiments, folder_title
from wsam.report.paper_tables import paper_section
from wsam.report.results import Folder, gather


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
        folder: The result of `gather`.
        title: The heading. Default: data, model and number of runs.
        lead: HTML below the heading. Default: the folder and what it contains.
        first: Sections before the experiments.
        extra: Sections after the experiments.
        names: Names that replace the generated ones of groups, by `results.group_key`.
        tables: Whether each experiment starts with the table of its groups.
    """
    from markupsafe import Markup

    found = experiments(folder.groups, names)
    parts = [
        *first,
        *(experiment_section(one, tables) for one in found),
        *extra,
        paper_section(folder),
        sections.problems_section(folder),
        sections.environment_section(folder.results),
        sections.reproduce_section(found) if found else None,
    ]
    introduction = sections.overview(folder) if lead is None else Markup(lead)
    return render_page(title or folder_title(folder.groups), introduction, parts)


def write(folder: Path, out: Path | None = None) -> tuple[Path, Folder]:
    """Write the report on a results folder; return its path and the contents of the folder.

    Args:
        folder: The results.
        out: The file. Default: ``report.html`` in the folder of the records. For `wsam demo`
            that is its subfolder ``runs``, so that its own report is kept.

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
