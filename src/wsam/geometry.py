"""Geometries: the shape of the neighborhood in which a step looks for a higher loss.

A geometry is a diagonal metric S >= 0, which determines the perturbation

    d = rho * S g0 / (sqrt(<g0, S g0>) + eps)

with one global norm over all parameters, computed in at least float32. A geometry returns sqrt(S) for
each tensor. With z = sqrt(S) g0 the perturbation is rho * sqrt(S) z / (norm(z) + eps).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

import torch
from torch import Tensor, nn

from wsam._core.memory import Memory
from wsam._core.param_blocks import EPSILON, Block
from wsam._core.tensor_ops import widened
from wsam._core.validation import count, number


@dataclass(frozen=True)
class Geometry:
    """Base class of geometries; without an override it is a ball."""

    needs_g0: ClassVar[bool] = True
    """Whether d depends on the first gradient. If not, a step has one pass, at w + d."""
    memory: ClassVar[tuple[str, ...]] = ()
    """Names of the tensors that are kept between steps, one for each parameter."""
    uses_denominators: ClassVar[bool] = False
    """Whether `block.denominators` are needed: those of an adaptive base, before its step."""

    @property
    def follows_g0(self) -> bool:
        """Whether d follows g0: True unless the geometry has a `vector` of its own."""
        return type(self).vector is Geometry.vector

    def sqrt_metric(self, block: Block, g0: list[Tensor]) -> list[Tensor] | None:
        """Return sqrt(S) in at least float32, one tensor for each weight; None means 1.

        Args:
            block: `block.weights()` are this rank's shards of the parameters, `block.names` their names
                if known, `block.group` their parameter group. `block.norms(tensors)` returns the norms
                of whole tensors, given their shards.
            g0: the first gradients of these shards.
        """
        return None

    def vector(self, block: Block, g0: list[Tensor], memory: Memory) -> list[Tensor]:
        """Return the vector that takes the place of g0 in d.

        It gives d its direction only: the length is that of a ball, with one norm over all tensors.

        Args:
            block: as for `sqrt_metric`.
            g0: the first gradients of these shards, which must not be overwritten.
            memory: what the geometry keeps between steps. `memory.read_each(block, name)` returns a
                tensor for each weight, None where there is none yet. `memory.write(block, name,
                tensors)` stores new ones when the step is complete. List the names in `memory`.
        """
        return g0

    def is_ready(self, blocks: Sequence[Block], memory: Memory) -> bool:
        """Whether there is a vector to follow. If not, the step is the base's own."""
        return True

    def mask(self, step: int, tensors: int) -> list[bool] | None:
        """Return which of all parameter tensors are perturbed at a step; None for all."""
        return None

    def selected(self, block: Block) -> list[bool] | None:
        """Return which tensors of a block are perturbed at all steps; None for all."""
        return None

    @property
    def boost(self) -> float:
        """A factor of the radius."""
        return 1.0

    def check_names(self, blocks: Sequence[Block]) -> None:
        """Raise if the geometry needs parameter names and there are none."""


@dataclass(frozen=True)
class Euclidean(Geometry):
    """A ball: S = 1 (SAM).

    Reference: Foret et al., ICLR 2021.
    """


@dataclass(frozen=True)
class Adaptive(Geometry):
    """An ellipsoid that scales with the weights: S = (abs(w) + eta)^2 (ASAM).

    With eta = 0 it is invariant to rescalings of the weights that do not change the function. Radii
    are larger than in a ball: 0.5 to 5.

    Args:
        eta: keeps S positive where a weight is zero.
        weights_only: apply it only to tensors whose name contains "weight", and a ball elsewhere, as
            the original code does. Needs names: pass `model=` or build the base from named parameters.

    Reference: Kwon et al., ASAM, ICML 2021.
    """

    eta: float = 0.01
    weights_only: bool = False

    def __post_init__(self) -> None:
        number("eta", self.eta)

    def check_names(self, blocks: Sequence[Block]) -> None:
        """Require names if `weights_only`."""
        if self.weights_only:
            _require_names(blocks, "weights_only=True")

    def sqrt_metric(self, block: Block, g0: list[Tensor]) -> list[Tensor]:
        """Return abs(w) + eta."""
        scale = list(torch._foreach_abs(widened(block.weights())))
        if self.eta > 0:
            torch._foreach_add_(scale, self.eta)
        if self.weights_only and block.names is not None:
            for name, tensor in zip(block.names, scale, strict=True):
                if "weight" not in name:
                    tensor.fill_(1.0)
        return scale


