"""Whose running statistics are held still: threads, lent buffers, graphs, scripts, spectral norms."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

import wsam

GIVEN = pytest.mark.parametrize("given", [True, False], ids=["model", "no-model"])
SCRIPTED = pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning")
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def normed() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def train(model: nn.Module, given: bool = False) -> None:
    train_by(lambda: model(X), model.parameters(), model if given else None)


def train_by(
    forward: Callable[[], Tensor], weights: Any, model: nn.Module | None = None, steps: int = 3
) -> None:
    opt = wsam.SAM(torch.optim.SGD(weights, lr=0.1), model=model, rho=0.5)

    def closure() -> Tensor:
        loss = forward().square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        opt.step(closure)


def counts(model: nn.Module) -> list[int]:
    return [int(b) for name, b in model.named_buffers() if "num_batches" in name]


# --- threads -----------------------------------------------------------------------------------


def in_a_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


@GIVEN
def test_another_thread_trains_a_model_of_its_own(given: bool) -> None:
    """Its layers run between our passes, and what they do is not undone."""
    model, other = normed(), normed()

    def forward() -> Tensor:
        in_a_thread(lambda: other(X))
        return model(X)

    train_by(forward, model.parameters(), model if given else None)
    assert counts(model) == [3]
    assert counts(other) == [6], "once in each pass"


@GIVEN
def test_parts_that_a_model_runs_in_threads(given: bool) -> None:
    """As DataParallel does: the model is called in our thread, its replicas are not."""

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = normed()

        def forward(self, x: Tensor) -> Tensor:
            return in_a_thread(lambda: self.part(x))

    model = Parallel()
    train(model, given)
    assert counts(model) == [3]


# --- buffers that are lent for a call ----------------------------------------------------------


def lent(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in model.named_buffers()}


def assert_untouched(model: nn.Module, own: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    now = dict(model.named_buffers())
    assert all(now[name] is own[name] for name in own)
    assert all(torch.equal(now[name], before[name]) for name in own)


def test_lent_buffers_move_once_and_go_back_to_the_lender() -> None:
    model = normed()
    own, mine = dict(model.named_buffers()), lent(model)
    before, weights = lent(model), dict(model.named_parameters())
    twin = copy.deepcopy(model)
    twin(X)
    train_by(lambda: functional_call(model, (weights, mine), (X,)), weights.values(), steps=1)
    assert_untouched(model, own, before)
    assert all(torch.equal(mine[name], b) for name, b in twin.named_buffers())
    train_by(lambda: functional_call(model, (weights, mine), (X,)), weights.values(), steps=3)
    assert_untouched(model, own, before)
    assert int(mine["1.num_batches_tracked"]) == 4


def test_buffers_of_two_lenders_and_of_the_module() -> None:
    model = normed()
    one, two, weights = lent(model), lent(model), dict(model.named_parameters())
    own = dict(model.named_buffers())

    def forward() -> Tensor:
        calls = [functional_call(model, (weights, mine), (X,)) for mine in (one, two, one)]
        return torch.stack([*calls, model(X)])

    train_by(forward, weights.values())
    assert all(b is own[name] for name, b in model.named_buffers())
    found = [int(buffers["1.num_batches_tracked"]) for buffers in (one, two, own)]
    assert found == [6, 3, 3]


def test_the_models_own_buffers_stay_its_own_where_it_is_given() -> None:
    model = normed()
    own, mine = dict(model.named_buffers()), lent(model)
    before, weights = lent(model), dict(model.named_parameters())
    train_by(lambda: functional_call(model, (weights, mine), (X,)), weights.values(), model)
    assert_untouched(model, own, before)


def test_buffers_of_an_ensemble() -> None:
    """In torch.vmap the modules have wrappers of the stacked buffers, which end with the call."""
    model = normed()
    weights, stacked = stack_module_state([normed() for _ in range(3)])
    own, before = dict(model.named_buffers()), lent(model)

    def forward() -> Tensor:
        one = lambda w, b: functional_call(model, (w, b), (X,))  # noqa: E731
        return torch.vmap(one)(weights, stacked)

    train_by(forward, weights.values())
    assert stacked["1.num_batches_tracked"].tolist() == [3, 3, 3]
    assert_untouched(model, own, before)


class Rebinding(nn.Module):
    """Makes new buffers instead of writing into those it has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked = self.num_batches_tracked + 1
        return x


@pytest.mark.parametrize("calls", [1, 2])
def test_buffers_that_are_replaced_in_each_of_many_calls(calls: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Rebinding())
    train_by(lambda: torch.stack([model(X) for _ in range(calls)]), model.parameters())
    assert counts(model) == [3 * calls]


