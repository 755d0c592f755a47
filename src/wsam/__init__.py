"""Sharpness-aware training for PyTorch: a method is a geometry, a rule and a base optimizer.

Names are imported on first use, so that `wsam --help` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wsam._version import __version__

if TYPE_CHECKING:
    from wsam import curvature as curvature
    from wsam import geometry as geometry
    from wsam import integrations as integrations
    from wsam import rule as rule
    from wsam import schedule as schedule
    from wsam import theory as theory
    from wsam import toy as toy
    from wsam._core.preconditioners import Preconditioner, register_preconditioner
    from wsam._core.validation import WsamWarning
    from wsam.accel.cuda_graph import CapturedStep, capture
    from wsam.geometry import (
        Adaptive,
        Euclidean,
        Fisher,
        Geometry,
        Masked,
        PerLayer,
        Preconditioned,
    )
    from wsam.methods import ASAM, ESAM, GSAM, METHODS, SAM, WSAM, CoupledWSAM, FisherSAM, create
    from wsam.optimizer import SharpnessAware
    from wsam.peers.friendly_sam import FriendlySAM
    from wsam.peers.looksam import LookSAM
    from wsam.peers.msam import MSAM
    from wsam.peers.vasso import VaSSO
    from wsam.training_step import train_step

_EXPORTS = {
    "_core.preconditioners": "Preconditioner register_preconditioner",
    "_core.validation": "WsamWarning",
    "accel.cuda_graph": "CapturedStep capture",
    "geometry": "Adaptive Euclidean Fisher Geometry Masked PerLayer Preconditioned",
    "methods": (
        "ASAM CoupledWSAM ESAM FisherSAM FriendlySAM GSAM LookSAM METHODS MSAM SAM VaSSO WSAM create"
    ),
    "optimizer": "SharpnessAware",
    "training_step": "train_step",
}
_SUBMODULES = ("curvature", "geometry", "integrations", "rule", "schedule", "theory", "toy")
"""Modules that are available as `wsam.schedule.Warmup` without another import."""
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names.split()}

__all__ = [
    "ASAM",
    "ESAM",
    "GSAM",
    "METHODS",
    "MSAM",
    "SAM",
    "WSAM",
    "Adaptive",
    "CapturedStep",
    "CoupledWSAM",
    "Euclidean",
    "Fisher",
    "FisherSAM",
    "FriendlySAM",
    "Geometry",
    "LookSAM",
    "Masked",
    "PerLayer",
    "Preconditioned",
    "Preconditioner",
    "SharpnessAware",
    "VaSSO",
    "WsamWarning",
    "__version__",
    "capture",
    "create",
    "register_preconditioner",
    "train_step",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"wsam.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'wsam' has no attribute {name!r}")
    value = getattr(import_module(f"wsam.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
