"""Curvature of a model's loss: operators, eigenvalues, trace, density, sharpness, landscapes.

A curvature matrix is a linear operator, available through matrix-vector products `H @ v`::

    H = hessian(model, loss_fn, batches)
    top_eigenvalues(H, k=5, which="both")
    trace(H)
    density(H)
"""

from wsam.curvature.directions import between, normalised, random_direction
from wsam.curvature.eigenvalues import Eigenvalues, top_eigenvalues
from wsam.curvature.hutchinson import Trace, trace
from wsam.curvature.loss_landscape import Landscape, landscape
from wsam.curvature.objective import Objective
from wsam.curvature.operator import Info, Operator, empirical_fisher, gauss_newton, hessian
from wsam.curvature.plot_density import save_density
from wsam.curvature.plot_landscape import save_landscape
from wsam.curvature.progress import Progress
from wsam.curvature.sharpness_measures import Sharpness, average_sharpness, sharpness
from wsam.curvature.spectral_density import Density, Share, density

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
