"""The experiment with a pass at w + d next to later passes: benchmarks/overlapped_passes.py."""

import copy

import pytest
import torch
from programs import load_program
from torch import Tensor, nn

from wsam import WSAM
from wsam.lab.step import Objective

RATES = [0.1, 0.09, 0.08, 0.07, 0.06, 0.05]


@pytest.mark.slow
@pytest.mark.parametrize(("n", "start"), [(1, 0), (1, 2), (2, 0), (2, 2), (3, 0)])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_steps_equal_a_plain_loop(n: int, start: int, share: float) -> None:
    program = load_program("overlapped_passes")
    layers = nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
    model = nn.Sequential(*layers).double()
    batches = [(torch.randn(64, 10).double(), torch.randint(3, (64,))) for _ in RATES]
    expected = _plain_loop(copy.deepcopy(model), batches, n, start, share)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
    optimizer = WSAM(base, rho=0.2, gamma=0.8, model=model)
    objective = Objective(model, torch.mean, "fp32", torch.device("cpu"))
    stepper = program.OverlappedStepper(optimizer, objective, False, n, share, start)
    for rate, batch in zip(RATES, batches, strict=True):
        base.param_groups[0]["lr"] = rate
        stepper(*batch)
    for p, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, wanted, rtol=0, atol=1e-7)  # the loss is float32
    for buffer, wanted in zip(model.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(buffer, wanted, rtol=0, atol=1e-7)
    assert stepper.totals.steps == len(RATES)
    assert int(stepper.totals.measured) == (len(RATES) - start) // n - int(share == 1)


def _plain_loop(
    model: nn.Sequential, batches: list[tuple[Tensor, Tensor]], n: int, start: int, share: float
) -> nn.Module:
    """Make the same steps one pass after the other.

    Every n-th step gives the h that is used n steps later. If h is computed from a share of a batch, it
    is that of the first of n steps, used from the last of them on.
    """

    def gradient(of: nn.Module, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
        loss = nn.functional.cross_entropy(of(batch[0]).float(), batch[1])
        return list(torch.autograd.grad(loss, list(of.parameters())))

    def sharpness(batch: tuple[Tensor, Tensor]) -> list[Tensor]:
        perturbed = copy.deepcopy(model)
        g0 = gradient(perturbed, batch)
        norm = torch.cat([g.flatten() for g in g0]).norm()
        with torch.no_grad():
            for p, g in zip(perturbed.parameters(), g0, strict=True):
                p.add_(0.2 * g / (norm + 1e-12))
        return [a - b for a, b in zip(gradient(perturbed, batch), g0, strict=True)]

    params = list(model.parameters())
    momentum, h = ([torch.zeros_like(p) for p in params] for _ in range(2))
    waiting: list[Tensor] | None = None
    for i, (rate, batch) in enumerate(zip(RATES, batches, strict=True), 1):
        if share < 1 and i > start and i % n == 1 % n:
            size = round(share * len(batch[0]))
            waiting = sharpness((batch[0][:size], batch[1][:size]))
        if i > start and i % n == 0 and waiting is not None:
            h = waiting
        if share == 1 and i > start and i % n == 0:
            waiting = sharpness(batch)
        g0 = gradient(model, batch)
        with torch.no_grad():
            for p, g, v, term in zip(params, g0, momentum, h, strict=True):
                v.mul_(0.9).add_(g + 5e-3 * p)
                p.sub_(rate * (v + 4.0 * term))
    return model
