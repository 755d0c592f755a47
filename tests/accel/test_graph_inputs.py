"""Which values of a recorded step are read on the device, and which are constants of a recording."""

import pytest
import torch
from torch import nn

import wsam
from wsam.accel.graph_inputs import GraphScalars

CPU = torch.device("cpu")


class Unprintable(nn.Parameter):
    """A weight whose repr fails: on CUDA it would synchronize."""

    def __repr__(self):
        raise AssertionError


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (torch.optim.SGD, {"momentum": 0.5}),
        (torch.optim.AdamW, {"betas": (0.5, 0.6), "eps": 0.1}),
    ],
)
def test_constants_of_a_recording(base, changes):
    """Numbers that kernels read on the device are not among them, only whether they are zero."""
    options = {"momentum": 0.9, "weight_decay": 1e-3} if base is torch.optim.SGD else {}
    opt = wsam.WSAM(base([Unprintable(torch.zeros(2))], lr=0.1, **options))
    scalars, group = GraphScalars(opt, CPU), opt.param_groups[0]
    constants, numbers = scalars.constants(), scalars.base_numbers()
    group.update(lr=0.5, sam_rho=0.3, sam_gamma=0.2, weight_decay=0.5, **changes)
    assert scalars.constants() == constants
    assert scalars.base_numbers() != numbers
    group["weight_decay"] = 0.0
    assert scalars.constants() != constants


def test_values_are_tensors_within_a_step():
    opt = wsam.WSAM(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1), rho=0.3)
    scalars, group = GraphScalars(opt, CPU), opt.param_groups[0]
    scalars.write()
    with scalars.in_groups():
        assert isinstance(group["lr"], torch.Tensor)
        assert float(group["lr"]) == pytest.approx(0.1)
        assert float(group["sam_rho"]) == pytest.approx(0.3)
        view = group["lr"]
    assert (group["lr"], group["sam_rho"]) == (0.1, 0.3)
    group["lr"] = 0.5
    scalars.write()
    assert float(view) == 0.5, "a recorded step reads the same memory"


def test_a_new_group_needs_another_capture():
    opt = wsam.WSAM(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1))
    scalars = GraphScalars(opt, CPU)
    opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(RuntimeError, match="capture again"):
        scalars.write()
