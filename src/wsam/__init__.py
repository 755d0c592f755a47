"""Sharpness-aware training for PyTorch: a method is a geometry, a rule and a base optimizer."""

from wsam._version import __version__
from wsam.checks import WsamWarning
from wsam.geometry import Adaptive, Euclidean, Fisher, Geometry, Masked
from wsam.graph import CapturedStep, capture
from wsam.methods import (
    ASAM,
    ESAM,
    GSAM,
    METHODS,
    SAM,
    WSAM,
    CoupledWSAM,
    FisherSAM,
    create,
)
from wsam.optimizer import SharpnessAware

__all__ = [
    "ASAM",
    "ESAM",
    "GSAM",
    "METHODS",
    "SAM",
    "WSAM",
    "Adaptive",
    "CapturedStep",
    "CoupledWSAM",
    "Euclidean",
    "Fisher",
    "FisherSAM",
    "Geometry",
    "Masked",
    "SharpnessAware",
    "WsamWarning",
    "__version__",
    "capture",
    "create",
]
