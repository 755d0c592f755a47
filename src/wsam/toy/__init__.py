"""The paper's two-dimensional example, run on the public optimizers.

One loss, a sharp minimum that is lower and a flat one that is higher; which of the two an optimizer
ends at shows what its weight of sharpness does.
"""

from wsam.toy.landscape import FLAT, SADDLE, SHARP, Place, hessian, loss, minimum_near, places
from wsam.toy.trajectory import GEOMETRIES, RULES, Setting, Trajectory, trace
from wsam.toy.updates import Updates, updates

__all__ = [
    "FLAT",
    "GEOMETRIES",
    "RULES",
    "SADDLE",
    "SHARP",
    "Place",
    "Setting",
    "Trajectory",
    "Updates",
    "hessian",
    "loss",
    "minimum_near",
    "places",
    "trace",
    "updates",
]
