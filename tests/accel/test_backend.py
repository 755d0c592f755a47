"""The choice of a backend, and the optimizer's use of it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import PROBLEMS, STYLES, parameters, train
from torch import nn

import wsam
from wsam._core.step_state import StepState
from wsam.accel import triton_backend
from wsam.accel.backend import select_backend
from wsam.accel.cpu import CpuBackend
from wsam.accel.triton_backend import EagerTritonBackend


def blocks(*devices: str) -> Any:
    return [SimpleNamespace(device=torch.device(device)) for device in devices]


def test_the_device_selects_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(select_backend(blocks("cpu", "cpu")), CpuBackend)
    assert select_backend(blocks("meta")) is None
    assert select_backend(blocks("cpu", "cuda:0")) is None
    assert select_backend(blocks("cuda:0", "cuda:1")) is None
    monkeypatch.setattr(triton_backend, "kernels_work_on", lambda device: True)
    assert isinstance(select_backend(blocks("cuda:0")), EagerTritonBackend)
    monkeypatch.setattr(triton_backend, "kernels_work_on", lambda device: False)
    assert select_backend(blocks("cuda:0")) is None


def test_a_new_parameter_group_selects_again() -> None:
    opt = wsam.SAM(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    assert isinstance(opt._backend, CpuBackend)
    opt.add_param_group({"params": [nn.Parameter(torch.ones(2, device="meta"))]})
    assert opt._backend is None


class Declining:
    """A backend that handles no step."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def perturb(self, state: StepState) -> bool:
        self.calls.append(f"perturb {state.phase.name}")
        return False

    def finish(self, state: StepState) -> bool:
        self.calls.append(f"finish {state.phase.name}")
        return False


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_a_backend_that_declines_changes_nothing(style: str, lean: bool) -> None:
    problem, found = PROBLEMS["mlp"], []
    declining = Declining()
    for backend in (None, declining):
        params = parameters(problem.weights())
        opt = wsam.WSAM(torch.optim.SGD(params, lr=0.02, momentum=0.9), lean=lean)
        opt._backend = backend
        train(opt, params, problem, range(3), style)
        found.append(params)
    assert all(map(torch.equal, *found))
    by_closure = ["finish PERTURBED"] if style == "closure" else []
    at_the_end = [] if lean else ["finish READY"]  # a lean base has stepped between the passes
    assert declining.calls == ["perturb PERTURBED", *by_closure, *at_the_end] * 3
