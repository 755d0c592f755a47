"""The named methods: each a geometry, a rule, defaults and a docstring.

A new method is a class with its rule or geometry, here or in its own file, and a line in `METHODS`.
"""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from wsam._core.param_groups import PREFIX, RHO
from wsam._core.preconditioners import find_preconditioner
from wsam._core.schedule_base import Interval, Schedule
from wsam._core.validation import number, warn
from wsam.geometry import Adaptive, Euclidean, Fisher, Geometry, Masked
from wsam.optimizer import SharpnessAware, geometry_value, group_value
from wsam.peers.friendly_sam import FriendlySAM
from wsam.peers.looksam import LookSAM
from wsam.peers.msam import MSAM
from wsam.peers.vasso import VaSSO
from wsam.rule import Coupled, Perturbed, Reuse, SurrogateGap, Weighted, sharpness_weight
from wsam.schedule import FollowLR


class SAM(SharpnessAware):
    """Sharpness-aware minimization: step by the gradient at the worst point nearby.

        d = rho g0 / (norm(g0) + eps),    w <- w - base(g1)

    Args:
        base: an instance of a torch optimizer, such as `torch.optim.SGD(model.parameters(), lr=0.1)`.
        rho: the radius; 0.05 to 0.2 on CIFAR.
        ascent_steps: how many steps lead to w + d; K of them cost K + 1 passes.
        geometry, model, max_norm, nonfinite, repeat_randomness, keep, when, local: see
            `SharpnessAware`.

    Reference: Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization,
    ICLR 2021.
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.05,
        geometry: Geometry | None = None,
        model: nn.Module | None = None,
        max_norm: float | None = None,
        nonfinite: str = "propagate",
        repeat_randomness: bool = True,
        keep: float = 1.0,
        when: Interval | None = None,
        local: bool = False,
        ascent_steps: int = 1,
    ) -> None:
        super().__init__(
            base,
            rule=Perturbed(),
            rho=rho,
            geometry=geometry,
            model=model,
            max_norm=max_norm,
            nonfinite=nonfinite,
            repeat_randomness=repeat_randomness,
            keep=keep,
            when=when,
            local=local,
            ascent_steps=ascent_steps,
        )


class WSAM(SharpnessAware):
    """Weighted sharpness-aware minimization: sharpness as a regularizer with its own weight.

        d = rho g0 / (norm(g0) + eps),    w <- w - base(g0) - lr k (g1 - g0),    k = gamma/(1 - gamma)

    The sharpness term is decoupled: it bypasses the base optimizer's momentum. With momentum mu its
    effective weight is about k (1 - mu): over SGD with momentum 0.9, gamma = 10/11 has the weight of
    SAM. Choose gamma and rho together; training diverges if k * rho is too large.

    Over Adam and other adaptive bases, whose steps do not shrink with the gradient, the published term
    has almost no effect. There it is preconditioned, that is divided by the base's own denominator:

        w <- w - lr (m(g0) + k h) / (sqrt(v) + eps),    h = g1 - g0,    v over g0^2 + (k h)^2

    with the base's averages m and v, bias corrections and weight decay. gamma = 1/2 has the weight of
    SAM there.

    Args:
        base: an instance of a torch optimizer, such as `torch.optim.SGD(model.parameters(), lr=0.1)`.
        rho: the radius; 0.05 to 0.2 on CIFAR.
        gamma: the weight of sharpness, in [0, 1); 0.8 to 0.95 over SGD with momentum. None: 0.9, or 1/2
            where the term is preconditioned.
        precondition: divide the sharpness term by the base's denominator. "auto": over Adam, AdamW,
            NAdam, RAdam, Adagrad, RMSprop, Adadelta, classes derived from them and those of
            `wsam.register_preconditioner`. False: the published form.
        lean: let the base step between the passes: saves a buffer, but a step cannot be undone. Not
            where the term is preconditioned.
        reuse: on the steps between those that `when` chooses, apply the sharpness gradient g1 - g0 of
            the last one, at the cost of one pass and a parameter-sized buffer. True, or a
            `wsam.rule.Reuse` with options. Needs `when`.
        ascent_steps: how many steps lead to w + d; K of them cost K + 1 passes.
        geometry, model, max_norm, nonfinite, repeat_randomness, keep, when, local: see
            `SharpnessAware`.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> opt = WSAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05, gamma=0.9)
        >>> def closure():
        ...     loss = model(torch.ones(4, 2)).square().mean()
        ...     loss.backward()
        ...     return loss
        >>> loss = opt.step(closure)

    Reference: Yue et al., Sharpness-Aware Minimization Revisited: Weighted Sharpness as a
    Regularization Term, KDD 2023.
    """

    gamma = group_value("gamma")

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.05,
        gamma: float | Schedule | None = None,
        geometry: Geometry | None = None,
        model: nn.Module | None = None,
        lean: bool = False,
        max_norm: float | None = None,
        nonfinite: str = "propagate",
        repeat_randomness: bool = True,
        keep: float = 1.0,
        when: Interval | None = None,
        reuse: bool | Reuse = False,
        local: bool = False,
        ascent_steps: int = 1,
        precondition: bool | str = "auto",
    ) -> None:
        if not isinstance(reuse, bool | Reuse):
            raise TypeError(f"reuse must be True, False or a wsam.rule.Reuse, got {reuse!r}")
        if reuse and when is None:
            raise ValueError("reuse needs an interval of two-pass steps, such as when=Every(2)")
        if not isinstance(precondition, bool) and precondition != "auto":
            raise TypeError(f'precondition must be "auto", True or False, got {precondition!r}')
        if precondition == "auto":
            precondition = find_preconditioner(base) is not None
        if gamma is None:
            gamma = 0.5 if precondition else Weighted.gamma
        super().__init__(
            base,
            rule=Weighted(gamma, Reuse() if reuse is True else reuse, bool(precondition)),
            rho=rho,
            geometry=geometry,
            model=model,
            lean=lean,
            max_norm=max_norm,
            nonfinite=nonfinite,
            repeat_randomness=repeat_randomness,
            keep=keep,
            when=when,
            local=local,
            ascent_steps=ascent_steps,
        )
        if not precondition:
            self._warn_about_adaptive_base()
        elif isinstance(self.geometry, Euclidean):
            self._warn_about_large_weight()

    def _warn_about_large_weight(self) -> None:
        """Warn if k rho is in the range of SGD, which is too large for a preconditioned term."""
        values = [(group[RHO], group[PREFIX + "gamma"]) for group in self.param_groups]
        weight = max(float(rho * sharpness_weight(gamma)) for rho, gamma in values)
        if weight >= 0.8:
            warn(
                f"WSAM over {type(self.base).__name__}: k rho = {weight:.3g}, k = gamma/(1 - gamma), "
                "is usually far too large for a preconditioned term: start at 0.05, as with gamma=0.5 "
                "and rho=0.05 (docs/choosing.md)"
            )

    def _warn_about_adaptive_base(self) -> None:
        """Warn if the base normalizes its step, as Adam, Adagrad, RMSprop and Lion do."""
        if any("eps" in group or "betas" in group for group in self.param_groups):
            known = find_preconditioner(self.base) is not None
            warn(
                f"WSAM over {type(self.base).__name__}: the decoupled term has almost no effect, "
                "because it shrinks with the gradient and the base's step does not: use "
                + ("precondition=True with gamma=0.5" if known else "CoupledWSAM or SAM")
            )


class CoupledWSAM(SharpnessAware):
    """WSAM with its sharpness term inside the base optimizer.

        w <- w - base(g0 + k (g1 - g0)),    k = gamma/(1 - gamma)

    gamma = 0 is the base, gamma = 1/2 is SAM. The term enters the base's momentum, too.

    Args:
        base: an instance of a torch optimizer, such as `torch.optim.SGD(model.parameters(), lr=0.1)`.
        rho: the radius.
        gamma: the weight of sharpness, in [0, 1). Start at 1/2 and go up to about 0.65: momentum does
            not reduce the weight as it does in WSAM.
        ascent_steps: how many steps lead to w + d; K of them cost K + 1 passes.
        geometry, model, max_norm, nonfinite, repeat_randomness, keep, when, local: see
            `SharpnessAware`.

    Reference: Yue et al., KDD 2023, Algorithm 4; Zhao et al., Penalizing Gradient Norm, ICML 2022.
    """

    gamma = group_value("gamma")

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.05,
        gamma: float | Schedule = 0.5,
        geometry: Geometry | None = None,
        model: nn.Module | None = None,
        max_norm: float | None = None,
        nonfinite: str = "propagate",
        repeat_randomness: bool = True,
        keep: float = 1.0,
        when: Interval | None = None,
        local: bool = False,
        ascent_steps: int = 1,
    ) -> None:
        super().__init__(
            base,
            rule=Coupled(gamma),
            rho=rho,
            geometry=geometry,
            model=model,
            max_norm=max_norm,
            nonfinite=nonfinite,
            repeat_randomness=repeat_randomness,
            keep=keep,
            when=when,
            local=local,
            ascent_steps=ascent_steps,
        )


class GSAM(SharpnessAware):
    """Surrogate-gap guided SAM: also ascend along the part of g0 that is orthogonal to g1.

        w <- w - base(g1 - alpha (g0 - <g0,g1>/<g1,g1> g1))

    Args:
        base: an instance of a torch optimizer, such as `torch.optim.SGD(model.parameters(), lr=0.1)`.
        rho: the radius; with `rho_min` the largest one.
        alpha: the weight of the orthogonal part; 0 is SAM.
        rho_min: if given, the radius follows the learning rate: from `rho` at each group's largest
            learning rate down to `rho_min` at `lr_min`, clamped to [rho_min, rho]. Short for
            `rho=FollowLR(rho, rho_min, lr_low=lr_min)`.
        lr_min: see `rho_min`.
        ascent_steps: how many steps lead to w + d; K of them cost K + 1 passes.
        geometry, model, max_norm, nonfinite, repeat_randomness, keep, when, local: see
            `SharpnessAware`.

    Reference: Zhuang et al., Surrogate Gap Minimization Improves Sharpness-Aware Training, ICLR 2022.
    """

    alpha = group_value("alpha")

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.05,
        alpha: float | Schedule = 0.1,
        rho_min: float | None = None,
        lr_min: float = 0.0,
        geometry: Geometry | None = None,
        model: nn.Module | None = None,
        max_norm: float | None = None,
        nonfinite: str = "propagate",
        repeat_randomness: bool = True,
        keep: float = 1.0,
        when: Interval | None = None,
        local: bool = False,
        ascent_steps: int = 1,
    ) -> None:
        if rho_min is not None:
            rho = FollowLR(rho, rho_min, lr_low=lr_min)  # type: ignore[arg-type]
        elif lr_min != 0.0:
            raise ValueError("lr_min is where the radius reaches rho_min: pass rho_min, too")
        super().__init__(
            base,
            rule=SurrogateGap(alpha),
            rho=rho,
            geometry=geometry,
            model=model,
            max_norm=max_norm,
            nonfinite=nonfinite,
            repeat_randomness=repeat_randomness,
            keep=keep,
            when=when,
            local=local,
            ascent_steps=ascent_steps,
        )


class ESAM(SharpnessAware):
    """Efficient SAM: perturb some tensors, and use some samples in the second pass.

    Each tensor is perturbed with probability beta. The norm is over the perturbed tensors alone, and
    the radius is divided by beta. The second pass uses the share gamma of samples whose loss increased
    most. The closure provides per-sample losses:

        loss = opt.select(F.cross_entropy(model(x), y, reduction="none"))

    `wsam.train_step` computes gradients of the selected samples alone, after a forward pass that
    selects them; that saves time where the batch keeps the device busy. A closure computes all losses
    again and selects among them.

    Args:
        base: an instance of a torch optimizer, such as `torch.optim.SGD(model.parameters(), lr=0.1)`.
        rho: the radius.
        beta: the probability that a tensor is perturbed, in (0, 1].
        gamma: the share of samples in the second pass, in (0, 1].
        seed: of the selection of tensors.
        model, max_norm, nonfinite, repeat_randomness, when, local: see `SharpnessAware`.

    Reference: Du et al., Efficient Sharpness-aware Minimization for Improved Training of Neural
    Networks, ICLR 2022.
    """

    beta = geometry_value("beta")
    seed = geometry_value("seed")

    @property
    def gamma(self) -> float:
        """The share of samples in the second pass."""
        return self.keep

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.05,
        beta: float = 0.6,
        gamma: float = 0.6,
        seed: int = 0,
        model: nn.Module | None = None,
        max_norm: float | None = None,
        nonfinite: str = "propagate",
        repeat_randomness: bool = True,
        when: Interval | None = None,
        local: bool = False,
    ) -> None:
        number("gamma", gamma, 0, 1, low_open=True, high_open=False)
        super().__init__(
            base,
            rule=Perturbed(),
            rho=rho,
            geometry=Masked(beta, seed),
            model=model,
            max_norm=max_norm,
            nonfinite=nonfinite,
            repeat_randomness=repeat_randomness,
            keep=gamma,
            when=when,
            local=local,
        )


class ASAM(SharpnessAware):
    """Adaptive SAM: a neighborhood that scales with the weights.

        d = rho T^2 g0 / (norm(T g0) + eps),    T = abs(w) + eta,    w <- w - base(g1)

    Args:
        base: an instance of a torch optimizer, such as `torch.optim.SGD(model.parameters(), lr=0.1)`.
        rho: the radius; larger than SAM's, 0.5 to 5.
        eta: keeps T positive.
        weights_only: use T = 1 for tensors whose name does not contain "weight".
        model, max_norm, nonfinite, repeat_randomness, keep, when, local: see `SharpnessAware`.

    Reference: Kwon et al., ASAM: Adaptive Sharpness-Aware Minimization, ICML 2021.
    """

    eta = geometry_value("eta")
    weights_only = geometry_value("weights_only")

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.5,
        eta: float = 0.01,
        weights_only: bool = False,
        model: nn.Module | None = None,
        max_norm: float | None = None,
        nonfinite: str = "propagate",
        repeat_randomness: bool = True,
        keep: float = 1.0,
        when: Interval | None = None,
        local: bool = False,
    ) -> None:
        super().__init__(
            base,
            rule=Perturbed(),
            rho=rho,
            geometry=Adaptive(eta, weights_only),
            model=model,
            max_norm=max_norm,
            nonfinite=nonfinite,
            repeat_randomness=repeat_randomness,
            keep=keep,
            when=when,
            local=local,
        )


class FisherSAM(SharpnessAware):
    """Fisher SAM: a neighborhood shaped by the empirical Fisher information.

        d = rho F^-1 g0 / (sqrt(<g0, F^-1 g0>) + eps),    F = 1 + eta g0^2,    w <- w - base(g1)

    Args:
        base: an instance of a torch optimizer, such as `torch.optim.SGD(model.parameters(), lr=0.1)`.
        rho: the radius.
        eta: the weight of the Fisher information.
        model, max_norm, nonfinite, repeat_randomness, keep, when, local: see `SharpnessAware`.

    Reference: Kim et al., Fisher SAM: Information Geometry and Sharpness Aware Minimisation, ICML 2022.
    """

    eta = geometry_value("eta")

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.05,
        eta: float = 1.0,
        model: nn.Module | None = None,
        max_norm: float | None = None,
        nonfinite: str = "propagate",
        repeat_randomness: bool = True,
        keep: float = 1.0,
        when: Interval | None = None,
        local: bool = False,
    ) -> None:
        super().__init__(
            base,
            rule=Perturbed(),
            rho=rho,
            geometry=Fisher(eta),
            model=model,
            max_norm=max_norm,
            nonfinite=nonfinite,
            repeat_randomness=repeat_randomness,
            keep=keep,
            when=when,
            local=local,
        )


METHODS: dict[str, type[SharpnessAware]] = {
    "sam": SAM,
    "wsam": WSAM,
    "coupled_wsam": CoupledWSAM,
    "gsam": GSAM,
    "esam": ESAM,
    "asam": ASAM,
    "fisher_sam": FisherSAM,
    "looksam": LookSAM,
    "vasso": VaSSO,
    "friendly_sam": FriendlySAM,
    "msam": MSAM,
}
"""Every method by name: what the command line offers and the tests iterate over."""


def create(name: str, base: Optimizer, **hyper: Any) -> SharpnessAware:
    """Create the method called `name` around `base`.

    Args:
        name: a key of `METHODS`.
        base: an instance of a torch optimizer, such as `torch.optim.SGD(model.parameters(), lr=0.1)`.
        **hyper: keyword arguments of the method.

    Example:
        >>> import torch
        >>> weights = torch.nn.Parameter(torch.zeros(2))
        >>> opt = create("wsam", torch.optim.SGD([weights], lr=0.1), gamma=0.8)
    """
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; known: {', '.join(METHODS)}")
    return METHODS[name](base, **hyper)
