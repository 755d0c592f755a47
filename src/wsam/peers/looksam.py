"""LookSAM: SAM on each n-th step, and a reused part of its gradient between."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from wsam._core.mix import G0, G1, NOTHING, Mix, Part, Products, Scalar, is_exactly
from wsam._core.schedule_base import Interval, Schedule
from wsam._core.validation import count
from wsam.geometry import Geometry
from wsam.optimizer import SharpnessAware, group_value
from wsam.rule import Norm, Reuse, Rule
from wsam.schedule import Every


@dataclass(frozen=True)
class OrthogonalReuse(Rule):
    """LookSAM: two-pass steps keep the part of g1 that is orthogonal to g0, and the others add it.

        g_v = g1 - <g1,g0>/<g0,g0> g0                      base_grad = g1
        on one-pass steps                                  base_grad = g0 + alpha norm(g0)/norm(g_v) g_v

    Args:
        alpha: the weight of the reused part.
        per_tensor: use inner products and norms of each tensor instead of global ones.
    """

    alpha: float | Schedule = 0.7
    per_tensor: bool = False
    options = ("per_tensor",)
    reuse = Reuse()
    kept_needs_products = True
    keeps_orthogonal_part = True

    def mix(self, hyper: dict[str, Scalar], products: Products | None) -> Mix:
        """Return base_grad = g1."""
        return Mix(G1, NOTHING)

    def kept(self, hyper: dict[str, Scalar], products: Products | None) -> Part:
        """Return g1 - r g0 = (1 - r) g0 + (g1 - g0) with r = <g1,g0>/<g0,g0>."""
        assert products is not None
        # Where g0 vanishes, all of g1 is orthogonal to it: r = 0 instead of 0/0.
        ratio = products.g0_g1 / products.g0_g0.clamp(min=torch.finfo(products.g0_g0.dtype).tiny)
        return Part(g0=1 - ratio, difference=1.0)

    def mix_kept(self, hyper: dict[str, Scalar], g0_norm: Norm, kept_norm: Norm) -> Mix:
        """Return base_grad = g0 + alpha norm(g0)/norm(g_v) g_v."""
        if is_exactly(hyper["alpha"], 0.0):
            return Mix(G0, NOTHING)
        norm, target = kept_norm(), g0_norm()
        # Where g1 was parallel to g0, as for the bias of two classes, rounding errors remain.
        rounding = 64 * torch.finfo(norm.dtype).eps * target
        ratio = torch.where(norm > rounding, target / norm, 0.0)
        return Mix(Part(g0=1.0, difference=hyper["alpha"] * ratio), NOTHING)


class LookSAM(SharpnessAware):
    """LookSAM: the sharpness part of SAM's gradient, computed on each n-th step and reused between.

        each n-th step:    w <- w - base(g1),    g_v = g1 - <g1,g0>/norm(g0)^2 g0
        between:           w <- w - base(g0 + alpha norm(g0)/norm(g_v) g_v)

    A step costs 1 + 1/n passes on average, and g_v one parameter-sized buffer. n = 1 is SAM, and
    alpha = 0 is SAM on each n-th step.

    Args:
        base: an instance of a torch optimizer, such as `torch.optim.SGD(model.parameters(), lr=0.1)`.
        rho: the radius, as for SAM.
        alpha: the weight of the reused part. The default is the published value. ResNet18 over SGD
            did not train with it on CIFAR-10; with 0.2 it did.
        n: the steps from one two-pass step to the next.
        per_tensor: project, and compare norms, for each tensor separately, as some libraries do. By
            default both are global, as in the paper.
        when: which steps have two passes, instead of each n-th.
        geometry, model, max_norm, nonfinite, repeat_randomness, keep, local: see `SharpnessAware`.

    Reference: Liu et al., Towards Efficient and Scalable Sharpness-Aware Minimization, CVPR 2022.
    """

    alpha = group_value("alpha")

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.05,
        alpha: float | Schedule = 0.7,
        n: int = 5,
        per_tensor: bool = False,
        geometry: Geometry | None = None,
        model: nn.Module | None = None,
        max_norm: float | None = None,
        nonfinite: str = "propagate",
        repeat_randomness: bool = True,
        keep: float = 1.0,
        when: Interval | None = None,
        local: bool = False,
    ) -> None:
        every = Every(count("n", n, 1))
        super().__init__(
            base,
            rule=OrthogonalReuse(alpha, per_tensor),
            rho=rho,
            geometry=geometry,
            model=model,
            max_norm=max_norm,
            nonfinite=nonfinite,
            repeat_randomness=repeat_randomness,
            keep=keep,
            when=every if when is None else when,
            local=local,
        )
