"""How a run is executed: device, data location, compilation. Not part of the run's key."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from wsam._core import validation
from wsam.lab.data import datasets


@dataclass(frozen=True)
class ExecutionConfig:
    """How a run is executed. Nothing here changes the run's settings or its key.

    Args:
        device: ``auto`` (a GPU if available), ``cpu``, ``cuda`` or ``cuda:N``.
        compile: Compile the model; None: on CUDA only.
        capture: Replay the whole step from a CUDA graph; None: on CUDA only.
        keep_weights: Keep the final weights.
        checkpoint_seconds: Minimum time between checkpoints, which are saved after an epoch.
        source: Where data is stored and whether it may be downloaded.
        retry: Train a run again whose record is marked as failed.
        workers: Processes that read samples; None: one per core for image files, else none.
    """

    device: str = "auto"
    compile: bool | None = None
    capture: bool | None = None
    keep_weights: bool = False
    checkpoint_seconds: float = 60.0
    source: datasets.DataSource = field(
        default_factory=lambda: datasets.DataSource(datasets.default_folder())
    )
    retry: bool = False
    workers: int | None = None

    def __post_init__(self) -> None:
        """Check the time between checkpoints; infinity means no checkpoints."""
        validation.number("checkpoint_seconds", self.checkpoint_seconds, high_open=False)

    def resolve_device(self) -> torch.device:
        """Return the device.

        Raises:
            ValueError: The device does not exist or is not available.
        """
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"device {self.device!r} cannot be used: {reason}") from error
        return device
