"""Records: valid JSON, named by the key, never half there."""

import json
from pathlib import Path

import pytest
from recorded import recorded

from wsam.lab import records
from wsam.lab.files import BusyError
from wsam.lab.run import Run

RUN = Run(method="vanilla", epochs=1)


def record(**changes):
    row = {"epoch": 1, "train_loss": 0.5, "test_error": 7.0}
    plain = {"key": RUN.key, "status": "finished", "settings": RUN.to_dict(), "curve": [row]}
    return plain | changes


def test_write_and_read(tmp_path):
    assert records.read(tmp_path, RUN) is None
    path = records.write(tmp_path, RUN, record())
    assert path.name == f"{RUN.key}.json"
    assert records.read(tmp_path, RUN) == record()
    assert recorded(tmp_path) == [record()]
    assert records.final_error(record()) == 7.0
    assert Run.from_dict(records.read_file(path)["settings"]) == RUN


def test_numbers_that_are_not_finite_become_null(tmp_path):
    row = {"epoch": 1, "train_loss": float("nan"), "test_error": float("inf"), "lr": 1e-9}
    path = records.write(tmp_path, RUN, record(status="failed", curve=[row], x=(float("-inf"), 1)))

    def forbidden(word):
        raise AssertionError(word)

    read = json.loads(path.read_text(), parse_constant=forbidden)
    assert read["curve"] == [{"epoch": 1, "train_loss": None, "test_error": None, "lr": 1e-9}]
    assert read["x"] == [None, 1]
    assert records.final_error(read) is None


def test_an_epoch_is_a_line(tmp_path):
    rows = [{"epoch": n, "test_error": 1.5} for n in (1, 2, 3)]
    path = records.write(tmp_path, RUN, record(curve=rows))
    lines = [line for line in path.read_text().splitlines() if '"epoch"' in line]
    assert [json.loads(line.strip().rstrip(",")) for line in lines] == rows


def test_other_files_in_the_folder_are_let_be(tmp_path):
    records.write(tmp_path, RUN, record())
    (tmp_path / "notes.json").write_text("not json")
    assert len(recorded(tmp_path)) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON; remove it"),
        ('{"key": "', "not valid JSON"),
        ("[1]", "is not a record"),
        ('{"key": "x", "status": "finished"}', "it needs key, status, settings, curve"),
        (json.dumps(record(status="fine")), "'fine': it must be finished or failed"),
        (json.dumps(record(curve=[])), "holds no epoch"),
        (json.dumps(record(curve=["x"])), "holds an epoch that is damaged"),
        (json.dumps(record(curve=[{"epoch": 1}])), "holds an epoch that is damaged"),
        (json.dumps(record(key="0" * 12)), "record of another run"),
    ],
)
def test_what_is_no_record_is_named(tmp_path, text, words):
    records.record_path(tmp_path, RUN).write_text(text)
    with pytest.raises(ValueError, match=words) as raised:
        records.read(tmp_path, RUN)
    assert RUN.key in str(raised.value)
    assert "it to run again" in str(raised.value) or "it away to run again" in str(raised.value)


def test_looking_whether_a_run_is_free_makes_nothing(tmp_path):
    records.check_free(tmp_path, RUN)
    assert not list(tmp_path.iterdir())
    with records.claim(tmp_path, RUN), pytest.raises(BusyError):
        records.check_free(tmp_path, RUN)
    records.check_free(tmp_path, RUN)


def test_text_cannot_break_out(tmp_path):
    path = records.write(tmp_path, RUN, record(failure='"</script><b>é'))
    assert records.read_file(path)["failure"] == '"</script><b>é'


def test_names_of_records():
    for name in (f"{RUN.key}.json", RUN.key):
        assert records.is_named_by_key(Path(name))
    for name in (f"{RUN.key}.minimum.json", f"{RUN.key}0.json", "notes.json", RUN.key.upper()):
        assert not records.is_named_by_key(Path(name))