def test_lent_buffers_that_are_replaced() -> None:
    """torch.func.functional_call gives the lender what the module has made of them."""
    model = nn.Sequential(nn.Linear(4, 4), Rebinding())
    own, mine = model[1].num_batches_tracked, {**dict(model.named_parameters()), **lent(model)}
    train_by(lambda: functional_call(model, mine, (X,)), model.parameters())
    assert model[1].num_batches_tracked is own
    assert int(own) == 0
    assert int(mine["1.num_batches_tracked"]) == 3


# --- everything that runs ----------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, "both"])
def test_two_models_in_one_closure(given: str | None) -> None:
    """A generator's step runs the discriminator, too: model= is given both."""
    generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    discriminator = normed()
    model = nn.ModuleList([generator, discriminator]) if given else None
    train_by(lambda: discriminator(generator(X)), generator.parameters(), model)
    assert counts(generator) == counts(discriminator) == [3]


@GIVEN
def test_a_model_from_torch_export(given: bool) -> None:
    """Its normalisation is an operation of a graph, no module that could be seen to run."""
    model = torch.export.export(normed().train(), (X,)).module()
    train(model, given)
    assert counts(model) == [3]


def test_a_graph_without_statistics_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    own, looks = type(graph).modules, []

    def modules(self: nn.Module, *given: Any) -> Any:
        looks.append(self)
        return own(self, *given)

    monkeypatch.setattr(type(graph), "modules", modules)
    train(graph)
    assert len(looks) == 1


@SCRIPTED
@GIVEN
@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("kind", ["scripted", "traced"])
def test_torchscript(kind: str, part: bool, given: bool) -> None:
    make = torch.jit.script if kind == "scripted" else lambda m: torch.jit.trace(m, X)
    model = make(normed())
    if part:
        model = nn.Sequential(nn.Linear(4, 4), model, nn.BatchNorm1d(2))
    before = counts(model)  # a trace was made by running it
    train(model, given)
    assert counts(model) == [count + 3 for count in before]


@SCRIPTED
@GIVEN
def test_torchscript_without_statistics(given: bool) -> None:
    train(nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.ReLU()), nn.Linear(4, 2)), given)


# --- spectral norms ----------------------------------------------------------------------------

NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "old": nn.utils.spectral_norm,
    "parametrization": nn.utils.parametrizations.spectral_norm,
}
SPECTRAL = pytest.mark.parametrize("kind", NORMS)


def spectral(kind: str) -> nn.Sequential:
    """A norm whose vectors are far from converged."""
    torch.manual_seed(0)
    model = nn.Sequential(NORMS[kind](nn.Linear(6, 6)), nn.Linear(6, 2)).double()
    for name, vector in model.named_buffers():
        if name.endswith(("_u", "_v")):
            vector.copy_(nn.functional.normalize(torch.randn_like(vector), dim=0))
    return model


def closure_of(model: nn.Module, gradients: list[Tensor]) -> Callable[[], Tensor]:
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def closure() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        gradients.append(torch.cat(found))
        return loss

    return closure


@GIVEN
@SPECTRAL
def test_a_spectral_norm_is_the_same_in_both_passes(kind: str, given: bool) -> None:
    """With a radius of nothing g1 is g0, and the vectors are where one pass has moved them."""
    model = spectral(kind)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = wsam.WSAM(base, rho=1e-9, model=model if given else None)
    for _ in range(3):
        twin, gradients = spectral(kind), []
        twin.load_state_dict(model.state_dict())
        closure_of(twin, [])()
        opt.step(closure_of(model, gradients))
        first, second = gradients
        assert (second - first).norm() < 1e-7 * first.norm()
        assert all(map(torch.equal, model.buffers(), twin.buffers()))


@GIVEN
@SPECTRAL
def test_a_spectral_norm_goes_on_after_an_error(kind: str, given: bool) -> None:
    model = spectral(kind)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = wsam.WSAM(base, model=model if given else None)
    passes: list[Tensor] = []

    def fails() -> Tensor:
        loss = closure_of(model, passes)()
        if len(passes) == 2:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        opt.step(fails)
    assert moves(model)


@GIVEN
@SPECTRAL
def test_a_spectral_norm_goes_on_without_the_optimizer(kind: str, given: bool) -> None:
    """One that is given up between the passes leaves a norm that iterates."""
    model = spectral(kind)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = wsam.WSAM(base, model=model if given else None)
    closure_of(model, [])()
    opt.ascend()
    closure_of(model, [])()
    assert not moves(model)
    del opt, base
    assert moves(model)


def moves(model: nn.Module) -> bool:
    before = {name: b.clone() for name, b in model.named_buffers()}
    closure_of(model, [])()
    return any(not torch.equal(b, before[name]) for name, b in model.named_buffers())


@GIVEN
def test_a_spectral_norm_of_a_vector(given: bool) -> None:
    """It iterates nothing."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4), "bias")
    train(nn.Sequential(layer, nn.Linear(4, 2)), given)
