"""The records of a results folder, for tests that look at all of them."""

from pathlib import Path

from wsam.lab import records


def recorded(out: Path) -> list[records.Record]:
    """Return every record in a folder, in the order of their keys; measurements are none."""
    paths = sorted(filter(records.is_named_by_key, out.glob("*.json")))
    return [records.read_file(path) for path in paths]
