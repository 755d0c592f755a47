"""The experiment that renews a part of the reused h in every step: benchmarks/renewed_sharpness.py."""

import copy

import pytest
import torch
from programs import load_program
from torch import Tensor, nn

from wsam import WSAM
from wsam.lab.step import Objective

RATES = [0.1, 0.09, 0.08, 0.07, 0.06, 0.05]


@pytest.mark.slow
@pytest.mark.parametrize(("n", "start"), [(1, 0), (2, 0), (2, 2), (3, 0), (3, 3)])
def test_steps_equal_a_plain_loop(n: int, start: int) -> None:
    load_program("overlapped_passes")  # which the program imports
    program = load_program("renewed_sharpness")
    layers = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
    model = nn.Sequential(*layers).double()
    batches = [(torch.randn(32, 2, 4, 4).double(), torch.randint(3, (32,))) for _ in RATES]
    expected = _plain_loop(copy.deepcopy(model), batches, n, start)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
    optimizer = WSAM(base, rho=0.2, gamma=0.8, model=model)
    objective = Objective(model, torch.mean, "fp32", torch.device("cpu"))
    stepper = program.RenewedStepper(optimizer, objective, False, n, start=start)
    for rate, batch in zip(RATES, batches, strict=True):
        base.param_groups[0]["lr"] = rate
        stepper(*batch)
    for p, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, wanted, rtol=0, atol=1e-6)  # the loss is float32
    assert int(stepper.totals.measured) == (len(RATES) - start) // n


def _plain_loop(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], n: int, start: int
) -> nn.Module:
    """Make the same steps, one filter after the other."""

    def gradient(of: nn.Module, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
        loss = nn.functional.cross_entropy(of(batch[0]).float(), batch[1])
        return list(torch.autograd.grad(loss, list(of.parameters())))

    def norm(tensors: list[Tensor]) -> Tensor:
        return torch.cat([t.flatten() for t in tensors]).norm()

    def filters(tensors: list[Tensor]) -> list[Tensor]:
        return [one for t in tensors for one in (t if t.dim() > 1 else [t])]

    params = list(model.parameters())
    momentum = [torch.zeros_like(p) for p in params]
    kept: list[tuple[Tensor, Tensor]] = []
    for i, (rate, batch) in enumerate(zip(RATES, batches, strict=True)):
        g = gradient(model, batch)
        terms = [torch.zeros_like(p) for p in params]
        if i >= start and i % n == 0:
            perturbed = copy.deepcopy(model)
            with torch.no_grad():
                for p, own in zip(perturbed.parameters(), g, strict=True):
                    p.add_(0.2 * own / norm(g))
            terms = [a - b for a, b in zip(gradient(perturbed, batch), g, strict=True)]
            kept = []
            for h, own in zip(filters(terms), filters(g), strict=True):
                c = (h * own).sum() / (own * own).sum()
                kept.append((h - c * own, c * norm(g)))
        elif i >= start:
            for term, own, (rest, along) in zip(filters(terms), filters(g), kept, strict=True):
                term.copy_(rest + along * own / norm(g))
        with torch.no_grad():
            for p, own, v, term in zip(params, g, momentum, terms, strict=True):
                v.mul_(0.9).add_(own + 5e-3 * p)
                p.sub_(rate * (v + 4.0 * term))
    return model
