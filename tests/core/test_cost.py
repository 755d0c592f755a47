"""The cost of a step: numbers of buffers, and no synchronization with the device."""

from typing import Any

import pytest
import reference
import torch
from helpers import (
    LEAN,
    RULES,
    VARIANTS,
    batch,
    closure,
    covering,
    make_method,
    model_loss,
    small_model,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wsam._core import lean as lean_step
from wsam._core import tensor_ops
from wsam.accel import cpu
from wsam.geometry import Geometry

SIZE = 7919  # no other tensor has this many elements


class LiveBuffers(TorchDispatchMode):
    """Counts the live storages of tensors of that size, after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}
        self.peak = 0

    def record(self, tensor: Tensor) -> None:
        if tensor.numel() == SIZE:
            storage = tensor.untyped_storage()
            self.storages[storage.data_ptr()] = StorageWeakRef(storage)

    def live(self) -> int:
        self.storages = {k: ref for k, ref in self.storages.items() if not ref.expired()}
        return len(self.storages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((result, args)):
            if isinstance(leaf, Tensor):
                self.record(leaf)
        self.peak = max(self.peak, self.live())
        return result


def buffers_of(name: str, tensors: int) -> dict[str, int]:
    """Count storages beyond weights, gradients and the base's state, during a second step."""
    params = [nn.Parameter(torch.linspace(-1, 1, SIZE) + i) for i in range(tensors)]
    option = {"beta": 1.0} if name == "esam" else {}
    opt = make_method(name, torch.optim.SGD(params, lr=0.1, momentum=0.9), **option)
    counter, during = LiveBuffers(), []

    def run() -> Tensor:
        opt.zero_grad()
        during.append(counter.live())
        for p in params:  # by hand: a real backward pass has its own temporaries
            p.grad = p.detach() * 0.5
        return opt.select(torch.ones(1, requires_grad=True))

    opt.step(run)
    during.clear()
    opt.zero_grad()
    with counter:
        for p in params:
            counter.record(p)
            counter.record(opt.state[p]["momentum_buffer"])
        opt.step(run)
        opt.zero_grad()
        between_steps = counter.live()
    known = 2 * tensors  # the weights and the momentum
    peak = counter.peak - known - tensors  # and the gradients
    return {"second pass": during[1] - known, "peak": peak, "between steps": between_steps - known}


@covering(name=VARIANTS, tensors=[1, 9])
def test_number_of_buffers(name: str, tensors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SAM 1, WSAM 2 (lean 1), Coupled-WSAM and GSAM 2; tensors are processed one by one.

    Between steps none, but on a CPU the buffers of the copy of w, which lean steps do not have.
    """
    monkeypatch.setattr(tensor_ops, "CHUNK_BYTES", 1)
    monkeypatch.setattr(lean_step, "CHUNK_BYTES", 1)
    lean = name == LEAN
    found = buffers_of(name, tensors)
    wanted = 1 if lean or reference.METHODS[name].rule == "sam" else 2
    opt = make_method(name, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    # A geometry's memory has the old and the new value in the second pass; a rule keeps its vector
    # after that pass, and computes it in another buffer.
    averages, kept = len(opt.geometry.memory), int(bool(opt.rule.reuse))
    peak = 2 * averages + 2 * kept + (not opt.geometry.follows_g0)
    assert found["second pass"] == (wanted + 2 * averages) * tensors
    swapped = int(not lean and cpu.UNSHARED is not None)
    assert found["between steps"] == (swapped + averages + kept) * tensors
    # A metric other than 1 is a temporary of full size while d is computed.
    metric = type(opt.geometry).sqrt_metric is not Geometry.sqrt_metric
    assert found["peak"] <= (wanted + metric + peak) * tensors + 2


class NoSync(TorchDispatchMode):
    """Fails where a value would be read from the device."""

    FORBIDDEN = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert name not in self.FORBIDDEN, f"a step waits for the device in {name}"
        return func(*args, **(kwargs or {}))


def test_no_sync_detects_a_synchronization() -> None:
    with NoSync(), pytest.raises(AssertionError):
        float(torch.ones(()))


SYNC_CASES = [*((name, {}) for name in VARIANTS), *((name, {"max_norm": 0.1}) for name in RULES)]


@pytest.mark.parametrize(("name", "options"), SYNC_CASES)
def test_no_device_sync(name: str, options: dict[str, Any]) -> None:
    model = small_model()
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = make_method(name, base, **options)
    opt.step(closure(opt, model))  # compares the returned loss with that of backward
    with NoSync():
        for t in range(2):
            loss = opt.step(closure(opt, model, t))
            assert loss.shape == opt.sharpness.shape == ()
        gradients = model_loss(opt, model, 2)
        gradients().backward()
        opt.first_step()
        gradients().backward()
        opt.second_step()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "options"), SYNC_CASES)
def test_no_device_sync_on_cuda(name: str, options: dict[str, Any]) -> None:
    model = small_model().cuda()
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = make_method(name, base, **options)
    batches = [batch(t).cuda() for t in range(3)]

    def run(t: int) -> Tensor:
        opt.zero_grad()
        loss = opt.select((model(batches[t]) ** 2).sum(1))
        loss.backward()
        return loss

    opt.step(lambda: run(0))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for t in range(1, 3):
            opt.step(lambda t=t: run(t))
    finally:
        torch.cuda.set_sync_debug_mode("default")
