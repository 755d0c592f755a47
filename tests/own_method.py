"""A method of one's own, as `wsam train --method own_method.py:BlendSAM` reads it."""

from dataclasses import dataclass

from wsam import SharpnessAware
from wsam.rule import Mix, Part, Rule


@dataclass(frozen=True)
class Blend(Rule):
    """The base receives (1 - share) g0 + share g1."""

    share: float = 0.5

    def mix(self, hyper, products):
        return Mix(Part(g0=1.0, difference=hyper["share"]), decoupled=Part(0.0, 0.0))


class BlendSAM(SharpnessAware):
    """SAM with a mean of both gradients."""

    def __init__(self, base, *, rho=0.1, share=0.5, model=None, when=None):
        super().__init__(base, rule=Blend(share), rho=rho, model=model, when=when)


class WithoutModel(SharpnessAware):
    def __init__(self, base, *, rho=0.1):
        super().__init__(base, rule=Blend(), rho=rho)


class WithoutDefault(SharpnessAware):
    def __init__(self, base, *, rho=0.1, share, model=None):
        super().__init__(base, rule=Blend(share), rho=rho, model=model)


BLEND = Blend()


class Unusual(SharpnessAware):
    def __init__(self, base, *, rho=0.1, share=BLEND, model=None):
        super().__init__(base, rule=share, rho=rho, model=model)


@dataclass(frozen=True)
class Broken(Rule):
    def mix(self, hyper, products):
        return hyper["nothing"]


class BrokenSAM(SharpnessAware):
    def __init__(self, base, *, rho=0.1, model=None):
        super().__init__(base, rule=Broken(), rho=rho, model=model)


def function():
    pass
