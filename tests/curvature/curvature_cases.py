"""Matrices with known spectra and a small network, shared by the curvature tests."""

import torch
from torch import Tensor, nn


def symmetric_matrix(eigenvalues: list[float] | Tensor, seed: int = 0) -> Tensor:
    """Return a random float64 matrix with the given eigenvalues."""
    values = torch.as_tensor(eigenvalues, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator).double()).Q
    dense = (q * values) @ q.T
    return (dense + dense.T) / 2


def relu_network(dead_units: int = 0) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """Return a network with fewer samples than weights, so most eigenvalues are zero, and a batch."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    with torch.no_grad():
        network[0].bias[:dead_units] = -100  # units that are never active have no curvature
    return network, [(torch.randn(8, 8), torch.randint(0, 3, (8,)))]


class CountedBatches(list):
    """Batches that count how often they were iterated over."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return super().__iter__()
