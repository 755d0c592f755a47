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
@pytest.mark.parametrize("first", [0, 3], ids=["whole", "tail"])
def test_steps_equal_a_plain_loop(n: int, start: int, first: int) -> None:
    program = load_program("overlapped_passes")
    layers = nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
    model = nn.Sequential(*layers).double()
    batches = [(torch.randn(8, 10).double(), torch.randint(3, (8,))) for _ in RATES]
    expected = _plain_loop(copy.deepcopy(model), batches, n, start, first)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
    optimizer = WSAM(base, rho=0.2, gamma=0.8, model=model)
    objective = Objective(model, torch.mean, "fp32", torch.device("cpu"))
    head, tail = (model[:first], model[first:]) if first else (None, model)
    stepper = program.OverlappedStepper(optimizer, objective, False, n, head, tail, start=start)
    for rate, batch in zip(RATES, batches, strict=True):
        base.param_groups[0]["lr"] = rate
        stepper(*batch)
    for p, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, wanted, rtol=0, atol=1e-7)  # the loss is float32
    for buffer, wanted in zip(model.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(buffer, wanted, rtol=0, atol=1e-7)
    assert stepper.totals.steps == len(RATES)
    assert int(stepper.totals.measured) == (len(RATES) - start) // n - 1


def _plain_loop(
    model: nn.Sequential, batches: list[tuple[Tensor, Tensor]], n: int, start: int, first: int
) -> nn.Module:
    """Make the same steps one pass after the other: every n-th step gives the h of n steps later.

    Layers before `first` are not perturbed and have no h.
    """

    def gradient(of: nn.Module, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
        loss = nn.functional.cross_entropy(of(batch[0]).float(), batch[1])
        return list(torch.autograd.grad(loss, list(of.parameters())))

    params = list(model.parameters())
    skipped = len(list(model[:first].parameters()))
    momentum = [torch.zeros_like(p) for p in params]
    h = [torch.zeros_like(p) for p in params]
    waiting: list[Tensor] | None = None
    for i, (rate, batch) in enumerate(zip(RATES, batches, strict=True), 1):
        g0 = gradient(model, batch)
        if i > start and i % n == 0:
            if waiting is not None:
                h = waiting
            perturbed = copy.deepcopy(model)
            norm = torch.cat([g.flatten() for g in g0[skipped:]]).norm()
            with torch.no_grad():
                for p, g in list(zip(perturbed.parameters(), g0, strict=True))[skipped:]:
                    p.add_(0.2 * g / (norm + 1e-12))
            waiting = [a - b for a, b in zip(gradient(perturbed, batch), g0, strict=True)]
            waiting[:skipped] = h[:skipped]
        with torch.no_grad():
            for p, g, v, term in zip(params, g0, momentum, h, strict=True):
                v.mul_(0.9).add_(g + 5e-3 * p)
                p.sub_(rate * (v + 4.0 * term))
    return model
