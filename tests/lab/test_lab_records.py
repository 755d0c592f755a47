"""Records are valid JSON, named by the run's key, and checked when read."""

import json
import os
from pathlib import Path

import pytest
import torch
from recorded import as_recorded, recorded

from wsam.lab import environment, records
from wsam.lab.files import BusyError
from wsam.lab.run import Run

RUN = Run(method="vanilla", epochs=1)
OTHER = RUN.replace(seed=1)
ROW = {"epoch": 1, "train_loss": 0.5, "test_error": 7.0}


def record(**changes):
    return as_recorded(RUN, ROW) | changes


def without(name):
    return json.dumps({n: value for n, value in record().items() if n != name})


def with_settings(**settings):
    return record(settings=RUN.to_dict() | settings)


def test_write_and_read(tmp_path):
    assert records.read(tmp_path, RUN) is None
    path = records.write(tmp_path, RUN, record())
    assert path.name == f"{RUN.key}.json"
    assert records.read(tmp_path, RUN) == record()
    assert recorded(tmp_path) == [record()]
    assert records.final_error(record()) == 7.0
    assert Run.from_dict(records.read_file(path)["settings"]) == RUN


def test_non_finite_numbers_are_written_as_null(tmp_path):
    row = {"epoch": 1, "train_loss": float("nan"), "test_error": float("inf"), "lr": 1e-9}
    path = records.write(tmp_path, RUN, record(status="failed", curve=[row], x=(float("-inf"), 1)))

    def fail(constant):
        raise AssertionError(constant)

    read = json.loads(path.read_text(), parse_constant=fail)
    assert read["curve"] == [{"epoch": 1, "train_loss": None, "test_error": None, "lr": 1e-9}]
    assert read["x"] == [None, 1]
    assert records.final_error(read) is None


def test_one_line_per_epoch(tmp_path):
    rows = [{"epoch": n, "test_error": 1.5} for n in (1, 2, 3)]
    path = records.write(tmp_path, RUN, record(curve=rows))
    lines = [line for line in path.read_text().splitlines() if line.startswith('  {"epoch"')]
    assert [json.loads(line.strip().rstrip(",")) for line in lines] == rows


def test_other_files_in_the_folder_are_ignored(tmp_path):
    records.write(tmp_path, RUN, record())
    (tmp_path / "notes.json").write_text("not json")
    assert len(recorded(tmp_path)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON; remove it"),
        ('{"key": "', "not valid JSON"),
        ("[1]", "is not a record"),
        ("[" * 100_000, "not valid JSON"),
        ('{"key": "x", "status": "finished"}', "it needs format, key, title, status, settings"),
        (without("final"), "it needs"),
        (without("title"), "it needs"),
        (json.dumps(record(format=99)), "has format 99: this version reads format 1"),
        (json.dumps(record(status="fine")), "has status 'fine': it must be finished or failed"),
        (json.dumps(record(metric=["error"])), r"has metric \['error'\]: it must be a mapping"),
        (json.dumps(record(hardware="cpu")), "has hardware 'cpu': it must be a mapping"),
        (json.dumps(record(seconds=None)), "has seconds None: they must be a number"),
        (json.dumps(record(curve=[])), "contains an invalid epoch, or none"),
        (json.dumps(record(curve=["x"])), "contains an invalid epoch"),
        (json.dumps(record(curve=[{"epoch": 1}])), "contains an invalid epoch"),
        (json.dumps(record(curve=[ROW | {"epoch": None}, ROW])), "contains an invalid epoch"),
        (json.dumps(record(curve=[ROW | {"test_error": None}])), "lacks metrics of its last epoch"),
        (json.dumps(record(final="x")), "contains an invalid epoch"),
        (json.dumps(record(final=ROW | {"test_error": None})), "lacks metrics of its last epoch"),
        (json.dumps(record(settings=None)), "settings must be a mapping, got None"),
        (json.dumps(with_settings(speed=1)), "unknown setting 'speed'"),
        (json.dumps(with_settings(seed=1)), f"its settings have the key {OTHER.key}"),
        (json.dumps(record(key="0" * 12)), f"its settings have the key {RUN.key}"),
        (json.dumps(as_recorded(OTHER, ROW)), f"record of another run, {OTHER.key}"),
    ],
    ids=lambda text: text[-60:],
)
def test_invalid_records(tmp_path, text, message):
    records.record_path(tmp_path, RUN).write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        records.read(tmp_path, RUN)
    assert RUN.key in str(raised.value)
    assert "it to run again" in str(raised.value) or "it away to run again" in str(raised.value)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e400", "9" * 400, "9" * 5000])
def test_records_with_non_finite_numbers_are_invalid(tmp_path, number):
    path = records.record_path(tmp_path, RUN)
    for damaged in (record(curve=[ROW | {"test_error": "x"}]), record(hardware=["x"])):
        path.write_text(json.dumps(damaged).replace('"x"', number))
        with pytest.raises(ValueError, match="is not valid JSON"):
            records.read(tmp_path, RUN)


def test_an_epoch_may_lack_its_test_error(tmp_path):
    untested = record(curve=[ROW | {"test_error": None}, ROW | {"epoch": 2}])
    records.write(tmp_path, RUN, untested)
    assert records.read(tmp_path, RUN) == untested


def test_checking_a_lock_creates_no_files(tmp_path):
    records.check_unlocked(tmp_path, RUN)
    assert not list(tmp_path.iterdir())
    with records.lock_run(tmp_path, RUN), pytest.raises(BusyError):
        records.check_unlocked(tmp_path, RUN)
    records.check_unlocked(tmp_path, RUN)


def test_text_is_escaped(tmp_path):
    path = records.write(tmp_path, RUN, record(failure='"</script><b>é'))
    assert records.read_file(path)["failure"] == '"</script><b>é'


def test_is_named_by_key():
    for name in (f"{RUN.key}.json", RUN.key):
        assert records.is_named_by_key(Path(name))
    for name in (f"{RUN.key}.minimum.json", f"{RUN.key}0.json", "notes.json", RUN.key.upper()):
        assert not records.is_named_by_key(Path(name))


@pytest.mark.skipif(os.name == "nt", reason="needs pipes and /dev/zero")
def test_a_pipe_or_device_is_not_read(tmp_path):
    path = records.record_path(tmp_path, RUN)
    os.mkfifo(path)
    with pytest.raises(ValueError, match="is not a regular file; remove it to run again"):
        records.read(tmp_path, RUN)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="is not a regular file; remove it to run again"):
        records.read(tmp_path, RUN)


def test_a_link_to_a_record_is_read(tmp_path):
    path = records.write(tmp_path / "elsewhere", RUN, record())
    records.record_path(tmp_path, RUN).symlink_to(path)
    assert records.read(tmp_path, RUN) == record()


def test_control_characters_are_escaped(tmp_path):
    records.write(tmp_path, RUN, record(title="\x1b[2J\x9b1m\ttitle", failure=None))
    assert records.read(tmp_path, RUN)["title"] == r"\x1b[2J\x9b1m" + "\ttitle"


def test_hardware_says_whether_programs_share_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.delenv(environment.MPS_VARIABLE, raising=False)
    alone = {"hardware": environment.hardware(torch.device("cuda"))}
    assert records.has_own_device(alone)
    assert records.has_own_device({})
    monkeypatch.setenv(environment.MPS_VARIABLE, "/tmp/mps")
    assert not records.has_own_device({"hardware": environment.hardware(torch.device("cuda"))})
