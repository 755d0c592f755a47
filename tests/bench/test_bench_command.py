"""The `wsam bench` command: smoke runs, records, and errors."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import error_of, wsam_command
from torch import nn

import wsam
from wsam.bench import cases, report, run, third_party
from wsam.bench.cases import Case
from wsam.bench.run import Settings, all_cases, measure
from wsam.bench.workload import CIFAR, Workload, image_workload, mlp10m, synthetic_workload

CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

TWO_STEP_SAM = """
import torch

class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base = base_optimizer(self.param_groups, **kwargs)

    @torch.no_grad()
    def first_step(self, zero_grad):
        params = [p for g in self.param_groups for p in g["params"]]
        norm = torch.cat([p.grad.flatten() for p in params]).norm()
        self.moves = [(p, p.clone()) for p in params]
        for p in params:
            p += self.param_groups[0]["rho"] * p.grad / (norm + 1e-12)
        self.first = [p.grad.clone() for p in params]
        self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad):
        for p, old in self.moves:
            p.copy_(old)
        self.base.step()
        self.zero_grad()
"""

TWO_STEP_WSAM = (
    TWO_STEP_SAM.replace("class SAM", "class Inner")
    + """
from atorch.optimizers.utils import disable_running_stats, enable_running_stats

class WeightedSAM(Inner):
    def __init__(self, model, base_optimizer, rho, gamma, max_norm):
        torch.optim.Optimizer.__init__(self, base_optimizer.param_groups, dict(rho=rho))
        for group in self.param_groups:
            group["rho"] = rho
        self.base, self.k = base_optimizer, gamma / (1 - gamma)

    @torch.no_grad()
    def second_step(self, zero_grad):
        rises = [p.grad - first for (p, _), first in zip(self.moves, self.first)]
        for (p, old), first in zip(self.moves, self.first):
            p.copy_(old)
            p.grad.copy_(first)
        self.base.step()
        for (p, _), rise in zip(self.moves, rises):
            p -= self.base.param_groups[0]["lr"] * self.k * rise
        self.zero_grad()
