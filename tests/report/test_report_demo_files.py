"""What lies in the folder of `wsam demo`: no seed is passed over, damaged files are made anew."""

import shutil

import pytest
from test_report_demo import tiny_runs

from wsam.demo import carry_out, choice, contenders, summarise, work
from wsam.demo.page import page
from wsam.demo.pictures import curves, gamma_rho
from wsam.lab import records
from wsam.lab.files import no_op
from wsam.paper import minima
from wsam.sweep import InProcess

SEEDS = (0, 1)
PATHS = {
    "record": records.record_path,
    "minimum": minima.measurement_path,
    "sharpness": work.sharpness_path,
}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Carry jobs out here: workers take longer to start than these runs to end."""
    monkeypatch.setattr(work, "Processes", lambda devices, say: InProcess())
    with tiny_runs():
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with all runs of two seeds."""
    out = tmp_path_factory.mktemp("finished")
    with tiny_runs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "Processes", lambda devices, say: InProcess())
        carry_out(work.demo_jobs(out, SEEDS), 1, no_op)
    return out


@pytest.fixture
def folder(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "runs")


def damage(path, how):
    """Truncate a file, remove it, or leave something else there."""
    texts = {"truncated": path.read_text()[:40], "other": '{"key": "other", "value": 1.0}'}
    path.unlink()
    if how in texts:
        path.write_text(texts[how])


@pytest.mark.parametrize(
    ("what", "how"),
    [
        ("record", "truncated"),
        ("record", "missing"),
        ("minimum", "truncated"),
        ("minimum", "missing"),
        ("sharpness", "other"),
    ],
)
def test_a_lost_seed_is_not_passed_over(folder, what, how):
    """A mean over one seed must not be called one over two; and the next call makes it anew."""
    whole = summarise(folder, SEEDS)
    jobs = work.demo_jobs(folder, SEEDS)
    job = next(j for j in jobs if (j.run.method, j.run.seed) == ("wsam", 1))
    path = PATHS[what](job.out, job.run)
    damage(path, how)
    assert [j for j in jobs if not work.is_done(j)] == [job]
    with pytest.raises(ValueError, match=path.name):
        summarise(folder, SEEDS)
    summarise(folder, (0,))
    carry_out(jobs, 1, no_op)
    assert all(map(work.is_done, jobs))
    again = summarise(folder, SEEDS)
    for name, row in again.rows.items():
        for figure in ("test_error", "top_eigenvalue", "sharpness"):
            assert row.figures[figure] == pytest.approx(whole.rows[name].figures[figure])


def test_a_failed_seed_is_not_passed_over(folder):
    (job,) = work.demo_jobs(folder, (1,))[-1:]
    record = records.read(job.out, job.run)
    records.write(job.out, job.run, {**record, "status": "failed"})
    assert not work.is_done(job)
    with pytest.raises(ValueError, match=f"{job.run.key}.json is of a run that failed"):
        summarise(folder, SEEDS)


def test_a_damaged_look_is_made_anew(tmp_path):
    job = work.map_jobs(tmp_path)[0]
    records.record_path(tmp_path, job.run).write_text("{")
    assert not work.is_done(job)
    carry_out([job], 1, no_op)
    assert work.is_done(job)


def test_a_run_with_other_wrong_labels_is_none_of_the_demonstration(folder):
    run = contenders()["WSAM"].runs((0,))[0]
    other = run.replace(noise_seed=7)
    record = records.read(folder, run)
    records.write(folder, other, {**record, "key": other.key, "settings": other.to_dict()})
    keys = summarise(folder, SEEDS).as_dict()["rows"]["WSAM"]["keys"]
    assert keys == [run.key, run.replace(seed=1, noise_seed=1).key]


def test_sharpness_is_said_to_be_at_each_methods_own_radius(folder):
    drawn = curves(summarise(folder, SEEDS))
    assert drawn.axes[-1].get_title(loc="left") == "sharpness in training, each at its own ρ"
    (legend,) = drawn.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["SGD", "SGD, own lr", "SAM, ρ 0.4", "WSAM, ρ 0.2"]


def test_failed_looks_are_counted_where_they_are_shown(folder):
    places = {"WSAM": {"gamma": 0.9, "rho": 0.2}, "SAM": {"rho": 0.4}, "SGD, own lr": {"lr": 0.05}}
    looks = {
        name: (
            choice.Place(point, (5.0, 6.0)),
            choice.Place({key: 2 * value for key, value in point.items()}, (1.0, None)),
        )
        for name, point in places.items()
    }
    found = choice.Choice(looks, choice.read().facts)
    text = page(summarise(folder, SEEDS), found).partition("How gamma and rho were chosen")[2]
    assert ">failed</text>" in text
    assert ">1/2</text>" in text
    assert text.count("1.00, failed 1/2<") == 2, "SAM's and SGD's"
    drawn = gamma_rho(found)
    assert "failed\n1/2" in [label.get_text() for label in drawn.axes[0].texts]


def test_three_test_images_count_as_equal():
    """As the page says: three of 597, whatever decimals that comes to."""
    least, equal, more = (
        choice.Place({"rho": rho}, (100 * wrong / 597,))
        for rho, wrong in ((0.4, 20), (0.2, 23), (0.1, 24))
    )
    assert choice.Choice({"x": (more, equal, least)}, {}).best("x") is equal
