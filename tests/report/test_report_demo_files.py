"""Files of `wsam demo`: no seed is skipped silently, damaged files are created again."""

import shutil

import pytest
from test_report_demo import tiny_runs

from wsam.demo import contenders, jobs, run_jobs, summarise, tuning
from wsam.demo.figures import _lowest, curves, landscape, tuning_lines, tuning_map
from wsam.demo.page import page
from wsam.lab import records
from wsam.lab.files import no_op
from wsam.paper import minima
from wsam.sweep import InProcess

SEEDS = (0, 1)
PATHS = {
    "record": records.record_path,
    "minimum": minima.measurement_path,
    "sharpness": jobs.sharpness_path,
}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Run jobs in this process: starting workers takes longer than these runs."""
    monkeypatch.setattr(jobs, "Processes", lambda devices, log: InProcess())
    with tiny_runs():
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a folder with all runs of two seeds."""
    out = tmp_path_factory.mktemp("finished")
    with tiny_runs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "Processes", lambda devices, log: InProcess())
        run_jobs(jobs.demo_jobs(out, SEEDS), 1, no_op)
    return out


@pytest.fixture
def folder(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "runs")


def damage(path, how):
    """Truncate a file, remove it, or replace it."""
    texts = {"truncated": path.read_text()[:40], "other": '{"key": "other", "value": 1.0}'}
    path.unlink()
    if how in texts:
        path.write_text(texts[how])


@pytest.mark.parametrize(
    ("what", "how"),
    [
        ("record", "truncated"),
        ("minimum", "missing"),
        ("sharpness", "other"),
    ],
)
def test_a_lost_seed_is_an_error(folder, what, how):
    """Until the next call creates it again."""
    whole = summarise(folder, SEEDS)
    all_jobs = jobs.demo_jobs(folder, SEEDS)
    job = next(j for j in all_jobs if (j.run.method, j.run.seed) == ("wsam", 1))
    path = PATHS[what](job.out, job.run)
    damage(path, how)
    assert [j for j in all_jobs if not jobs.is_done(j)] == [job]
    with pytest.raises(ValueError, match=path.name):
        summarise(folder, SEEDS)
    summarise(folder, (0,))
    run_jobs(all_jobs, 1, no_op)
    assert all(map(jobs.is_done, all_jobs))
    again = summarise(folder, SEEDS)
    for name, row in again.rows.items():
        for figure in ("test_error", "top_eigenvalue", "sharpness"):
            assert row.figures[figure] == pytest.approx(whole.rows[name].figures[figure])


def test_a_failed_seed_is_an_error(folder):
    (job,) = jobs.demo_jobs(folder, (1,))[-1:]
    record = records.read(job.out, job.run)
    records.write(job.out, job.run, {**record, "status": "failed"})
    assert not jobs.is_done(job)
    with pytest.raises(ValueError, match=f"{job.run.key}.json is of a run that failed"):
        summarise(folder, SEEDS)


def test_a_damaged_tuning_run_is_repeated(tmp_path):
    job = jobs.tuning_jobs(tmp_path)[0]
    records.record_path(tmp_path, job.run).write_text("{")
    assert not jobs.is_done(job)
    run_jobs([job], 1, no_op)
    assert jobs.is_done(job)


def test_a_run_with_another_noise_seed_is_ignored(folder):
    run = contenders()["WSAM"].runs((0,))[0]
    other = run.replace(noise_seed=7)
    record = records.read(folder, run)
    records.write(folder, other, {**record, "key": other.key, "settings": other.to_dict()})
    keys = summarise(folder, SEEDS).as_dict()["rows"]["WSAM"]["keys"]
    assert keys == [run.key, run.replace(seed=1, noise_seed=1).key]


def test_figures_have_labels_and_a_message(folder):
    summary = summarise(folder, SEEDS)
    for figure in (curves(summary), landscape(summary)):
        assert figure.get_suptitle()
        for axes in figure.axes:
            assert axes.get_ylabel() in ("test error (%)", "training loss"), "not the sharpness"
            assert {text.get_text() for text in axes.texts} == {*summary.rows}
    assert figure.axes[-1].get_xlabel()


def test_curves_have_the_same_cost(folder):
    """SGD trains for twice as many epochs, with half as many gradients each."""
    for axes in curves(summarise(folder, SEEDS)).axes:
        assert len({max(line.get_xdata()) for line in axes.lines}) == 1


def test_titles_do_not_separate_what_is_within_the_deviations():
    values = {"SGD": (9.0, 0.5), "SAM": (4.0, 0.3), "WSAM": (3.5, 0.3)}
    assert _lowest(values) == ["SAM", "WSAM"]
    assert _lowest(values | {"SAM": (4.2, 0.3)}) == ["WSAM"]
    assert _lowest({"SAM": (4.0, None), "WSAM": (3.5, None)}) == ["WSAM"]


def test_failed_tuning_runs_are_shown(folder):
    hyper = {"WSAM": {"gamma": 0.9, "rho": 0.2}, "SAM": {"rho": 0.4}, "SGD, own lr": {"lr": 0.05}}
    points = {
        name: (
            tuning.GridPoint(point, (5.0, 6.0)),
            tuning.GridPoint({key: 2 * value for key, value in point.items()}, (1.0, None)),
        )
        for name, point in hyper.items()
    }
    found = tuning.TuningResults(points, tuning.read().metadata)
    text = page(summarise(folder, SEEDS), found).partition("How gamma and rho were chosen")[2]
    assert ">failed</text>" in text
    assert ">1/2</text>" in text
    assert text.count("1.00, failed 1/2<") == 2, "of SAM and of SGD"
    figure = tuning_map(found)
    assert "failed\n1/2" in [label.get_text() for label in figure.axes[0].texts]
    assert [axes.get_xlabel() for axes in tuning_lines(found).axes] == ["ρ", "learning rate"]


def test_three_test_images_count_as_equal():
    """Exactly three of 597, despite rounding."""
    least, equal, more = (
        tuning.GridPoint({"rho": rho}, (100 * wrong / 597,))
        for rho, wrong in ((0.4, 20), (0.2, 23), (0.1, 24))
    )
    assert tuning.TuningResults({"x": (more, equal, least)}, {}).best("x") is equal
