"""The named members of the family: each a geometry, a rule, defaults and a docstring.

A new variant is one file with its rule or geometry, and a class and a line here.
"""

from typing import Any

from torch.optim import Optimizer

from wsam.checks import number
from wsam.foreign import explain_arguments
from wsam.geometry import Adaptive, Fisher, Masked
from wsam.optimizer import SharpnessAware
from wsam.rule import Coupled, Perturbed, SurrogateGap, Weighted
from wsam.schedule import FollowLR, Schedule
from wsam.wrapper import check_base, elsewhere, share_kept

_ADAPTIVE = "set optimizer.geometry = Adaptive(eta, weights_only)"
_SCHEDULED = "it is part of the schedule of rho; wrap optimizer.base again to change it"


class SAM(SharpnessAware):
    """Sharpness-aware minimization: step by the gradient at the worst point nearby.

        d = rho g0 / (norm(g0) + eps),    w <- w - base(g1)

    Args:
        base: the base optimizer's instance.
        rho: the radius; 0.05 to 0.2 on CIFAR.
        **options: see `SharpnessAware`.

    Reference: Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization,
    ICLR 2021.
    """

    def __init__(self, base: Optimizer, *, rho: float | Schedule = 0.05, **options: Any) -> None:
        super().__init__(base, rule=Perturbed(), rho=rho, **options)


class WSAM(SharpnessAware):
    """Weighted sharpness-aware minimization: sharpness as a regulariser of its own weight.

        d = rho g0 / (norm(g0) + eps),    w <- w - base(g0) - lr k (g1 - g0),    k = gamma/(1 - gamma)

    The sharpness term is decoupled: it passes by the base optimizer's momentum and preconditioner.
    With momentum mu its effective weight is about k(1 - mu): over SGD with momentum 0.9, SAM's weight
    is at gamma = 10/11. Choose gamma and rho together; too large a k * rho makes training diverge.

    Args:
        base: the base optimizer's instance.
        rho: the radius.
        gamma: the weight of sharpness, in [0, 1); 0.8 to 0.95 over SGD with momentum.
        **options: see `SharpnessAware`.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> opt = WSAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05, gamma=0.9)

    Reference: Yue et al., Sharpness-Aware Minimization Revisited: Weighted Sharpness as a
    Regularization Term, KDD 2023.
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.05,
        gamma: float | Schedule = 0.9,
        **options: Any,
    ) -> None:
        super().__init__(base, rule=Weighted(gamma), rho=rho, **options)


class CoupledWSAM(SharpnessAware):
    """WSAM with its sharpness term inside the base optimizer.

        w <- w - base(g0 + k (g1 - g0)),    k = gamma/(1 - gamma)

    gamma = 0 is the base, gamma = 1/2 is SAM. Preferable over adaptive bases, whose preconditioner
    the decoupled term does not see.

    Args:
        base: the base optimizer's instance.
        rho: the radius.
        gamma: the weight of sharpness, in [0, 1); begin at 1/2 and go up to 0.65 or so: all of k
            counts here, while momentum divides that of the decoupled form.
        **options: see `SharpnessAware`.

    Reference: Yue et al., KDD 2023, Algorithm 4; Zhao et al., Penalizing Gradient Norm, ICML 2022.
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.05,
        gamma: float | Schedule = 0.5,
        **options: Any,
    ) -> None:
        super().__init__(base, rule=Coupled(gamma), rho=rho, **options)


class GSAM(SharpnessAware):
    """Surrogate-gap guided SAM: also descend the gap, along what of g0 is orthogonal to g1.

        w <- w - base(g1 - alpha (g0 - <g0,g1>/<g1,g1> g1))

    Args:
        base: the base optimizer's instance.
        rho: the radius; with `rho_min` the largest.
        alpha: the weight of the orthogonal part; 0 is SAM.
        rho_min: if given, the radius follows the learning rate, from `rho` at each group's own
            largest down to `rho_min` at `lr_min`, and never leaves [rho_min, rho]. The largest is what
            a scheduler has left in the group as `max_lr` or `initial_lr`, else the base's learning
            rate as it is now; short for `rho=FollowLR(rho, rho_min, lr_low=lr_min)`.
        lr_min: see `rho_min`.
        **options: see `SharpnessAware`.

    Reference: Zhuang et al., Surrogate Gap Minimization Improves Sharpness-Aware Training, ICLR 2022.
    """

    rho_min = elsewhere("rho_min", None, _SCHEDULED)
    lr_min = elsewhere("lr_min", None, _SCHEDULED)

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.05,
        alpha: float | Schedule = 0.1,
        rho_min: float | None = None,
        lr_min: float = 0.0,
        **options: Any,
    ) -> None:
        if rho_min is not None:
            rho = _following(base, rho, rho_min, lr_min)
        elif lr_min != 0.0:
            raise ValueError("lr_min says where the radius reaches rho_min: give rho_min, too")
        super().__init__(base, rule=SurrogateGap(alpha), rho=rho, **options)


