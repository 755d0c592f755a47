"""WSAM with one gradient a step: an experiment."""

from dataclasses import dataclass, field

from torch import nn
from torch.optim import Optimizer

from wsam._core.mix import G0, G1, NOTHING, Mix, Part, Products, Scalar
from wsam._core.param_blocks import Block
from wsam._core.param_groups import PREFIX
from wsam._core.schedule_base import Interval, Schedule, saveable
from wsam._core.validation import number
from wsam.geometry import AlongMomentum
from wsam.optimizer import SharpnessAware, group_value
from wsam.peers.msam import warn_without_momentum
from wsam.rule import Norm, Rule, sharpness_weight

SIGN = "sign"


@saveable
@dataclass(frozen=True)
class Alternate(Schedule):
    """+1 at odd steps, -1 at even ones."""

    def value(self, step: int, lr: Scalar) -> Scalar:
        """Return the sign."""
        return 1.0 if step % 2 else -1.0

    def extremes(self) -> tuple[float, ...]:
        """Return both values."""
        return (-1.0, 1.0)


@dataclass(frozen=True)
class BothSides(AlongMomentum):
    """A ball, with d along the base's momentum and against it in turn."""

    def factor(self, block: Block) -> Scalar:
        """Return the sign of this step."""
        sign: Scalar = block.group[PREFIX + SIGN]
        return sign


@dataclass(frozen=True)
class AlternatingDifference(Rule):
    """One-pass WSAM: the base receives the gradient, and k times an average of s g is applied."""

    gamma: float | Schedule = 0.9
    sign: float | Schedule = field(default_factory=Alternate)
    decay: float = 0.9
    keeps_g0 = False
    keeps_vector = True
    options = ("decay",)

    def __post_init__(self) -> None:
        number("decay", self.decay, 0, 1)

    @property
    def average(self) -> float:  # type: ignore[override]
        """The share of the earlier H in the kept one."""
        return self.decay

    def mix(self, hyper: dict[str, Scalar], products: Products | None) -> Mix:
        """Return base_grad = g1."""
        return Mix(G1, NOTHING)

    def kept(self, hyper: dict[str, Scalar], products: Products | None) -> Part:
        """Return s g."""
        return Part(g0=hyper[SIGN], difference=0.0)

    def mix_kept(self, hyper: dict[str, Scalar], g0_norm: Norm, kept_norm: Norm) -> Mix:
        """Return base_grad = g, decoupled = k H."""
        return Mix(G0, Part(g0=0.0, difference=sharpness_weight(hyper["gamma"])))

    @classmethod
    def check(cls, name: str, value: float) -> float:
        """Require gamma in [0, 1) and a sign in [-1, 1]."""
        if name == SIGN:
            return number(name, value, -1, 1, high_open=False)
        return number(name, value, 0, 1)


class OnePassWSAM(SharpnessAware):
    """WSAM with one gradient a step, on both sides of w in turn. Experimental.

        d = s rho b / (norm(b) + eps),    s = 1, -1, 1, ...        b: the base's momentum
        g = grad l(w + d),    H <- decay H + (1 - decay) s g
        w <- w - base(g) - lr k H,    k = gamma/(1 - gamma)

    Over two steps the shifts of g cancel to first order, so that the base is almost unaffected, and H
    estimates half the difference of the gradients at the two points. H begins at 0 and costs one
    parameter-sized buffer. gamma sets the weight of sharpness, as in WSAM; gamma = 0 leaves the
    alternating perturbation. The closure runs once a step, as in `MSAM`, which also describes b, the
    steps without one, and the loop by hand.

    Args:
        base: an instance of a torch optimizer with momentum, such as
            `torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)`.
        rho: the radius; larger than WSAM's, 0.5 to 1.
        gamma: the weight of sharpness, in [0, 1).
        decay: of the average H, in [0, 1).
        model, max_norm, nonfinite, repeat_randomness, when: see `SharpnessAware`.
    """

    gamma = group_value("gamma")

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 1.0,
        gamma: float | Schedule = 0.9,
        decay: float = 0.9,
        model: nn.Module | None = None,
        max_norm: float | None = None,
        nonfinite: str = "propagate",
        repeat_randomness: bool = True,
        when: Interval | None = None,
    ) -> None:
        super().__init__(
            base,
            rule=AlternatingDifference(gamma, decay=decay),
            rho=rho,
            geometry=BothSides(),
            model=model,
            max_norm=max_norm,
            nonfinite=nonfinite,
            repeat_randomness=repeat_randomness,
            when=when,
        )
        warn_without_momentum("OnePassWSAM", base)
