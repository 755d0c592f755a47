"""Folders given to a command: unusable ones are reported at once, in one line."""

import errno
import json
import os
import shlex
from pathlib import Path

import pytest
from command import COMMANDS, error_of, wsam_command

from wsam.cli._files import staged

FOLDERS = [
    (name, option)
    for name, command in COMMANDS.items()
    for parameter in command.params
    for option in parameter.opts
    if option in {"--out", "--results"} and name != "report"  # its --out is a file
]


def arguments(name: str) -> list[str]:
    """Return placeholders for the required arguments of a command."""
    return ["x"] * sum(parameter.required for parameter in COMMANDS[name].params)


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("content")
    for name, option in FOLDERS:
        line = error_of(*name.split(), *arguments(name), option, file)
        assert f"{file}' is a file" in line or f"{file} is a file, not a folder" in line
        below = error_of(*name.split(), *arguments(name), option, file / "below")
        assert "is a file" in below or "does not exist" in below
    assert file.read_text() == "content"


def test_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    for name, option in FOLDERS:
        if option == "--out":
            line = error_of(*name.split(), *arguments(name), "--out", tmp_path / "new" / "out")
            assert line == f"wsam: no permission to write to {tmp_path}\n"
    assert not list(tmp_path.iterdir())


def test_a_finished_run_in_a_read_only_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split("train --model mlp --epochs 1 --train-limit 64 --device cpu")
    wsam_command(*words, "--out", tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    assert "already finished" in wsam_command(*words, "--out", tmp_path).stdout
    table = ("paper", "run", "cifar", "--smoke", "--only", "nothing")
    assert "no permission" not in error_of(*table, "--out", tmp_path)


def test_the_default_folder_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smoke").touch()
    for words in ("paper run cifar", "sweep cifar"):
        assert error_of(*words.split(), "--smoke") == "wsam: smoke is a file, not a folder\n"


def test_out_and_results_are_aliases_where_they_name_the_same_folder(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    for name, option in FOLDERS:
        if name.split()[0] not in {"paper", "sweep"}:
            continue
        (alias,) = {"--out", "--results"} - {option}
        assert "is a file" in error_of(*name.split(), *arguments(name), alias, file)
        text = wsam_command(*name.split(), "--help").stdout
        assert f"  {option} <" in text
        assert f"{alias} " not in text


def test_relative_paths_with_spaces_and_non_ascii_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = "my runs/données 中"
    quick = "--model mlp --epochs 1 --train-limit 64 --test-limit 20 --device cpu --keep-checkpoint"
    trained = json.loads(wsam_command("train", *quick.split(), "--json", "--out", out).stdout)
    assert Path(trained["record"]).is_file()
    wsam_command("report", out)
    page = tmp_path / out / "report.html"
    assert "données 中" in page.read_text(encoding="utf-8")
    words = ("curvature", trained["record"], "--samples", 20, "--device", "cpu", "--out", out)
    wsam_command(*words)
    assert (tmp_path / out / "curvature.json").is_file()


def test_a_full_disk(tmp_path: Path) -> None:
    """The file that was there is kept."""
    (tmp_path / "figures.json").write_text("old")

    def write() -> None:
        with staged(tmp_path) as staging:
            (staging / "figures.json").write_text("new")
            raise OSError(errno.ENOSPC, "No space left on device")  # as of write()

    with pytest.raises(OSError, match="No space left"):
        write()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
