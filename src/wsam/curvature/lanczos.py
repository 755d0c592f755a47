"""Restarted Lanczos for the ends of a spectrum, and a second look for eigenvalues it missed."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from wsam.curvature.krylov import Krylov
from wsam.curvature.operator import SymmetricOperator
from wsam.curvature.progress import Progress, Report

__all__ = ["Found", "Settings", "Which", "lanczos", "rayleigh_ritz"]

Which = Literal["largest", "smallest", "both"]
COLUMNS = 1 << 16
"""So many columns at a time are widened to double precision: whole rows would cost too much memory."""


class Settings(NamedTuple):
    """What is sought, and how far to go for it; `floor` is the least scale residuals are judged by."""

    k: int
    which: Which
    tol: float
    limit: int
    block: int
    basis: int | None
    seed: int
    report: Report | None
    floor: float = 0.0

    @property
    def wanted(self) -> int:
        """How many eigenvalues are sought, at all ends together."""
        return self.k * (2 if self.which == "both" else 1)

    def tell(self, products: int, error: float) -> None:
        """Report where there is somebody to report to."""
        if self.report is not None:
            self.report(Progress(products, self.limit, error))


class Found(NamedTuple):
    """Ritz pairs; `scale` is the largest absolute Ritz value met, what residuals are judged by.

    `complete` says that no eigenvalue is known to be missing between them and their end.
    """

    values: Tensor
    rows: Tensor
    residuals: Tensor
    products: int
    scale: float
    complete: bool = True


def lanczos(operator: SymmetricOperator, settings: Settings) -> Found:
    """Find the wanted ends; with several values at an end, look again for those in between.

    A small residual says that some eigenvalue is near, not that none was passed over: a Krylov
    space of one start holds one copy of a repeated eigenvalue, and close ones come late. So, from
    a new random start orthogonal to what was found, the end of the rest is sought in the same way.
    What lies beyond the last wanted value is taken in, and the search repeated with a larger
    block, until nothing turns up or the products are spent.
    """
    found = search(operator, settings, None, 0)
    if len(found.values) < min(settings.wanted, operator.shape[0]):  # the products ran out
        return found._replace(complete=False)
    block = settings.block
    while settings.k > 1 and len(found.rows) < operator.shape[0]:
        if found.products >= settings.limit:
            return found._replace(complete=False)
        # The rest is judged by its own scale, for a random vector sees little of a large
        # eigenvalue; but not below the rounding of the whole.
        rounding = 10 * torch.finfo(operator.dtype).eps / settings.tol
        again = settings._replace(
            k=min(block, settings.k),
            block=block,
            seed=settings.seed + 1 + found.products,
            floor=found.scale * max(settings.tol, rounding),
        )
        more = search(operator, again, found.rows, found.products)
        found = found._replace(products=more.products, scale=max(found.scale, more.scale))
        beyond = _beyond(found, more, settings)
        if not len(beyond):
            good = bool((more.residuals <= settings.tol * found.scale).all())
            return found._replace(complete=good)
        rows = torch.cat([found.rows, more.rows[beyond]])
        if found.products + len(rows) > settings.limit:
            return found._replace(complete=False)
        images = torch.stack([operator @ row for row in rows])
        found = rayleigh_ritz(rows, images, found.products + len(rows), found.scale)
        keep = _wanted(found.values, settings)
        found = found._replace(
            values=found.values[keep], rows=found.rows[keep], residuals=found.residuals[keep]
        )
        block = min(2 * block, settings.k)
    return found


def search(
    operator: SymmetricOperator, settings: Settings, locked: Tensor | None, before: int
) -> Found:
    """Find the wanted ends among vectors orthogonal to the locked ones, from one random start."""
    size = operator.shape[0] - (0 if locked is None else len(locked))
    block = min(settings.block, size, settings.limit - before)
    least = min(size, settings.wanted + 2 * block + 2)
    capacity = min(size, max(settings.basis or (2 * settings.wanted + 40 + 2 * block), least))
    generator = torch.Generator().manual_seed(settings.seed)
    krylov = Krylov(operator, capacity, block, generator, locked)
    while True:
        krylov.extend()
        values, vectors, residuals = krylov.ritz()
        wanted = _wanted(values, settings)
        tiny = torch.finfo(torch.float64).tiny
        scale = max(float(values.abs().max()), settings.floor, tiny)
        error = float(residuals[wanted].max()) / scale
        products = before + krylov.products
        settings.tell(products, error)
        enough = krylov.size >= min(size, settings.wanted)
        if (enough and error <= settings.tol) or krylov.complete:
            break
        if products + block > settings.limit:
            break
        if krylov.full:
            keep = _kept(values, settings, capacity - 2 * block)
            krylov.restart(values[keep], vectors[:, keep])
    rows = krylov.lift(vectors[:, wanted])
    return Found(values[wanted], rows, residuals[wanted], products, scale)


def rayleigh_ritz(rows: Tensor, images: Tensor, products: int, scale: float) -> Found:
    """Return the best pairs in the span of orthonormal rows whose images are known.

    Vectors found one after the other carry the errors of those before; this removes them, and
    gives residuals of the products as they were computed.
    """
    parts = list(zip(_columns(rows), _columns(images), strict=True))
    inside = torch.stack([row.double() @ image.double().T for row, image in parts]).sum(0)
    values, vectors = torch.linalg.eigh((inside + inside.T) / 2)
    turned, squares = torch.empty_like(rows), torch.zeros_like(values)
    for part, (row, image) in zip(_columns(turned), parts, strict=True):
        wide = vectors.T @ row.double()
        left = vectors.T @ image.double() - values[:, None] * wide
        squares += left.square().sum(dim=1)
        part.copy_(wide)
    return Found(values.cpu(), turned, squares.sqrt().cpu(), products, scale)


def _columns(rows: Tensor) -> tuple[Tensor, ...]:
    """Return the rows in pieces of some columns each, which share their memory."""
    return torch.split(rows, COLUMNS, dim=1)


def _beyond(found: Found, more: Found, settings: Settings) -> Tensor:
    """Indices of new values that belong to a wanted end, by more than the tolerance."""
    slack = settings.tol * found.scale
    missed = torch.zeros(len(more.values), dtype=torch.bool)
    if settings.which != "smallest":
        missed |= more.values > found.values[-settings.k] + slack
    if settings.which != "largest":
        missed |= more.values < found.values[settings.k - 1] - slack
    return torch.nonzero(missed)[:, 0]


def _wanted(values: Tensor, settings: Settings) -> Tensor:
    """Indices of the wanted ends among ascending Ritz values."""
    count = len(values)
    low = range(min(settings.k, count)) if settings.which != "largest" else range(0)
    high = range(max(0, count - settings.k), count) if settings.which != "smallest" else range(0)
    return torch.tensor(sorted({*low, *high}))


def _kept(values: Tensor, settings: Settings, room: int) -> Tensor:
    """Indices kept at a restart: the wanted ends and as many neighbours as help convergence."""
    extra = settings._replace(k=settings.k + max(2, (len(values) - settings.k) // 4))
    while len(chosen := _wanted(values, extra)) > room and extra.k > settings.k:
        extra = extra._replace(k=extra.k - 1)
    return chosen
