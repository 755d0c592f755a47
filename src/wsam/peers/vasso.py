"""VaSSO: the perturbation follows an average of gradients."""

from torch import nn
from torch.optim import Optimizer

from wsam._core.schedule_base import Interval, Schedule
from wsam.geometry import Averaged
from wsam.optimizer import SharpnessAware, geometry_value
from wsam.rule import Perturbed


class VaSSO(SharpnessAware):
    """Variance-suppressed SAM: perturb along an average of gradients, which is less noisy than g0.

        m <- (1 - theta) m + theta g0,    d = rho m / (norm(m) + eps),    w <- w - base(g1)

    In the first step m = g0. theta = 1 is SAM. m costs one parameter-sized buffer. For other rules
    with this perturbation, pass `geometry=wsam.geometry.Averaged(theta)` to them.

    Args:
        base: an instance of a torch optimizer, such as `torch.optim.SGD(model.parameters(), lr=0.1)`.
        rho: the radius, as for SAM.
        theta: the share of the new gradient, in (0, 1]; the smaller, the longer the average.
        model, max_norm, nonfinite, repeat_randomness, keep, when: see `SharpnessAware`.

    Reference: Li and Giannakis, Enhancing Sharpness-Aware Optimization Through Variance Suppression,
    NeurIPS 2023.
    """

    theta = geometry_value("theta")

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.05,
        theta: float = 0.9,
        model: nn.Module | None = None,
        max_norm: float | None = None,
        nonfinite: str = "propagate",
        repeat_randomness: bool = True,
        keep: float = 1.0,
        when: Interval | None = None,
    ) -> None:
        super().__init__(
            base,
            rule=Perturbed(),
            rho=rho,
            geometry=Averaged(theta),
            model=model,
            max_norm=max_norm,
            nonfinite=nonfinite,
            repeat_randomness=repeat_randomness,
            keep=keep,
            when=when,
        )
