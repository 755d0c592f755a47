"""Promises about cost: buffers, device syncs, recompilation, capture."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from helpers import MEMBERS, batch, closure, member, model_loss, small_model
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import wsam
from wsam._core import lean as lean_step
from wsam._core import tensor_ops

ODD = 7919  # no other tensor has this many elements
LATE_AND_LEAN = [(name, False) for name in MEMBERS] + [
    (name, True) for name in MEMBERS if reference.MEMBERS[name].rule == "wsam"
]


class LiveBuffers(TorchDispatchMode):
    """Counts the storages of the odd size that are alive, after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}
        self.peak = 0

    def note(self, tensor: Tensor) -> None:
        if tensor.numel() == ODD:
            storage = tensor.untyped_storage()
            self.storages[storage.data_ptr()] = StorageWeakRef(storage)

    def live(self) -> int:
        self.storages = {k: ref for k, ref in self.storages.items() if not ref.expired()}
        return len(self.storages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((result, args)):
            if isinstance(leaf, Tensor):
                self.note(leaf)
        self.peak = max(self.peak, self.live())
        return result


def buffers_of(name: str, lean: bool, tensors: int) -> dict[str, int]:
    """Storages beyond weights, gradients and the base's state, at moments of a second step."""
    params = [nn.Parameter(torch.linspace(-1, 1, ODD) + i) for i in range(tensors)]
    option = {"beta": 1.0} if name == "esam" else {}
    opt = member(name, torch.optim.SGD(params, lr=0.1, momentum=0.9), lean=lean, **option)
    counter, during = LiveBuffers(), []

    def run() -> Tensor:
        opt.zero_grad()
        during.append(counter.live())
        for p in params:  # by hand: a real backward pass has temporaries of its own
            p.grad = p.detach() * 0.5
        return opt.select(torch.ones(1, requires_grad=True))

    opt.step(run)
    during.clear()
    opt.zero_grad()
    with counter:
        for p in params:
            counter.note(p)
            counter.note(opt.state[p]["momentum_buffer"])
        opt.step(run)
        opt.zero_grad()
        rest = counter.live()
    known = 2 * tensors  # the weights and the momentum
    peak = counter.peak - known - tensors  # and the gradients
    return {"second pass": during[1] - known, "peak": peak, "rest": rest - known}


@pytest.mark.parametrize("tensors", [1, 9])
@pytest.mark.parametrize(("name", "lean"), LATE_AND_LEAN)
def test_number_of_buffers(
    name: str, lean: bool, tensors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SAM 1, WSAM 2 (lean 1), Coupled and GSAM 2; tensors pass through one by one.

    At rest none, but on a CPU the memory of the copy of w, which lean gives back.
    """
    monkeypatch.setattr(tensor_ops, "CHUNK_BYTES", 1)
    monkeypatch.setattr(lean_step, "EXCHANGE_BYTES", 1)
    found = buffers_of(name, lean, tensors)
    wanted = 1 if lean or reference.MEMBERS[name].rule == "sam" else 2
    assert found["second pass"] == wanted * tensors
    assert found["rest"] == (0 if lean else tensors)
    # Where the metric is not 1 it is a temporary of full size while d is made.
    metric = reference.MEMBERS[name].geometry in {"adaptive", "fisher"}
    assert found["peak"] <= (wanted + metric) * tensors + 2


class NoSync(TorchDispatchMode):
    """Fails where a value would have to be read from the device, or written to it."""

    FORBIDDEN = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert name not in self.FORBIDDEN, f"a step waits for the device in {name}"
        return func(*args, **(kwargs or {}))


def test_no_sync_sees_a_sync() -> None:
    with NoSync(), pytest.raises(AssertionError):
        float(torch.ones(()))


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.1}], ids=["default", "clip"])
@pytest.mark.parametrize(("name", "lean"), LATE_AND_LEAN)
def test_no_device_sync(name: str, lean: bool, options: dict[str, Any]) -> None:
    if lean and options:
        return
    model = small_model()
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = member(name, base, lean=lean, **options)
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
@pytest.mark.parametrize("options", [{}, {"max_norm": 0.1}], ids=["default", "clip"])
@pytest.mark.parametrize(("name", "lean"), LATE_AND_LEAN)
def test_no_device_sync_on_cuda(name: str, lean: bool, options: dict[str, Any]) -> None:
    if lean and options:
        return
    model = small_model().cuda()
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = member(name, base, lean=lean, **options)
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


# --- torch.compile -------------------------------------------------------------------------------


def counting() -> tuple[Callable[..., Any], list[int]]:
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(1)
        return graph.forward

    return backend, graphs


def normed_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()


@pytest.mark.parametrize("name", MEMBERS)
def test_no_recompile(name: str) -> None:
    """Neither the second pass nor new values of lr, rho, gamma compile the model again."""
    torch._dynamo.reset()
    backend, graphs = counting()
    model, plain = normed_model(), normed_model()
    compiled = torch.compile(model, backend=backend)
    opt = member(name, torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    twin = member(name, torch.optim.SGD(plain.parameters(), lr=0.1), model=plain)
    after_first = 0
    for t in range(5):
        opt.step(closure(opt, compiled, t))
        twin.step(closure(twin, plain, t))
        if t == 0:
            after_first = len(graphs)
            assert after_first >= 1
        for group in (opt.param_groups[0], twin.param_groups[0]):
            for key in ("lr", "sam_rho", "sam_gamma", "sam_alpha"):
                if key in group:
                    group[key] *= 0.9
    assert len(graphs) == after_first
    for (key, x), y in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.allclose(x, y, rtol=1e-10, atol=1e-12), key


def test_no_recompile_of_a_compiled_step() -> None:
    """torch.compile around the whole step runs, gives the same numbers and settles at once."""
    torch._dynamo.reset()
    backend, graphs = counting()
    model, plain = small_model(), small_model()
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model=model)
    twin = wsam.WSAM(torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    run = closure(opt, model)

    @torch.compile(backend=backend)
    def whole_step() -> Tensor:
        return opt.step(run)

    counts = []
    for _ in range(6):
        whole_step()
        twin.step(closure(twin, plain))
        counts.append(len(graphs))
        for group in (opt.param_groups[0], twin.param_groups[0]):
            group["lr"], group["sam_rho"] = group["lr"] * 0.9, group["sam_rho"] * 0.9
    assert counts[-1] == counts[2], f"graphs compiled by each step: {counts}"
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-10)


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_compiled_model_without_model_is_said_once() -> None:
    """Statistics of a compiled model that the optimizer does not know: protected, with a warning."""
    torch._dynamo.reset()
    model, plain = normed_model(), normed_model()
    compiled = torch.compile(model, backend="eager")
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1))
    twin = wsam.WSAM(torch.optim.SGD(plain.parameters(), lr=0.1))
    with pytest.warns(wsam.WsamWarning, match="model="):
        opt.step(closure(opt, compiled, 0))
    for t in range(1, 3):
        opt.step(closure(opt, compiled, t))  # a second warning would be an error here
    for t in range(3):
        twin.step(closure(twin, plain, t))
    for x, y in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.allclose(x, y)


def test_compiled_in_place_is_protected() -> None:
    """`module.compile()` leaves the module's type: its statistics still move once a step."""
    torch._dynamo.reset()
    for options in ({}, {"model": True}):
        model, plain = normed_model(), normed_model()
        model.compile(backend="eager")
        given = {"model": model} if options else {}
        opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1), **given)
        twin = wsam.WSAM(torch.optim.SGD(plain.parameters(), lr=0.1))
        for t in range(3):
            opt.step(closure(opt, model, t))
            twin.step(closure(twin, plain, t))
        for x, y in zip(model.buffers(), plain.buffers(), strict=True):
            assert torch.allclose(x, y)


