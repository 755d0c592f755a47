"""FriendlySAM: the perturbation follows the part of the gradient that is special to the batch."""

from torch import nn
from torch.optim import Optimizer

from wsam._core.schedule_base import Interval, Schedule
from wsam.geometry import WithoutAverage
from wsam.optimizer import SharpnessAware, geometry_value
from wsam.rule import Perturbed


class FriendlySAM(SharpnessAware):
    """Friendly SAM: perturb along the gradient of the batch without the average of earlier ones.

        a = g0 - sigma m,    d = rho a / (norm(a) + eps),    w <- w - base(g1)
        m <- decay m + (1 - decay) g0

    In the first step a = m = g0. sigma = 0 is SAM. m costs one parameter-sized buffer. For other rules
    with this perturbation, pass `geometry=wsam.geometry.WithoutAverage(sigma, decay)` to them.

    Args:
        base: an instance of a torch optimizer, such as `torch.optim.SGD(model.parameters(), lr=0.1)`.
        rho: the radius, as for SAM.
        sigma: how much of the average is removed.
        decay: of the average, in [0, 1), lambda in the paper; 0.6 to 0.95.
        model, max_norm, nonfinite, repeat_randomness, keep, when: see `SharpnessAware`.

    Reference: Li et al., Friendly Sharpness-Aware Minimization, CVPR 2024.
    """

    sigma = geometry_value("sigma")
    decay = geometry_value("decay")

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.05,
        sigma: float = 1.0,
        decay: float = 0.9,
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
            geometry=WithoutAverage(sigma, decay),
            model=model,
            max_norm=max_norm,
            nonfinite=nonfinite,
            repeat_randomness=repeat_randomness,
            keep=keep,
            when=when,
        )
