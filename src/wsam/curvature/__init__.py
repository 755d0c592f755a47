"""Curvature of a model's loss: operators, eigenvalues, trace, density, sharpness, landscapes.

One idea carries it all: a curvature matrix is a linear operator, known by `H @ v`.

    H = hessian(model, loss_fn, batches)
    top_eigenvalues(H, k=5, which="both")
    trace(H)
    density(H)
"""

from wsam.curvature.eigen import Eigenvalues, top_eigenvalues
from wsam.curvature.hutchinson import Trace, trace
from wsam.curvature.measures import Sharpness, average_sharpness, sharpness
from wsam.curvature.objective import Objective
from wsam.curvature.operator import Info, Operator, empirical_fisher, gauss_newton, hessian
from wsam.curvature.progress import Progress
from wsam.curvature.quadrature import Density, Share, density
from wsam.curvature.render import save_density, save_landscape
from wsam.curvature.slices import Landscape, between, landscape, normalised, random_direction

__all__ = [
    "Density",
    "Eigenvalues",
    "Info",
    "Landscape",
    "Objective",
    "Operator",
    "Progress",
    "Share",
    "Sharpness",
    "Trace",
    "average_sharpness",
    "between",
    "density",
    "empirical_fisher",
    "gauss_newton",
    "hessian",
    "landscape",
    "normalised",
    "random_direction",
    "save_density",
    "save_landscape",
    "sharpness",
    "top_eigenvalues",
    "trace",
]