@dataclass(frozen=True)
class Fisher(Geometry):
    """An ellipsoid from the empirical diagonal Fisher information: S = 1/(1 + eta g0^2).

    Depends on the scale of the loss: gradients must be unscaled first.

    Args:
        eta: the weight of the Fisher information.

    Reference: Kim et al., Fisher SAM, ICML 2022.
    """

    eta: float = 1.0

    def __post_init__(self) -> None:
        number("eta", self.eta)

    def sqrt_metric(self, block: Block, g0: list[Tensor]) -> list[Tensor]:
        """Return 1/sqrt(1 + eta g0^2)."""
        wide = widened(g0)
        scale = list(torch._foreach_mul(wide, wide))
        torch._foreach_mul_(scale, self.eta)
        torch._foreach_add_(scale, 1.0)
        torch._foreach_sqrt_(scale)
        torch._foreach_reciprocal_(scale)
        return scale


@dataclass(frozen=True)
class Preconditioned(Geometry):
    """The ellipsoid of an adaptive base: S = 1/(sqrt(v) + eps), with the v of the base's last step.

    d is along the preconditioned gradient, as the steps of Adam are. v has its bias correction, and S
    is 1 where the base has not yet seen a gradient. Over RAdam, Adagrad, RMSprop and Adadelta, S is the
    inverse of their own denominator.

    S has the unit of 1/g0, so radii depend on the scale of the loss, and they are smaller than in a
    ball: where the mean absolute gradient is a, multiply the radius of a ball by about sqrt(a).
    """

    uses_denominators = True

    def sqrt_metric(self, block: Block, g0: list[Tensor]) -> list[Tensor]:
        """Return the square root of 1 / denominators."""
        assert block.denominators is not None
        scale = list(torch._foreach_sqrt(block.denominators))
        torch._foreach_reciprocal_(scale)
        return scale


@dataclass(frozen=True)
class PerLayer(Geometry):
    """A ball for each tensor: all of the n tensors move by the same distance.

        d_i = rho / sqrt(n) * g0_i / (norm(g0_i) + eps)

    With one global norm, d moves a tensor by its share of the gradient; in wide networks that is mostly
    the last layer. The factor 1/sqrt(n) makes norm(d) = rho, so that radii compare with those of a
    ball. Tensors without a gradient do not count.
    """

    def vector(self, block: Block, g0: list[Tensor], memory: Memory) -> list[Tensor]:
        """Return g0_i / norm(g0_i)."""
        wide = widened(g0)
        scales = (block.norms(wide) + EPSILON).reciprocal()
        return list(torch._foreach_mul(wide, list(scales.unbind())))


@dataclass(frozen=True)
class Masked(Geometry):
    """A ball in a random subset of the tensors, with the radius divided by beta (ESAM).

    Each tensor is selected with probability beta at each step. The selection depends on the seed and
    the step's number only: it resumes exactly, is the same on every rank and leaves global generators
    unchanged.

    Args:
        beta: the probability of a tensor, in (0, 1].
        seed: of the selection.

    Reference: Du et al., Efficient Sharpness-aware Minimization, ICLR 2022.
    """

    beta: float = 0.6
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", count("seed", self.seed))  # numpy's integers overflow
        number("beta", self.beta, 0, 1, low_open=True, high_open=False)

    @property
    def boost(self) -> float:
        """Return 1/beta."""
        return 1.0 / self.beta

    def mask(self, step: int, tensors: int) -> list[bool]:
        """Return a Bernoulli(beta) sample for each tensor."""
        generator = torch.Generator("cpu").manual_seed((self.seed * 1_000_003 + step) % 2**63)
        draws = torch.rand(tensors, generator=generator, device="cpu")
        chosen: list[bool] = (draws < self.beta).tolist()
        return chosen


NORM_LAYERS = (
    nn.modules.batchnorm._BatchNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.modules.instancenorm._InstanceNorm,
)


@dataclass(frozen=True)
class Only(Geometry):
    """A ball in some of the tensors; the norm is over them alone (SAM-ON).

    This is not the same as a radius of 0 in the other groups, where the norm stays global. Needs
    names: pass `model=` or build the base from named parameters.

    Args:
        names: names of parameters, with `*` for any characters: `Only(("*.bias", "head.*"))`.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        >>> Only.layers(model)
        Only(names=('1.weight', '1.bias'))

    Reference: Mueller et al., Normalization Layers Are All That Sharpness-Aware Minimization Needs,
    NeurIPS 2023.
    """

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if isinstance(self.names, str):
            raise TypeError(f'names must be a tuple, as ("*.bias",), got {self.names!r}')
        object.__setattr__(self, "names", tuple(self.names))

    @classmethod
    def layers(cls, model: nn.Module, types: tuple[type[nn.Module], ...] = NORM_LAYERS) -> "Only":
        """Return the geometry of the parameters in all layers of these types.

        Args:
            model: the trained module.
            types: classes of layers; by default all normalization layers.
        """
        found = {id(p) for m in model.modules() if isinstance(m, types) for p in m.parameters()}
        return cls(tuple(name for name, p in model.named_parameters() if id(p) in found))

    def check_names(self, blocks: Sequence[Block]) -> None:
        """Require names, and at least one that is selected."""
        _require_names(blocks, "Only")
        if not any(any(self.selected(block)) for block in blocks):
            raise ValueError(f"no parameter has a name in {self.names}")

    def selected(self, block: Block) -> list[bool]:
        """Return which names match."""
        names = block.names or []
        return [any(fnmatchcase(name, known) for known in self.names) for name in names]


