"""Whose running statistics are held still: threads, lent buffers, graphs, scripts."""

import copy
from typing import Any

import pytest
import torch
from squares import GIVEN, X, in_a_thread, squared, told, train, train_by
from switching import normed
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

import wsam

SCRIPTED = pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning")


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


def test_passes_that_run_in_another_thread() -> None:
    """Their layers are not held unless the model is given, which is said once."""
    model = normed()
    (said,) = told(lambda: in_a_thread(lambda: model(X)), model.parameters())
    assert "another thread" in said
    assert "pass model=" in said
    assert not told(lambda: in_a_thread(lambda: model(X)), model.parameters(), model)


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
    for _ in range(3):
        opt.step(squared(lambda: model(X)))
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
    for _ in range(3):
        opt.step(squared(lambda: model(X)))
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
