"""Peak memory of a step."""

import pytest
import torch

from wsam.bench import peak_memory
from wsam.bench.cases import baseline_cases, method_cases
from wsam.bench.workload import image_workload

CPU = torch.device("cpu")
COPIES = {"SGD": 0, "SAM": 1, "WSAM lean": 1, "WSAM": 2, "CoupledWSAM": 2, "GSAM": 2, "ASAM": 1}


def test_live_bytes() -> None:
    counter = peak_memory.LiveBytesCounter()
    with counter:
        kept = torch.zeros(100)
        a = torch.zeros(1000)
        b = a + 1
        assert counter.live() == 4 * 2100
        view = b[:10]
        del a, b
        assert counter.live() == 4 * 1100, "a view keeps its storage"
        del view
        torch.zeros(1)
    assert counter.live() == kept.nbytes == 400
    assert counter.peak >= 4 * 2100


def test_copies_of_the_weights() -> None:
    """The peak is in the second pass: SAM keeps one copy of the weights, WSAM two, lean one."""
    workload = image_workload("cnn", 8, CPU)
    weights = workload.describe()["weights"]
    every = [*baseline_cases(["eager"]), *method_cases(["eager"], "eager")]
    measured = [case for case in every if case.name in COPIES]
    rows = peak_memory.measure_peaks(workload, measured, 4 * weights)
    found = {row["name"]: row["copies_beyond_base"] for row in rows}
    assert found == pytest.approx(COPIES, abs=0.05)
