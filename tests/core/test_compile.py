"""torch.compile: no recompilation, and protected running statistics."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import RULES, batch, closure, make_method, small_model
from torch import Tensor, nn

import wsam


def counting_backend() -> tuple[Callable[..., Any], list[int]]:
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(1)
        return graph.forward

    return backend, graphs


def normed_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def equal_buffers(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.buffers(), other.buffers(), strict=True)
    return all(torch.allclose(x, y) for x, y in pairs)


@pytest.mark.parametrize("name", RULES)
def test_no_recompile(name: str) -> None:
    """Neither the second pass nor new values of lr, rho, gamma compile the model again."""
    torch._dynamo.reset()
    backend, graphs = counting_backend()
    model, plain = normed_model(), normed_model()
    compiled = torch.compile(model, backend=backend)
    opt = make_method(name, sgd(model), model=model)
    twin = make_method(name, sgd(plain), model=plain)
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


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch cannot compile it")
def test_no_recompile_of_a_compiled_step() -> None:
    """torch.compile around the whole step gives the same numbers and compiles nothing later."""
    torch._dynamo.reset()
    backend, graphs = counting_backend()
    model, plain = small_model(), small_model()
    opt = wsam.WSAM(sgd(model, momentum=0.9), model=model)
    twin = wsam.WSAM(sgd(plain, momentum=0.9))
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
def test_compiled_model_without_model_argument() -> None:
    """Its statistics are protected by hooks, about which torch warns."""
    torch._dynamo.reset()
    model, plain = normed_model(), normed_model()
    compiled = torch.compile(model, backend="eager")
    opt, twin = wsam.WSAM(sgd(model)), wsam.WSAM(sgd(plain))
    for t in range(3):
        opt.step(closure(opt, compiled, t))
        twin.step(closure(twin, plain, t))
    assert equal_buffers(model, plain)


@pytest.mark.parametrize("kind", ["function", "function used before", "layer"])
def test_compiled_code_without_model_argument(kind: str) -> None:
    """A compiled function may call no module hook: one warning. A compiled layer is protected."""
    torch._dynamo.reset()
    model, plain = normed_model(), normed_model()
    if kind == "layer":
        model[1] = torch.compile(model[1], backend="eager")

    def forward(x: Tensor) -> Tensor:
        return (model(x) ** 2).sum(1)

    losses = forward if kind == "layer" else torch.compile(forward, backend="eager")
    if kind == "function used before":
        losses(batch(0))
        plain(batch(0))
    opt, twin = wsam.WSAM(sgd(model)), wsam.WSAM(sgd(plain))

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
    found = [str(w.message) for w in record if issubclass(w.category, wsam.WsamWarning)]
    is_protected = equal_buffers(model, plain)
    assert is_protected or kind != "layer"
    assert len(found) == int(not is_protected)
    assert all("pass model=" in message for message in found)


def test_compiled_function_beside_a_loss_module() -> None:
    """The hook is called for the loss alone: one warning."""
    torch._dynamo.reset()
    model, criterion = normed_model(), nn.MSELoss()
    opt = wsam.SAM(sgd(model))

    @torch.compile(backend="eager")
    def forward(x: Tensor) -> Tensor:
        return model(x)

    def run() -> Tensor:
        outputs = forward(batch(0))
        loss = criterion(outputs, torch.zeros_like(outputs))
        loss.backward()
        return loss

    with pytest.warns(wsam.WsamWarning, match="pass model="):
        opt.step(run)
    opt.step(run)


def test_compiled_function_with_model_argument() -> None:
    """Statistics advance once a step, without a warning."""
    torch._dynamo.reset()
    model, plain = normed_model(), normed_model()
    losses = torch.compile(lambda x: (model(x) ** 2).sum(1), backend="eager")
    opt, twin = wsam.WSAM(sgd(model), model=model), wsam.WSAM(sgd(plain))
    for t in range(3):

        def run(t: int = t) -> Tensor:
            loss = losses(batch(t)).mean()
            loss.backward()
            return loss

        opt.step(run)
        twin.step(closure(twin, plain, t))
    assert equal_buffers(model, plain)


@pytest.mark.parametrize("with_model", [False, True])
def test_module_compiled_in_place(with_model: bool) -> None:
    """`module.compile()` keeps the module's type; its statistics advance once a step."""
    torch._dynamo.reset()
    model, plain = normed_model(), normed_model()
    model.compile(backend="eager")
    opt = wsam.WSAM(sgd(model), model=model if with_model else None)
    twin = wsam.WSAM(sgd(plain))
    for t in range(3):
        opt.step(closure(opt, model, t))
        twin.step(closure(twin, plain, t))
    assert equal_buffers(model, plain)


def test_compiled_spectral_norm_is_the_same_function_in_both_passes() -> None:
    torch._dynamo.reset()
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5)).double()
    compiled, vectors = torch.compile(layer, backend="eager"), []
    opt = wsam.SAM(sgd(layer), model=layer)

    def run() -> Tensor:
        loss = compiled(batch(0)).square().mean()
        loss.backward()
        vectors.append([b.clone() for b in layer.buffers()])
        return loss

    for _ in range(3):
        opt.step(run)
    assert all(all(map(torch.equal, *vectors[at : at + 2])) for at in (0, 2, 4))
    assert not all(map(torch.equal, vectors[0], vectors[2]))
