"""Geometries of users' own: what they override is used."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import wsam
from wsam._core.memory import Memory
from wsam._core.param_blocks import Block
from wsam.accel.cuda_graph import check_optimizer
from wsam.geometry import AlongMomentum, Averaged, Euclidean, Geometry, Masked
from wsam.rule import Perturbed, Rule, Weighted


@dataclass(frozen=True)
class OwnVector(Geometry):
    """Has a metric and a vector, and declares nothing."""

    def sqrt_metric(self, block: Block, g0: list[Tensor]) -> list[Tensor]:
        return [torch.full_like(g, 2.0) for g in g0]

    def vector(self, block: Block, g0: list[Tensor], memory: Memory) -> list[Tensor]:
        return [torch.arange(1.0, 5.0) for _ in g0]


class Inherited(OwnVector):
    """Has the vector of its base class."""


@dataclass(frozen=True)
class Declared(Geometry):
    """Declares that d does not follow g0, as earlier versions required."""

    follows_g0: ClassVar[bool] = False


@pytest.mark.parametrize("rule", [Perturbed(), Weighted(0.5)], ids=["perturbed", "weighted"])
@pytest.mark.parametrize("geometry", [OwnVector(), Inherited()], ids=["own", "inherited"])
def test_own_vector_is_used(rule: Rule, geometry: Geometry) -> None:
    """Where the rule does not keep g0, a geometry that follows g0 may overwrite it with S g0."""
    w = nn.Parameter(torch.zeros(4))
    opt = wsam.SharpnessAware(torch.optim.SGD([w], lr=0.0), rule=rule, geometry=geometry, rho=1.0)
    seen = []

    def closure() -> Tensor:
        seen.append(w.detach().clone())
        loss = w.sum()
        loss.backward()
        return loss

    opt.step(closure)
    v = torch.arange(1.0, 5.0)
    torch.testing.assert_close(seen[1], 2 * v / v.norm())


def test_follows_g0() -> None:
    assert Euclidean().follows_g0
    assert Masked().follows_g0
    for geometry in (OwnVector(), Inherited(), Declared(), Averaged(), AlongMomentum()):
        assert not geometry.follows_g0


@dataclass(frozen=True)
class Alternating(Geometry):
    """Perturbs every second tensor."""

    def mask(self, step: int, tensors: int) -> list[bool]:
        return [(step + i) % 2 == 0 for i in range(tensors)]


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        (Alternating(), "Alternating.mask cannot be captured"),
        (Masked(), "one CUDA device"),
        (OwnVector(), "one CUDA device"),
    ],
    ids=["own mask", "masked", "own vector"],
)
def test_own_mask_is_not_captured(geometry: Geometry, message: str) -> None:
    """A CUDA graph would repeat the mask of the step that was recorded."""
    opt = wsam.SAM(torch.optim.SGD([nn.Parameter(torch.zeros(4))], lr=0.1), geometry=geometry)
    with pytest.raises(ValueError, match=message):
        check_optimizer(opt)
