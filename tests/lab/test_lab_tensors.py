"""Files that are no checkpoints: one clear line each, and no advice to let code run."""

import io
import json
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from command import error_of
from hypothesis import example, given
from hypothesis import strategies as st

from wsam.lab import tensors
from wsam.lab.checkpoint import DamagedError, load_state
from wsam.lab.files import sha256
from wsam.lab.run import Run
from wsam.lab.subject import read_checkpoint

# What unpicklers do: these make whole programs of random bytes more often than random bytes do.
OPCODES = st.sampled_from([bytes([code]) for code in b"()]}.qhKXcNTFGULsutRoiBM\n\x80\x8a0123"])


class Code:
    """Stands for whatever a pickle would have to run code for."""


def saved(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def archive(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name in names:
            file.writestr(name, "3")
    return buffer.getvalue()


def said_of(data: bytes) -> str:
    """Say why bytes are refused; nothing where they are tensors, or primitives."""
    try:
        tensors.load(io.BytesIO(data))
    except tensors.NotTensorsError as error:
        return str(error)
    return ""


@given(st.binary() | st.lists(OPCODES).map(b"".join))
@example(b"hello")
@example(b"[run]\nmethod = 1\n")
@example(b"\x80\x02a.")
def test_no_bytes_make_a_traceback(data):
    said = said_of(data)
    assert "weights_only" not in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is empty"),
        (b"hello", "it was not written by torch.save"),
        (b"[run]\nmethod = 1\n", "it was not written by torch.save"),
        (bytes(range(255, 0, -1)), "it was not written by torch.save"),
        (pickle.dumps({"a": [1]}), "it is damaged, or was not written by torch.save"),
        (saved({"a": torch.ones(9)})[:-40], "it is damaged, or was not written by torch.save"),
        (archive("a.txt"), "it is damaged, or was not written by torch.save"),
        (
            archive("a/version", "a/constants.pkl"),
            "it is a TorchScript archive; save the model's state_dict() instead",
        ),
        (saved({"a": Code()}), f"it holds {__name__}.Code, and to load that means to run code"),
    ],
    ids=["empty", "word", "toml", "bytes", "pickle", "cut", "zip", "script", "code"],
)
def test_a_foreign_file_is_one_line_that_says_what_it_is(tmp_path, data, why):
    path = tmp_path / "foreign.toml"
    path.write_bytes(data)
    line = error_of("curvature", path, "--device", "cpu")
    assert line == f"wsam: {path} is not a file of tensors: {why}\n"


@pytest.mark.parametrize("data", [b"hello", b"[run]\n", b"\x80\x02a."])
def test_a_checkpoint_whose_manifest_fits_is_damaged_all_the_same(tmp_path, data):
    path = tmp_path / "000001.pt"
    path.write_bytes(data)
    manifest = {"file": path.name, "bytes": len(data), "sha256": sha256(data)}
    path.with_suffix(".json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedError, match="does not hold tensors and primitives alone: it "):
        load_state(path)


def test_a_missing_file_is_not_called_damaged(tmp_path):
    with pytest.raises(FileNotFoundError):
        tensors.load(tmp_path / "nothing.pt")


def kept(folder: Path, value) -> Path:
    (folder / "kept.pt").write_bytes(saved(value))
    return folder / "kept.pt"


@pytest.mark.parametrize("name", ["first try", "[1]", 7])
def test_what_others_call_a_run_is_not_taken_for_ours(tmp_path, name):
    state, run = read_checkpoint(kept(tmp_path, {"run": name, "model": {"w": torch.ones(1)}}))
    assert (list(state), run) == (["w"], None)
    ours = {"run": Run().canonical, "model": {"w": torch.ones(1)}}
    assert read_checkpoint(kept(tmp_path, ours))[1] == Run()


def test_tensors_without_names_are_no_state_dict(tmp_path):
    with pytest.raises(ValueError, match="names with their tensors"):
        read_checkpoint(kept(tmp_path, {0: torch.ones(1)}))


def test_memory_that_runs_out_says_nothing_of_the_file(tmp_path, monkeypatch):
    path = tmp_path / "weights.pt"
    torch.save({"w": torch.zeros(2)}, path)

    def scarce(*given, **more):
        raise MemoryError

    monkeypatch.setattr(torch, "load", scarce)
    with pytest.raises(MemoryError):
        tensors.load(path)


def test_an_archive_cut_in_the_middle_is_damaged(tmp_path):
    """Where it is large, torch calls it an invalid argument of the system."""
    path = tmp_path / "cut.pt"
    whole = saved({f"w{number}": torch.ones(500) for number in range(20)})
    for share in (0.1, 0.3, 0.5, 0.9):
        path.write_bytes(whole[: int(share * len(whole))])
        line = error_of("curvature", path, "--device", "cpu")
        why = "it is damaged, or was not written by torch.save"
        assert line == f"wsam: {path} is not a file of tensors: {why}\n"


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    path = kept(tmp_path, {"w": torch.ones(1)})

    def gone(*given, **more):
        path.unlink()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(torch, "load", gone)
    with pytest.raises(FileNotFoundError):
        tensors.load(path)


UNUSUAL = {
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.ones(3, device="meta"),
    "complex": torch.ones(3, dtype=torch.complex64),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_tensors_that_are_no_arrays_of_numbers_are_refused(tmp_path, kind):
    path = kept(tmp_path, {"v": torch.ones(1), "w": UNUSUAL[kind]})
    line = error_of("curvature", path, "--model", "mlp", "--data", "digits", "--device", "cpu")
    assert line == f"wsam: {path} cannot be measured: its 'w' is a {kind} tensor\n"
