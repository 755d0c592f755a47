"""The benchmark against other libraries: a small GPU record, and the tables of its page."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from programs import load_program

from wsam.lab import markdown_tables

bench, page = load_program("curvature"), load_program("curvature_page")


@pytest.fixture
def gpu_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Return the successive records of `--cuda --tf32`, for a small CNN on the CPU."""
    generator = np.random.default_rng(0)
    records = generator.integers(0, 256, (10_000, 3073), dtype=np.uint8)
    records[:, 0] %= 10
    (tmp_path / "data.bin").write_bytes(records.tobytes())
    device = torch.device("cpu")
    monkeypatch.setattr(
        bench, "peer_versions", lambda: {"PyHessian": None, "hessian-eigenthings": None}
    )
    model, batches, problem = bench.cifar_problem(
        tmp_path / "data.bin", device, batch=25, epochs=1, images=50, name="cnn"
    )
    assert problem == {
        "model": "cnn", "data": "cifar10", "images": 50, "batch": 25, "epochs": 1,
    }  # fmt: skip
    before = [torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32]
    try:
        versions = bench.gpu_record(model, batches, 1, device, True)
        head = bench.record_head(problem, device, 1)
        head["hardware"]["gpu"] = "a GPU"
        return [json.loads(json.dumps({**head, **part}, allow_nan=False)) for part in versions]
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.slow
def test_gpu_record_grows_and_names_its_precision(gpu_records):
    first, *_, last = gpu_records
    assert [len(record["contenders"]) for record in gpu_records] == [0, 1]
    assert (last["tf32"], last["precision"]) == (True, "float32 with TF32")
    assert first["reference"]["converged"] == [True]
    assert last["reference"] == first["reference"]
    assert last["contenders"][0]["worst_error"] < 1e-2, "the same eigenvalue"
    assert list(last["to_accuracy"]) == ["0.01", "0.001"]
    assert last["to_accuracy"]["0.01"]["wsam lanczos"]["median_seconds"] > 0
    for record in (first, last):
        record["reference"]["peak_gib"] = 3.2
        text = page.cuda(record)
        assert "a GPU" in text
        assert f"{record['reference']['seconds']:.1f} s" in text
        assert "PyHessian not installed" in text
    words = " ".join(page.cuda(last).split())
    assert "all in float32 with TF32" in words
    assert "each at one setting" in words
    assert "(wsam lanczos tol=0.01)" in words
    assert "| wsam, Lanczos |" in page.cuda(last)
    assert "| wsam, Lanczos |" not in page.cuda(first)


def test_page_equals_its_records(tmp_path):
    text = page.PAGE.read_text(encoding="utf-8")
    assert sorted(markdown_tables.find_markers(text, page.MARK)) == ["cpu", "cuda"]
    assert markdown_tables.fill_tables(text, page.MARK, page.block) == text, (
        "run benchmarks/curvature_page.py"
    )
    without = markdown_tables.fill_tables(text, page.MARK, lambda kind: page.block(kind, tmp_path))
    assert without.count(page.NO_RECORD) == 2


def test_every_timed_library_has_a_row():
    for path in sorted(page.RESULTS.glob("curvature-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        assert {row["library"] for row in record["contenders"]} <= page.LABELS.keys()
        for name in ("hardware", "versions", "commit", "precision"):
            assert record[name]


def test_no_slower_than_other_libraries_at_equal_accuracy():
    """In the CPU record; timings vary by about 20%."""
    record = json.loads((page.RESULTS / "curvature-cpu.json").read_text(encoding="utf-8"))
    for best in record["to_accuracy"].values():
        wsam = best["wsam lanczos"]["median_seconds"]
        peers = {name: row for name, row in best.items() if not name.startswith("wsam")}
        assert len(peers) == 4
        assert all(wsam <= 1.2 * row["median_seconds"] for row in peers.values())


def test_methods_are_timed_in_turns():
    order: list[str] = []
    device = torch.device("cpu")
    methods = [
        bench.TimedMethod(name, "", lambda seed, name=name: order.append(f"{name}{seed}") or 1.0)
        for name in "ab"
    ]
    assert len(list(itertools.islice(bench.time_in_turns(methods, 2, device), 9))) == 4
    assert order == ["a0", "b0", "b1", "a1"]
    assert [len(method.seconds) for method in methods] == [2, 2]