def _require_names(blocks: Sequence[Block], option: str) -> None:
    if any(block.names is None for block in blocks):
        raise ValueError(
            f"{option} needs parameter names and there are none: pass model=, or build the base from "
            "model.named_parameters()"
        )


AVERAGE = "average"
"""The name of the running average of gradients."""


@dataclass(frozen=True)
class Averaged(Geometry):
    """A ball, with d along a running average of gradients instead of g0 (VaSSO).

        m <- (1 - theta) m + theta g0,    d = rho m / (norm(m) + eps)

    The first gradient is the first average. theta = 1 is a plain ball.

    Args:
        theta: the share of the new gradient, in (0, 1].

    Reference: Li and Giannakis, Enhancing Sharpness-Aware Optimization Through Variance Suppression,
    NeurIPS 2023.
    """

    theta: float = 0.9
    memory = (AVERAGE,)

    def __post_init__(self) -> None:
        number("theta", self.theta, 0, 1, low_open=True, high_open=False)

    def vector(self, block: Block, g0: list[Tensor], memory: Memory) -> list[Tensor]:
        """Return the average, this step's gradient included."""
        before = _average_or_gradient(memory.read_each(block, AVERAGE), g0)
        average = list(torch._foreach_lerp(before, g0, self.theta))
        memory.write(block, AVERAGE, average)
        return average


@dataclass(frozen=True)
class WithoutAverage(Geometry):
    """A ball, with d along what is new in g0: g0 without a running average (FriendlySAM).

        a = g0 - sigma m,    d = rho a / (norm(a) + eps),    m <- decay m + (1 - decay) g0

    The average is that of the steps before. In the first step a and m are g0. sigma = 0 is a plain
    ball.

    Args:
        sigma: how much of the average is removed.
        decay: of the average, in [0, 1).

    Reference: Li et al., Friendly Sharpness-Aware Minimization, CVPR 2024.
    """

    sigma: float = 1.0
    decay: float = 0.9
    memory = (AVERAGE,)

    def __post_init__(self) -> None:
        number("sigma", self.sigma)
        number("decay", self.decay, 0, 1)

    def vector(self, block: Block, g0: list[Tensor], memory: Memory) -> list[Tensor]:
        """Return g0 - sigma m."""
        known = memory.read_each(block, AVERAGE)
        before = _average_or_gradient(known, g0)
        memory.write(block, AVERAGE, list(torch._foreach_lerp(before, g0, 1 - self.decay)))
        vector = list(torch._foreach_add(g0, before, alpha=-self.sigma))
        return [g if m is None else v for g, m, v in zip(g0, known, vector, strict=True)]


@dataclass(frozen=True)
class AlongMomentum(Geometry):
    """A ball, with d along the base's update, so that a step needs one pass only (MSAM).

        d = -rho b / (norm(b) + eps)        b: the base's momentum

    b is "momentum_buffer" in the state of SGD, and "exp_avg" in that of Adam and its relatives. Where
    there is none, as in the first step, the step is the base's own. Only for rules that do not need
    g0, such as `wsam.rule.Perturbed`.

    Reference: Becker et al., Momentum-SAM: Sharpness Aware Minimization without Computational Overhead,
    2024.
    """

    needs_g0 = False

    def is_ready(self, blocks: Sequence[Block], memory: Memory) -> bool:
        """Whether the base has any momentum."""
        return any(b is not None for block in blocks for b in memory.momentum(block))

    def vector(self, block: Block, g0: list[Tensor], memory: Memory) -> list[Tensor]:
        """Return -b; zeros for parameters without momentum."""
        pairs = zip(memory.momentum(block), block.weights(), strict=True)
        momentum = [torch.zeros_like(w) if b is None else b for b, w in pairs]
        # The base's momentum points against the objective already: undo the sign of the radius.
        return list(torch._foreach_mul(momentum, -block.sign))


def _average_or_gradient(known: list[Tensor | None], g0: list[Tensor]) -> list[Tensor]:
    """Return the average of the steps before; the gradient itself where it is the first one."""
    return [g if m is None else m for g, m in zip(g0, known, strict=True)]


__all__ = [
    "Adaptive",
    "AlongMomentum",
    "Averaged",
    "Euclidean",
    "Fisher",
    "Geometry",
    "Masked",
    "Only",
    "PerLayer",
    "Preconditioned",
    "WithoutAverage",
]
