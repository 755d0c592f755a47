"""The interface between the optimizer and its accelerators, and the choice of one."""

from collections.abc import Sequence
from typing import Protocol

from wsam._core.param_blocks import Block
from wsam._core.step_state import StepState


class Backend(Protocol):
    """Replaces parts of a step by faster code with the same result."""

    def perturb(self, state: StepState) -> bool:
        """Move the weights to w + d, as `wsam._core.step.perturb` or `wsam._core.lean.begin` do.

        Returns:
            False, with nothing changed, if this backend cannot handle the step.
        """

    def finish(self, state: StepState) -> bool:
        """Do all that remains of the step.

        In the phase PERTURBED that is to restore w, combine the gradients, step the base and apply the
        decoupled term; in the phase READY the last two.

        Returns:
            False, with nothing changed, if this backend cannot handle the step.
        """


def select_backend(blocks: Sequence[Block]) -> Backend | None:
    """Return the accelerator for parameters in these blocks, None if there is none."""
    devices = {block.device for block in blocks}
    if len(devices) != 1:
        return None
    device = devices.pop()
    if device.type == "cpu":
        from wsam.accel.cpu import CpuBackend

        return CpuBackend()
    if device.type == "cuda":
        from wsam.accel.triton_backend import EagerTritonBackend, kernels_work_on

        return EagerTritonBackend(device) if kernels_work_on(device) else None
    return None
