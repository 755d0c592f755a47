"""The report as one HTML file: no network, no scripts, light and dark."""

from __future__ import annotations

from pathlib import Path

from wsam.lab.files import write_atomic
from wsam.report import sections
from wsam.report.elements import render_page
from wsam.report.experiment import experiment_section
from wsam.report.labels import experiments, folder_title
from wsam.report.paper_tables import paper_section
from wsam.report.results import Folder, gather


def page(folder: Folder) -> str:
    """Return the report on a results folder, given the result of `gather`."""
    found = experiments(folder.groups)
    parts = [
        *(experiment_section(one) for one in found),
        paper_section(folder),
        sections.problems_section(folder),
        sections.environment_section(folder.results),
        sections.reproduce_section(found) if found else None,
    ]
    return render_page(folder_title(folder.groups), sections.overview(folder), parts)


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
