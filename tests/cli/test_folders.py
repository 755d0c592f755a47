"""Folders that a command is given: what cannot be used is told at once, in one line, by name."""

import tempfile
from pathlib import Path

import pytest
from command import COMMANDS, WRITES_ONE_FILE, error_of, wsam_command

from wsam.cli import _files
from wsam.lab.files import sentence

FOLDERS = [
    (name, option)
    for name, command in COMMANDS.items()
    for parameter in command.params
    for option in parameter.opts
    if option in {"--out", "--results"} and name not in WRITES_ONE_FILE
]
WRITTEN = [name for name, option in FOLDERS if option == "--out"]


def _arguments(name: str) -> list[str]:
    """Words in the place of the arguments that a command must have."""
    return ["x"] * sum(parameter.required for parameter in COMMANDS[name].params)


@pytest.mark.parametrize(("name", "option"), FOLDERS)
@pytest.mark.parametrize("inside", ["", "deeper"])
def test_a_folder_that_is_a_file_is_told_at_once(
    name: str, option: str, inside: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    line = error_of(*name.split(), *_arguments(name), option, file / inside)
    assert f"{file} is a file" in line
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "option"), [pair for pair in FOLDERS if pair[0].split()[0] in {"paper", "sweep"}]
)
def test_the_folder_of_the_records_has_either_name(name: str, option: str, tmp_path: Path) -> None:
    """What one verb fills as --out another reads as --results; help names one of the two."""
    file = tmp_path / "file"
    file.write_text("mine")
    (other,) = {"--out", "--results"} - {option}
    assert f"{file} is a file" in error_of(*name.split(), *_arguments(name), other, file)
    said = wsam_command(*name.split(), "--help").stdout
    assert f"  {option} <path>" in said
    assert f"{other} " not in said


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("inside", ["", "deeper/still"])
def test_a_folder_that_cannot_be_written_to_is_told_at_once(
    name: str, inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of a folder without permission, for root may write anywhere."""

    def refuse(*given: object, dir: Path, **named: object) -> str:
        raise PermissionError(13, "Permission denied", f"{dir}/{_files.PREFIX}abc")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    folder = tmp_path / inside
    line = error_of(*name.split(), *_arguments(name), "--out", folder)
    assert f"nothing can be written into {tmp_path}: permission denied (see" in line
    assert not inside or f"{folder} cannot be made" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc on this system")
@pytest.mark.parametrize("name", WRITTEN)
def test_a_folder_that_cannot_be_made_is_told_at_once(name: str) -> None:
    line = error_of(*name.split(), *_arguments(name), "--out", "/proc/runs")
    assert "/proc/runs cannot be made: nothing can be written into /proc: the system" in line


@pytest.mark.parametrize("words", ["paper run cifar", "sweep cifar"])
def test_so_is_the_folder_that_is_not_named(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smoke").write_text("mine")
    assert error_of(*words.split(), "--smoke") == "wsam: smoke is a file; name a folder\n"


def test_reading_needs_no_folder_to_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "mkdtemp", None)
    assert "cifar" in wsam_command("paper", "list", "--results", tmp_path).stdout


def test_looking_leaves_nothing(tmp_path: Path) -> None:
    assert _files.as_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert _files.as_folder(None) is None
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_lost_later_is_named_without_our_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object, dir: Path, **named: object) -> str:
        raise OSError(28, "No space left on device", f"{dir}/{_files.PREFIX}abc")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with (
        pytest.raises(OSError, match=r"nothing can be written into .*: no space left") as caught,
        _files.together(tmp_path),
    ):
        pass
    assert sentence(caught.value) == f"nothing can be written into {tmp_path}: " + (
        "no space left on device"
    )