"""
)


def smoke(**given: Any) -> Settings:
    return Settings(**{"device": CPU, "smoke": True, "rounds": 1, **given})


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("bench")
    words = ("--smoke", "--device", "cpu", "--rounds", 1, "--json", "--out", out)
    found: dict[str, Any] = json.loads(wsam_command("bench", *words).stdout)
    return found


def test_smoke_measures_every_case(record: dict[str, Any]) -> None:
    names = [row["name"] for row in record["cases"]]
    ours = {kind.__name__ for kind in wsam.METHODS.values()}
    assert {"two passes", "SGD", "WSAM lean", "WSAM every 5", *ours} <= set(names)
    assert {"pytorch_optimizer SAM", "pytorch_optimizer WSAM"} <= set(names)
    for row in record["cases"]:
        assert row["ms"]["median"] > 0
        assert len(row["rounds_ms"]) == record["rounds"] == 1
        assert row["of_floor"]["median"] == pytest.approx(
            row["rounds_ms"][0] / record["cases"][0]["rounds_ms"][0]
        )
    assert record["cases"][0]["of_floor"]["median"] == 1


def test_all_methods() -> None:
    """Every method in each form, with the passes of its steps, and more methods of other libraries."""
    wanted = ("LookSAM", "MSAM", "WSAM reuse 5", "ESAM gathered", "pytorch_optimizer LookSAM")
    settings = smoke(all_methods=True, only=wanted)
    found = measure(settings)
    rows = {row["name"]: row for row in found["cases"]}
    assert set(rows) == {"two passes", "SGD", *wanted}
    assert [rows[name]["passes"] for name in wanted] == [1.2, 1.0, 1.2, 1.933, 2.0]
    assert (rows["WSAM reuse 5"]["reads"], rows["WSAM reuse 5"]["writes"]) == (6.2, 3.6)
    assert report.record_name({**found, "only": []}) == "bench-cnn-methods-smoke-cpu"
    names = {case.name for case in all_cases(smoke(all_methods=True))[0]}
    assert names >= {kind.__name__ for kind in wsam.METHODS.values()}
    on_cuda = dataclasses.replace(settings, device=torch.device("cuda"))
    assert on_cuda.forms() == ("eager", "captured")
    assert not settings.workload().compilable


def test_a_step_that_cannot_be_captured_is_left_out_with_the_reason() -> None:
    def make(workload: Workload, form: str) -> cases.Step:
        if form == "captured":
            raise third_party.NotCapturableError("it waits")
        return lambda: None

    found = [Case("theirs", form, "peer", make) for form in ("eager", "captured")]
    left, reasons = run.capturable(found, image_workload("cnn", 4, CPU))
    assert left == found[:1]
    assert reasons == {"theirs": "it waits"}
    record = measure(smoke(only=("SGD",)))
    text = report.table({**record, "not_capturable": reasons})
    assert "not capturable: theirs: it waits" in text


def test_record_names_hardware_and_versions(record: dict[str, Any]) -> None:
    assert record["hardware"]["threads"] == 1, "one thread is fastest for a tiny model"
    assert record["versions"]["torch"] == torch.__version__
    assert record["versions"]["pytorch_optimizer"]
    assert {"commit", "clock", "load_before", "load_after"} <= set(record)
    assert record["problem"]["weights"] == 24_346


def test_files_are_the_record_and_a_plot(record: dict[str, Any]) -> None:
    numbers, plot = map(Path, record["files"])
    saved = json.loads(numbers.read_text())
    assert saved == {key: value for key, value in record.items() if key != "files"}
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_table_has_a_line_per_case(record: dict[str, Any]) -> None:
    lines = report.table(record).splitlines()
    for row in record["cases"]:
        assert any(line.startswith(row["name"]) and "eager" in line for line in lines)


def test_a_negative_optimizer_time_is_not_shown(record: dict[str, Any]) -> None:
    """It is the step minus the baseline, so a negative value is noise."""
    row = next(row for row in record["cases"] if row["name"] == "WSAM")
    for own, printed in ((-0.28, ["eager"]), (0.25, ["eager", "0.25"])):
        changed = {**row, "own_ms": {"median": own}, "share_of_copy_bandwidth": None}
        (line,) = report.traffic_lines({**record, "cases": [changed]})[1:-1]
        assert line.split()[1 : 1 + len(printed)] == printed
        assert "-" not in line
        assert line.endswith("too short")
    case = {"name": "WSAM", "form": "eager", "own_us": {"median": -3.0}}
    point = {"tensors": 1, "weights": 10, "cases": [case]}
    table = report.scaling_table({**record, "points": [point], "notes": []})
    assert table.splitlines()[-1].split() == ["WSAM", "(eager)"]


def test_record_without_matplotlib(
    record: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert [path.suffix for path in report.save(record, tmp_path)] == [".json"]


def test_missing_peer_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(third_party.importlib.util, "find_spec", lambda name: None)
    found = measure(smoke(only=("SAM",)))
    assert "not installed" in found["notes"][0]
    assert {row["name"] for row in found["cases"]} == {"two passes", "SGD", "SAM"}
    assert "note: pytorch_optimizer" in report.table(found)


@pytest.mark.parametrize("axis", ["tensors", pytest.param("weights", marks=pytest.mark.slow)])
def test_scaling(axis: str, tmp_path: Path) -> None:
    words = ("bench", "--smoke", "--scaling", axis, "--device", "cpu", "--rounds", 1)
    output = wsam_command(*words, "--only", "wsam", "--out", tmp_path)
    name = f"scaling-{axis}-only-wsam-smoke-cpu"
    saved = json.loads((tmp_path / f"{name}.json").read_text())
    assert (saved["only"], saved["smoke"]) == (["wsam"], True)
    assert [point[axis] for point in saved["points"]] == sorted(p[axis] for p in saved["points"])
    for point in saved["points"]:
        assert [row["name"] for row in point["cases"]] == ["SGD", "WSAM", "WSAM lean"]
    assert "WSAM lean (eager)" in output.stdout
    assert output.stdout.endswith(
        "".join(f"wrote {tmp_path / name}.{k}\n" for k in ("json", "png"))
    )
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_published_records_render() -> None:
    paths = [*RESULTS.glob("bench-*.json"), *RESULTS.glob("scaling-*.json")]
    assert paths
    for path in paths:
        published = json.loads(path.read_text())
        assert report.record_name(published) == path.stem
        assert published["commit"]
        assert "interleaved rounds" in report.table(published), path


def test_file_names_tell_partial_measurements(record: dict[str, Any]) -> None:
    assert Path(record["files"][0]).stem == "bench-cnn-smoke-cpu"
    cuda = {"hardware": {"gpu": "x"}}
    names = {
        "bench-mlp10m-cpu": {},
        "bench-mlp10m-batch64-cpu": {"batch": 64},
        "bench-mlp10m-only-wsam-gsam-cpu": {"only": ["WSAM", "gsam"]},
        "bench-mlp10m-smoke-cpu": {"smoke": True, "batch": 4},
        "bench-mlp10m-batch32-smoke-cpu": {"smoke": True},
        "bench-mlp10m-batch32-cuda": cuda,
        "bench-mlp10m-cuda": {**cuda, "batch": 128},
        "bench-wrn-28-10-only-wsam-cap-cuda": {
            **cuda, "model": "wrn-28-10", "batch": 256, "only": ["wsam (cap"]
        },
        "bench-mlp10m-only-sam-eager-cuda": {**cuda, "batch": 128, "only": ["SAM (eager"]},
    }  # fmt: skip
    for name, given in names.items():
        problem = {"model": given.get("model", "mlp10m"), "batch": given.get("batch", 32)}
        whole = {"kind": "step", "hardware": {"cpu": "x"}}
        assert report.record_name({**whole, "smoke": False, **given, "problem": problem}) == name
    scaling = {"kind": "scaling", "axis": "tensors", "hardware": {"cpu": "x"}}
    many = [report.record_name({**scaling, "only": ["WSAM" * 100, last]}) for last in ("a", "b")]
    assert len({*many}) == 2
    assert max(map(len, many)) < 100, "file names are limited to 255 bytes"


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "vgg"], "invalid value for '--model': 'vgg' is not one of 'resnet18'"),
        (["--batch-size", 1], "invalid value for '--batch-size'"),
        (["--rounds", 0], "invalid value for '--rounds'"),
        (["--clock", "sun"], "invalid value for '--clock': 'sun' is not one of 'wall', 'cpu'"),
        (["--scaling", "time"], "invalid value for '--scaling': 'time' is not one of 'tensors'"),
        (["--only", "adam"], "--only adam fits no case"),
        (["--peer", "sam.py"], "--peer takes NAME=PATH"),
        (["--peer", "x=nowhere.py"], "nowhere.py:WeightedSAM: there is no file"),
        (["--device", "moon"], "device 'moon' cannot be used"),
    ],
)
def test_wrong_options(words: list[str], message: str) -> None:
    device = [] if "--device" in words else ["--device", "cpu"]
    assert error_of("bench", "--smoke", *device, *words).startswith(f"wsam: {message}")


def test_a_record_names_the_memory_format() -> None:
    workload = image_workload("cnn", 4, torch.device("cpu"))
    assert workload.describe()["layout"] == "contiguous"
    images = workload.batch[0].to(memory_format=torch.channels_last)
    assert (
        dataclasses.replace(workload, batch=(images, *workload.batch[1:])).describe()["layout"]
        == "channels_last"
    )


def test_cpu_clock_needs_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(ValueError, match="one thread"):
        measure(smoke(clock="cpu"))


@pytest.mark.parametrize(
    "words",
    [
        (),
        pytest.param(("--scaling", "tensors"), marks=pytest.mark.slow),
        pytest.param(("--model", "vgg"), marks=pytest.mark.slow),
    ],
)
def test_smoke_uses_one_thread_and_restores_their_number(words: tuple[str, ...]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    given = ("--smoke", "--device", "cpu", "--rounds", 1, "--only", "SGD", "--json", *words)
    try:
        output = wsam_command("bench", *given, status=2 if "vgg" in words else 0)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    if "vgg" not in words:
        assert json.loads(output.stdout)["hardware"]["threads"] == 1


def test_only_keeps_the_baselines_of_its_forms() -> None:
    everything = cases.baseline_cases(["eager", "captured"]) + cases.method_cases(
        ["eager", "captured"], "captured"
    )
    left = cases.select_cases(everything, ["wsam (cap", "GSAM"])
    assert [case.label for case in left] == [
        "two passes (captured)", "SGD (captured)", "WSAM (captured)", "GSAM (captured)",
    ]  # fmt: skip


# --- what the cases compute ----------------------------------------------------------------------


def trained(case: Case, workload: Workload, steps: int = 3) -> list[nn.Module]:
    """Run some steps of a case and return the models it built."""
    built: list[nn.Module] = []

    def build() -> nn.Module:
        built.append(workload.build_model())
        return built[-1]

    step = case.build(dataclasses.replace(workload, build_model=build))
    for _ in range(steps):
        step()
    return built


def weights(case: Case, workload: Workload) -> torch.Tensor:
    (model,) = trained(case, workload)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def named(name: str, found: list[Case]) -> Case:
    return next(case for case in found if case.name == name)


def test_peers_compute_the_same_weights(tmp_path: Path) -> None:
    """Otherwise the benchmark would time something else."""
    (tmp_path / "sam.py").write_text(TWO_STEP_SAM)
    (tmp_path / "wsam.py").write_text(TWO_STEP_WSAM)
    paths = (f"one={tmp_path / 'sam.py'}", f"two={tmp_path / 'wsam.py'}")
    found, notes = all_cases(smoke(peers=paths, all_methods=True))
    assert not notes
    workload = image_workload("cnn", 4, CPU)
    start = weights(named("SGD", found), workload)
    for theirs, ours in {
        "pytorch_optimizer SAM": "SAM",
        "pytorch_optimizer WSAM": "WSAM",
        "pytorch_optimizer WSAM foreach": "WSAM",
        "pytorch_optimizer FriendlySAM": "FriendlySAM",
        "one": "SAM",
        "two": "WSAM",
        "WSAM lean": "WSAM",
    }.items():
        expected = weights(named(ours, found), workload)
        assert torch.allclose(weights(named(theirs, found), workload), expected, atol=2e-5), theirs
        assert not torch.allclose(start, expected, atol=2e-4), (
            "the methods differ from the base optimizer"
        )


def test_the_baseline_makes_two_passes_and_no_step() -> None:
    workload = image_workload("cnn", 4, CPU)
    (model,) = trained(named("two passes", cases.baseline_cases(["eager"])), workload, steps=2)
    for p, q in zip(model.parameters(), workload.build_model().parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.grad is not None
    assert int(model[1].num_batches_tracked) == 4


def test_sizes_of_problems() -> None:
    count = sum(p.numel() for p in mlp10m(CIFAR).parameters())
    assert 9.9e6 < count < 10.1e6
    synthetic = synthetic_workload(7, 700, CPU)
    model = synthetic.build_model()
    losses = model(*synthetic.batch)
    losses.mean().backward()
    assert [p.numel() for p in model.parameters()] == [100] * 7
    for p, source in zip(model.parameters(), model.gradients, strict=True):
        assert torch.equal(p.grad, source)
        assert p.grad.data_ptr() != source.data_ptr()


def test_small_images_keep_the_number_of_weights() -> None:
    """A residual network pools over the whole image."""
    large, small = (image_workload("resnet18", 2, CPU, pixels) for pixels in (None, 8))
    assert large.describe() == {**small.describe(), "pixels": 32}
    assert small.batch[0].shape == (2, 3, 8, 8)
    record = {"kind": "step", "hardware": {"cpu": "x"}, "problem": small.describe()}
    assert report.record_name(record) == "bench-resnet18-8px-batch2-cpu"


def test_interval_case_counts_its_passes() -> None:
    """With an interval of 5, one step in five runs the model twice."""
    workload = image_workload("cnn", 4, CPU)
    (model,) = trained(cases.interval_case(5, "eager"), workload, steps=10)
    assert int(model[1].num_batches_tracked) == 10
    calls: list[int] = []

    def build() -> nn.Module:
        made = workload.build_model()
        made.register_forward_hook(lambda *_: calls.append(1))
        return made

    step = cases.interval_case(5, "eager").build(dataclasses.replace(workload, build_model=build))
    for _ in range(10):
        step()
    assert len(calls) == 10 * cases.interval_case(5, "eager").passes


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_peers_compute_what_they_compute_eagerly(tmp_path: Path) -> None:
    (tmp_path / "sam.py").write_text(TWO_STEP_SAM)
    (tmp_path / "moving.py").write_text(TWO_STEP_SAM.replace("p.copy_(old)", "p.data = old"))
    (tmp_path / "waiting.py").write_text(TWO_STEP_SAM.replace("1e-12)", "1e-12).item()"))
    paths = [f"{path.stem}={path}" for path in tmp_path.glob("*.py")]
    settings = Settings(torch.device("cuda"), peers=tuple(paths), smoke=True, all_methods=True)
    workload = settings.workload()
    found = [case for case in all_cases(settings)[0] if case.kind == "peer"]
    left, reasons = run.capturable(found, workload)
    assert reasons.pop("moving") == "each step moves the weights to other memory"
    assert "synchronizes" in reasons.pop("waiting")
    assert not reasons, "all others can be captured"
    for case in left:
        if case.form == "captured":
            eager = next(c for c in left if c.name == case.name and c.form == "eager")
            # A capture makes 4 steps of each kind before the first replay.
            (theirs,) = trained(case, workload, steps=5)
            (same,) = trained(eager, workload, steps=4 * case.period + 5)
            for p, q in zip(theirs.parameters(), same.parameters(), strict=True):
                assert torch.allclose(p, q, atol=1e-3), case.name


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "words", [["--model", "cnn"], ["--model", "cnn", "--all-methods"], ["--scaling", "tensors"]]
)
def test_smoke_on_cuda(words: list[str], tmp_path: Path) -> None:
    output = wsam_command(
        "bench", "--smoke", "--device", "cuda", "--json", "--out", tmp_path, *words
    )
    found = json.loads(output.stdout)
    rows = found["cases"] if "cases" in found else found["points"][0]["cases"]
    assert {"eager", "captured"} <= {row["form"] for row in rows}
    moved = {row["name"]: (row["reads"], row["writes"]) for row in rows if "reads" in row}
    if "WSAM not fused" in moved:
        assert moved["WSAM"] == (7, 4)
        assert moved["SAM"] == (6, 4)
