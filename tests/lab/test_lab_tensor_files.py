"""Files that are not checkpoints: a one-line error, and code is never executed."""

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

from wsam.lab import tensor_files
from wsam.lab.checkpoint import DamagedError, load_state
from wsam.lab.files import sha256
from wsam.lab.loaded_model import read_checkpoint
from wsam.lab.run import Run

# Valid opcodes get further in an unpickler than random bytes.
OPCODES = st.sampled_from([bytes([code]) for code in b"()]}.qhKXcNTFGULsutRoiBM\n\x80\x8a0123"])


class Code:
    """A class that weights_only refuses to load."""


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


def refusal_reason(data: bytes) -> str:
    """Return why bytes are refused; empty if they can be loaded."""
    try:
        tensor_files.load_tensors(data)
    except tensor_files.NotTensorsError as error:
        return str(error)
    return ""


@given(st.binary() | st.lists(OPCODES).map(b"".join))
@example(b"hello")
@example(b"[run]\nmethod = 1\n")
@example(b"\x80\x02a.")
def test_arbitrary_bytes_are_refused_in_one_line(data):
    reason = refusal_reason(data)
    assert "weights_only" not in reason
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it is damaged, or was not written by torch.save"),
        (b"[run]\nmethod = 1\n", "it is damaged, or was not written by torch.save"),
        (pickle.dumps({"a": [1]}), "it is damaged, or was not written by torch.save"),
        (saved({"a": torch.ones(9)})[:-40], "it is damaged, or was not written by torch.save"),
        (
            archive("a/version", "a/constants.pkl"),
            "it is damaged, or was not written by torch.save",
        ),
        (saved({"a": Code()}), f"it contains {__name__}.Code, which cannot be loaded safely"),
    ],
    ids=["empty", "toml", "pickle", "cut", "script", "code"],
)
def test_the_error_states_the_reason(tmp_path, data, reason):
    path = tmp_path / "other.toml"
    path.write_bytes(data)
    line = error_of("curvature", path, "--device", "cpu")
    assert line == f"wsam: {path} is not a file of tensors: {reason}\n"


@pytest.mark.parametrize("data", [b"hello", b"[run]\n", b"\x80\x02a."])
def test_invalid_data_with_a_matching_manifest_is_damaged(tmp_path, data):
    path = tmp_path / "000001.pt"
    path.write_bytes(data)
    manifest = {"file": path.name, "bytes": len(data), "sha256": sha256(data)}
    path.with_suffix(".json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedError, match="does not contain tensors and primitives only: it "):
        load_state(path)


def save(folder: Path, value) -> Path:
    (folder / "state.pt").write_bytes(saved(value))
    return folder / "state.pt"


@pytest.mark.parametrize("name", ["first try", "[1]", 7])
def test_another_meaning_of_the_key_run_is_ignored(tmp_path, name):
    state, run = read_checkpoint(save(tmp_path, {"run": name, "model": {"w": torch.ones(1)}}))
    assert (list(state), run) == (["w"], None)
    ours = {"run": Run().canonical, "model": {"w": torch.ones(1)}}
    assert read_checkpoint(save(tmp_path, ours))[1] == Run()


@pytest.mark.parametrize("state", [{0: torch.ones(1)}, {"w": torch.ones(1, dtype=torch.complex64)}])
def test_tensors_without_names_and_complex_ones_are_refused(tmp_path, state):
    with pytest.raises(ValueError, match="a state dict of named real tensors"):
        read_checkpoint(save(tmp_path, state))


def test_memory_errors_are_not_reported_as_damage(monkeypatch):
    def out_of_memory(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(torch, "load", out_of_memory)
    with pytest.raises(MemoryError):
        tensor_files.load_tensors(saved({"w": torch.zeros(2)}))


def test_a_truncated_archive_is_damaged(tmp_path):
    """torch raises OSError for a large one."""
    path = tmp_path / "cut.pt"
    whole = saved({f"w{number}": torch.ones(500) for number in range(20)})
    for share in (0.1, 0.3, 0.5, 0.9):
        path.write_bytes(whole[: int(share * len(whole))])
        line = error_of("curvature", path, "--device", "cpu")
        reason = "it is damaged, or was not written by torch.save"
        assert line == f"wsam: {path} is not a file of tensors: {reason}\n"


def test_a_device_is_not_read():
    with pytest.raises(ValueError, match="/dev/null is not a regular file"):
        read_checkpoint(Path("/dev/null"))