def _following(base: Any, rho: Any, rho_min: float, lr_min: float) -> Schedule:
    """Return the radius that falls with the learning rate from rho to rho_min."""
    if isinstance(rho, Schedule):
        raise TypeError("give rho as a schedule, or rho_min, not both")
    check_base(base, SurrogateGap())
    number("rho_min", rho_min, 0, number("rho", rho), high_open=False)
    schedule = FollowLR(high=rho, low=rho_min, lr_low=number("lr_min", lr_min))
    largest = max(schedule.heed(group).found or 0.0 for group in base.param_groups)
    if largest == 0.0:
        raise ValueError(
            "rho_min lets the radius follow the learning rate, but that is 0 in all groups and no "
            "scheduler says how large it will be: set it, or give rho=FollowLR(high, low, lr_high)"
        )
    number("lr_min", lr_min, 0, largest)
    return schedule


class ESAM(SharpnessAware):
    """Efficient SAM: perturb some tensors, learn from some samples.

    Each tensor is perturbed with probability beta (radius divided by beta); in the second pass the
    share gamma of samples whose loss grew most counts. The closure gives per-sample losses:

        loss = opt.select(F.cross_entropy(model(x), y, reduction="none"))

    Args:
        base: the base optimizer's instance.
        rho: the radius.
        beta: the probability of a tensor to be perturbed, in (0, 1].
        gamma: the share of samples kept, in (0, 1].
        seed: of the choice of tensors.
        **options: see `SharpnessAware`.

    Reference: Du et al., Efficient Sharpness-aware Minimization for Improved Training of Neural
    Networks, ICLR 2022.
    """

    fixes = ("geometry", "keep")
    beta = elsewhere("beta", "geometry.beta", "set optimizer.geometry = Masked(beta, seed)")
    seed = elsewhere("seed", "geometry.seed", "set optimizer.geometry = Masked(beta, seed)")
    gamma = share_kept("gamma")

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.05,
        beta: float = 0.6,
        gamma: float = 0.6,
        seed: int = 0,
        **options: Any,
    ) -> None:
        number("gamma", gamma, 0, 1, low_open=True, high_open=False)
        super().__init__(
            base, rule=Perturbed(), rho=rho, geometry=Masked(beta, seed), keep=gamma, **options
        )


class ASAM(SharpnessAware):
    """Adaptive SAM: a neighbourhood that scales with the weights.

        d = rho T^2 g0 / (norm(T g0) + eps),    T = abs(w) + eta,    w <- w - base(g1)

    Args:
        base: the base optimizer's instance.
        rho: the radius; larger than SAM's, 0.5 to 5.
        eta: keeps T from vanishing.
        weights_only: T = 1 for tensors whose name does not hold "weight".
        **options: see `SharpnessAware`.

    Reference: Kwon et al., ASAM: Adaptive Sharpness-Aware Minimization, ICML 2021.
    """

    fixes = ("geometry",)
    eta = elsewhere("eta", "geometry.eta", _ADAPTIVE)
    weights_only = elsewhere("weights_only", "geometry.weights_only", _ADAPTIVE)

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.5,
        eta: float = 0.01,
        weights_only: bool = False,
        **options: Any,
    ) -> None:
        shape = Adaptive(eta, weights_only)
        super().__init__(base, rule=Perturbed(), rho=rho, geometry=shape, **options)


class FisherSAM(SharpnessAware):
    """Fisher SAM: a neighbourhood shaped by the empirical Fisher information.

        d = rho F^-1 g0 / (sqrt(<g0, F^-1 g0>) + eps),    F = 1 + eta g0^2,    w <- w - base(g1)

    Args:
        base: the base optimizer's instance.
        rho: the radius.
        eta: the weight of the Fisher information.
        **options: see `SharpnessAware`.

    Reference: Kim et al., Fisher SAM: Information Geometry and Sharpness Aware Minimisation, ICML 2022.
    """

    fixes = ("geometry",)
    eta = elsewhere("eta", "geometry.eta", "set optimizer.geometry = Fisher(eta)")

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.05,
        eta: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(base, rule=Perturbed(), rho=rho, geometry=Fisher(eta), **options)


METHODS: dict[str, type[SharpnessAware]] = {
    "sam": SAM,
    "wsam": WSAM,
    "coupled_wsam": CoupledWSAM,
    "gsam": GSAM,
    "esam": ESAM,
    "asam": ASAM,
    "fisher_sam": FisherSAM,
}
"""Every member by name: what the command line offers and the tests walk through."""

for _member in METHODS.values():
    explain_arguments(_member, SharpnessAware)


def create(name: str, base: Optimizer, **hyper: Any) -> SharpnessAware:
    """Make the member called `name` around `base`.

    Example:
        >>> import torch
        >>> weights = torch.nn.Parameter(torch.zeros(2))
        >>> opt = create("wsam", torch.optim.SGD([weights], lr=0.1), gamma=0.8)
    """
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; known: {', '.join(METHODS)}")
    return METHODS[name](base, **hyper)
