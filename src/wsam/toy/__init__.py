"""The paper's two-dimensional example, run with the public optimizers.

The loss has a sharp minimum, which is lower, and a flat minimum, which is higher. The minimum that an
optimizer reaches shows the effect of its weight on sharpness.
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