@pytest.mark.parametrize("kind", ["function", "part"])
def test_compiled_code_is_protected_or_said_once(kind: str) -> None:
    """Compiled code may call no module hook: statistics move once a step, or there is a warning."""
    torch._dynamo.reset()
    model, plain = normed_model(), normed_model()
    if kind == "part":
        model[1] = torch.compile(model[1], backend="eager")

    def forward(x: Tensor) -> Tensor:
        return (model(x) ** 2).sum(1)

    losses = torch.compile(forward, backend="eager") if kind == "function" else forward
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1))
    twin = wsam.WSAM(torch.optim.SGD(plain.parameters(), lr=0.1))

    def run(t: int) -> Tensor:
        opt.zero_grad()
        loss = opt.select(losses(batch(t)))
        loss.backward()
        return loss

    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always", wsam.WsamWarning)
        for t in range(3):
            opt.step(lambda t=t: run(t))
            twin.step(closure(twin, plain, t))
    said = [w for w in record if issubclass(w.category, wsam.WsamWarning)]
    pairs = zip(model.buffers(), plain.buffers(), strict=True)
    protected = all(torch.allclose(x, y) for x, y in pairs)
    assert protected or said
    assert len(said) <= 1


# --- CUDA graphs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MEMBERS)
def test_capture(name: str) -> None:
    """A step whose weights are not on a CUDA device cannot be captured, and that is said."""
    model = small_model()
    opt = member(name, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises((RuntimeError, ValueError, TypeError), match="CUDA"):
        wsam.capture(opt, lambda x: opt.select((model(x) ** 2).sum(1)), batch(0))
