"""The files that the names in a run refer to; their digest is part of the run's key."""

from __future__ import annotations

import hashlib
from pathlib import Path

from wsam.lab.files import file_sha256
from wsam.lab.user_code import is_code, source_file

_DIGITS = 12


def named_files(name: str, folder: Path | None = None) -> list[Path]:
    """Return the files of a function, a table, a text or a Hugging Face folder; no others have any.

    A text that does not exist is searched in `folder`.

    Of a Hugging Face folder these are the small files with the fingerprints of its splits. Image
    folders are identified by their path alone.

    Raises:
        FileNotFoundError: There is no such file.
    """
    if is_code(name):
        return [source_file(name)]
    kind, _, rest = name.partition(":")
    path = Path(rest)
    if kind == "table":
        return table_files(path)
    if kind == "text":
        return [text_file(path, folder)]
    if kind == "hf":
        if not path.is_dir():
            raise FileNotFoundError(f"there is no folder {path.absolute()}")
        found = sorted(path.glob("**/state.json"))
        if not found:
            raise FileNotFoundError(
                f"{path.absolute()} was not written by save_to_disk of Hugging Face's datasets"
            )
        return found
    return []


def text_file(path: Path, folder: Path | None = None) -> Path:
    """Return the path of a text, which may be relative to the data folder.

    Raises:
        FileNotFoundError: There is no such file.
    """
    for found in (path, *([] if folder is None else [folder / path])):
        if found.is_file():
            return found
    raise FileNotFoundError(f"there is no file {path.absolute()}")


def table_files(path: Path) -> list[Path]:
    """Return the file of a table, or the two files of a folder, training rows first.

    Raises:
        FileNotFoundError: There is no such file.
    """
    if path.is_file():
        return [path]
    for suffix in (".csv", ".parquet"):
        pair = [path / f"{split}{suffix}" for split in ("train", "test")]
        if all(part.is_file() for part in pair):
            return pair
    if path.is_dir():
        raise FileNotFoundError(
            f"the folder {path} must contain train.csv and test.csv, or train.parquet and test.parquet"
        )
    raise FileNotFoundError(f"there is no file {path.absolute()}")


def digest(name: str, folder: Path | None = None) -> str | None:
    """Return twelve digits of the SHA-256 of the files of a name; None if it has no files.

    Raises:
        FileNotFoundError: A file does not exist.
    """
    digests = [file_sha256(path) for path in named_files(name, folder)]
    if len(digests) < 2:
        return digests[0][:_DIGITS] if digests else None
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:_DIGITS]
