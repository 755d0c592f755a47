"""Whose running statistics are held still: threads, lent buffers, graphs, scripts, spectral norms."""

import copy
import gc
import pickle
import threading
import warnings
import weakref
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


NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "old": nn.utils.spectral_norm,
    "parametrization": nn.utils.parametrizations.spectral_norm,
}
SPECTRAL = pytest.mark.parametrize("kind", NORMS)


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


class Rebinding(nn.Module):
    """Makes new buffers instead of writing into those it has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked = self.num_batches_tracked + 1
        return x


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


def told(forward: Callable[[], Tensor], weights: Any, model: nn.Module | None = None) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", wsam.WsamWarning)
        train_by(forward, weights, model)
    return [str(w.message) for w in found if issubclass(w.category, wsam.WsamWarning)]


def test_passes_that_run_in_another_thread() -> None:
    """Their layers are not held unless the model is given, which is said once."""
    model = normed()
    (said,) = told(lambda: in_a_thread(lambda: model(X)), model.parameters())
    assert "another thread" in said
    assert "pass model=" in said
    assert not told(lambda: in_a_thread(lambda: model(X)), model.parameters(), model)


@SPECTRAL
def test_a_spectral_norm_that_runs_in_another_thread(kind: str) -> None:
    layer = NORMS[kind](nn.Linear(4, 4))
    (said,) = told(lambda: in_a_thread(lambda: layer(X)), layer.parameters())
    assert "another thread" in said


def test_what_may_run_in_another_thread() -> None:
    """Modules without statistics, those that evaluate, and what a module of ours lets run."""
    plain, evaluates, ours = nn.Linear(4, 4), normed().eval(), nn.Identity()
    assert not told(lambda: in_a_thread(lambda: plain(X)), plain.parameters())
    assert not told(lambda: in_a_thread(lambda: evaluates(X)), evaluates.parameters())
    model = normed()
    assert not told(lambda: ours(in_a_thread(lambda: model(X))), model.parameters())
    passes, weight = iter(range(6)), nn.Parameter(torch.ones(16, 2))

    def forward() -> Tensor:
        return weight * ours(in_a_thread(lambda: model(X))) if next(passes) < 2 else weight

    assert not told(forward, [weight]), "what another step has seen is forgotten"


def test_a_step_in_another_thread_than_the_optimizer_was_made_in() -> None:
    model = normed()
    opt = in_a_thread(lambda: wsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1)))

    def closure() -> Tensor:
        loss = model(X).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        opt.step(closure)
    assert counts(model) == [3]


def test_a_call_that_ends_in_another_thread_ends_none_of_ours() -> None:
    class Twice(Rebinding):
        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            if again:
                in_a_thread(lambda: self(x, False))
            return super().forward(x)

    model, weight = Twice(), nn.Parameter(torch.ones(4))
    train_by(lambda: model(weight), [weight])
    assert counts(model) == [6]


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


@pytest.mark.parametrize("lends", [False, True], ids=["own", "lent"])
def test_buffers_that_are_replaced_in_a_call_that_fails(lends: bool) -> None:
    """What the second pass has made is given up all the same."""
    passes: list[int] = []

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            passes.append(1)
            if len(passes) == 2:
                raise KeyError("in the second pass")
            return x

    model = nn.Sequential(nn.Linear(4, 4), Rebinding(), Fails())
    mine = {**dict(model.named_parameters()), **lent(model)}
    with pytest.raises(KeyError):
        train_by(
            lambda: functional_call(model, mine, (X,)) if lends else model(X), model.parameters()
        )
    assert int(mine["1.num_batches_tracked"]) == (1 if lends else 0)
    assert counts(model) == [0 if lends else 1]


def test_buffers_that_two_modules_share() -> None:
    """The second is found when the first has moved them: the older copy is put back."""
    layer, again = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    again._buffers = dict(layer._buffers)
    train_by(lambda: again(layer(X)), [*layer.parameters(), *again.parameters()], steps=1)
    assert counts(layer) == counts(again) == [2]


@GIVEN
def test_buffers_whose_memory_moves_between_steps(given: bool) -> None:
    model = normed()
    opt = wsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model if given else None)

    def closure() -> Tensor:
        loss = model(X).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        opt.step(closure)
        for buffer in model.buffers():
            buffer.data = buffer.data.clone()
    assert counts(model) == [3]


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


def norm_of(layer: nn.Module) -> Any:
    (old,) = layer._forward_pre_hooks.values() or [None]
    return old or layer.parametrizations.weight[0]


def square_of(*layers: nn.Module) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        x = X
        for layer in layers:
            x = layer(x)
        loss = x.square().mean()
        loss.backward()
        return loss

    return closure


def square_layer(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return NORMS[kind](nn.Linear(4, 4))


@SPECTRAL
def test_spectral_norms_that_are_found_in_one_call_each(kind: str) -> None:
    one, two = square_layer(kind), square_layer(kind)
    opt = wsam.SAM(torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1))
    opt.step(square_of(one, two))
    for norm in map(norm_of, (one, two)):
        assert type(norm.n_power_iterations) is int
        assert norm.n_power_iterations == 1


@GIVEN
@SPECTRAL
def test_iterations_that_are_set_between_and_in_steps(kind: str, given: bool) -> None:
    layer = square_layer(kind)
    base = torch.optim.SGD(layer.parameters(), lr=0.1)
    opt = wsam.SAM(base, model=layer if given else None)
    closure, norm = square_of(layer), norm_of(layer)
    for iterations in (1, 5, 0, 2):
        norm.n_power_iterations = iterations
        opt.step(closure)
        assert norm.n_power_iterations == iterations
    closure()
    opt.ascend()
    closure()
    norm.n_power_iterations = 7
    opt.descend()
    opt.step()
    assert norm.n_power_iterations == 7


@SPECTRAL
def test_a_spectral_norm_is_not_kept_alive(kind: str) -> None:
    layer = square_layer(kind)
    opt = wsam.SAM(torch.optim.SGD(layer.parameters(), lr=0.1))
    opt.step(square_of(layer))
    norm = weakref.ref(norm_of(layer))
    del layer
    gc.collect()
    assert norm() is None


@GIVEN
@SPECTRAL
@pytest.mark.parametrize("first", [0, 1])
def test_a_spectral_norm_that_two_optimizers_stop(first: int, kind: str, given: bool) -> None:
    """It stands still until the last has returned to the weights."""
    layers = square_layer(kind), nn.Linear(4, 2)
    model = nn.Sequential(*layers)
    opts = [
        wsam.SAM(torch.optim.SGD(layer.parameters(), lr=0.1), model=model if given else None)
        for layer in layers
    ]
    closure, norm = square_of(model), norm_of(layers[0])
    for _ in range(2):
        closure()
        for opt in opts:
            opt.ascend()
        closure()
        opts[first].descend()
        assert norm.n_power_iterations == 0
        opts[1 - first].descend()
        assert norm.n_power_iterations == 1
        for opt in opts:
            opt.step()


@SPECTRAL
def test_a_copy_of_a_spectral_norm_that_is_stopped_iterates(kind: str) -> None:
    layer, copies = square_layer(kind), []
    norm = norm_of(layer)
    norm.n_power_iterations = 3
    opt = wsam.SAM(torch.optim.SGD(layer.parameters(), lr=0.1), model=layer)
    square = square_of(layer)

    def closure() -> Tensor:
        seen.append(int(norm.n_power_iterations))
        copies.append(copy.deepcopy(norm))
        copies.append(pickle.loads(pickle.dumps(norm)))
        return square()

    seen: list[int] = []
    opt.step(closure)
    assert seen == [3, 0]
    assert [c.n_power_iterations for c in copies] == [3] * 4
    assert all(type(c.n_power_iterations) is int for c in copies)


def test_a_compiled_spectral_norm_is_the_same_in_both_passes() -> None:
    layer, vectors = square_layer("parametrization"), []
    opt = wsam.SAM(torch.optim.SGD(layer.parameters(), lr=0.1), model=layer)
    square = square_of(torch.compile(layer, backend="eager"))

    def closure() -> Tensor:
        loss = square()
        vectors.append([b.clone() for b in layer.buffers()])
        return loss

    for _ in range(3):
        opt.step(closure)
    assert all(all(map(torch.equal, *vectors[at : at + 2])) for at in (0, 2, 4))
    assert not all(map(torch.equal, vectors[0], vectors[2]))
