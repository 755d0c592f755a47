"""Records: valid JSON, named by the key, never half there."""

import json
from pathlib import Path

import pytest
from recorded import as_recorded, recorded

from wsam.lab import records
from wsam.lab.files import BusyError
from wsam.lab.run import Run

RUN = Run(method="vanilla", epochs=1)
OTHER = RUN.replace(seed=1)


ROW = {"epoch": 1, "train_loss": 0.5, "test_error": 7.0}


def record(**changes):
    return as_recorded(RUN, ROW) | changes


def without(name):
    return json.dumps({n: value for n, value in record().items() if n != name})


def changed(**settings):
    return record(settings=RUN.to_dict() | settings)


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
    lines = [line for line in path.read_text().splitlines() if line.startswith('  {"epoch"')]
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
        ("[" * 100_000, "is not valid JSON"),
        ('{"key": "x", "status": "finished"}', "it needs format, key, title, status, settings"),
        (without("final"), "it needs"),
        (without("title"), "it needs"),
        (json.dumps(record(format=99)), "has format 99: this version reads format 1"),
        (json.dumps(record(status="fine")), "'fine': it must be finished or failed"),
        (json.dumps(record(curve=[])), "holds no epoch"),
        (json.dumps(record(curve=["x"])), "holds an epoch that is damaged"),
        (json.dumps(record(curve=[{"epoch": 1}])), "holds an epoch that is damaged"),
        (json.dumps(record(curve=[ROW | {"epoch": None}, ROW])), "an epoch that is damaged"),
        (json.dumps(record(curve=[ROW | {"test_error": None}])), "lacks figures of its last epoch"),
        (json.dumps(record(final="x")), "holds final figures that are damaged"),
        (json.dumps(record(final=ROW | {"test_error": None})), "lacks figures of its last epoch"),
        (json.dumps(record(seconds=None)), "does not hold its seconds as a number"),
        (json.dumps(record(title=3)), "does not hold its title as text"),
        (json.dumps(record(status="failed", failure=[1])), "does not hold its failure as text"),
        (json.dumps(record(execution="cpu")), "its execution as names and values"),
        (json.dumps(record(settings=None)), "settings must hold names and values, got None"),
        (json.dumps(changed(speed=1)), "unknown setting 'speed'"),
        (json.dumps(changed(seed=1)), f"its settings are those of {OTHER.key}"),
        (json.dumps(record(key="0" * 12)), f"its settings are those of {RUN.key}"),
        (json.dumps(as_recorded(OTHER, ROW)), f"record of another run, {OTHER.key}"),
    ],
    ids=lambda text: text[-60:],
)
def test_what_is_no_record_is_named(tmp_path, text, words):
    records.record_path(tmp_path, RUN).write_text(text)
    with pytest.raises(ValueError, match=words) as raised:
        records.read(tmp_path, RUN)
    assert RUN.key in str(raised.value)
    assert "it to run again" in str(raised.value) or "it away to run again" in str(raised.value)


@pytest.mark.parametrize("figure", ["NaN", "-Infinity", "1e400", "9" * 400, "9" * 5000])
def test_a_number_that_is_not_finite_is_damage_wherever_it_stands(tmp_path, figure):
    path = records.record_path(tmp_path, RUN)
    for spoilt in (record(curve=[ROW | {"test_error": "x"}]), record(hardware=["x"])):
        path.write_text(json.dumps(spoilt).replace('"x"', figure))
        with pytest.raises(ValueError, match="holds a number that is not finite") as raised:
            records.read(tmp_path, RUN)
        assert str(raised.value).startswith(f"{path} holds")
        assert len(str(raised.value)) < len(str(path)) + 100


def test_an_epoch_that_was_not_tested_is_no_damage(tmp_path):
    untested = record(curve=[ROW | {"test_error": None}, ROW | {"epoch": 2}])
    records.write(tmp_path, RUN, untested)
    assert records.read(tmp_path, RUN) == untested


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
