"""The files that the names in a run refer to; their digest is part of the run's key."""

from __future__ import annotations

from pathlib import Path

from wsam.lab.files import file_sha256, sha256
from wsam.lab.user_code import is_code, source_file

_DIGITS = 12


def named_files(name: str, folder: Path | None) -> list[Path]:
    """Return the files whose contents identify data, a model, a metric or a method.

    These are the file of a function, a table or a text, and of a Hugging Face folder the small files
    with the fingerprints of its splits. An image folder is identified by its path, so it has none.

    Args:
        name: The name in a run.
        folder: The data folder, where a text is searched if its path does not exist.

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
    return _fingerprint_files(path) if kind == "hf" else []


def text_file(path: Path, folder: Path | None) -> Path:
    """Return the path of a text, which may be relative to the data folder.

    Raises:
        FileNotFoundError: There is no such file.
    """
    if path.is_file():
        return path
    if folder is not None and (folder / path).is_file():
        return folder / path
    raise FileNotFoundError(f"there is no file {path.absolute()}")


def _fingerprint_files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("**/state.json"))
    if not found:
        raise FileNotFoundError(
            f"{folder.absolute()} was not written by save_to_disk of Hugging Face's datasets"
        )
    return found


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
    raise FileNotFoundError(
        f"{path.absolute()} is neither a file, nor a folder with train.csv and test.csv, or .parquet"
    )


def digest(name: str, folder: Path | None = None) -> str | None:
    """Return twelve digits of the SHA-256 of the files of a name; None if it has no files.

    Raises:
        FileNotFoundError: A file does not exist.
    """
    digests = [file_sha256(path) for path in named_files(name, folder)]
    if len(digests) < 2:
        return digests[0][:_DIGITS] if digests else None
    return sha256("".join(digests).encode())[:_DIGITS]
