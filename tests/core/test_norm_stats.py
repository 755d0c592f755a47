"""Whose running statistics are held still: threads, lent buffers, graphs, scripts."""

import pytest
import torch
from square_loss import (
    X,
    run_in_thread,
    square_closure,
    train,
    train_forward,
    with_and_without_model,
)
from torch import Tensor, nn
from torch.func import functional_call

import wsam

SCRIPTED = pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning")


def normed() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


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


@with_and_without_model
def test_another_thread_trains_a_model_of_its_own(pass_model: bool) -> None:
    """Its layers run between our passes, and what they do is not undone."""
    model, other = normed(), normed()

    def forward() -> Tensor:
        run_in_thread(lambda: other(X))
        return model(X)

    train_forward(forward, model.parameters(), model if pass_model else None)
    assert counts(model) == [3]
    assert counts(other) == [6], "once in each pass"


def test_a_step_in_another_thread_than_the_optimizer_was_made_in() -> None:
    model = normed()
    opt = run_in_thread(lambda: wsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1)))
    for _ in range(3):
        opt.step(square_closure(lambda: model(X)))
    assert counts(model) == [3]


# --- buffers that are lent for a call ----------------------------------------------------------


def lent(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in model.named_buffers()}


def assert_untouched(model: nn.Module, own: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    now = dict(model.named_buffers())
    assert all(now[name] is own[name] for name in own)
    assert all(torch.equal(now[name], before[name]) for name in own)


def test_functional_call_leaves_the_modules_own_buffers() -> None:
    """Buffers passed to `functional_call` move once a step, and do not replace the module's."""
    model = normed()
    own = dict(model.named_buffers())
    passed = {name: b.clone() for name, b in own.items()}
    opt = wsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1))

    def closure() -> Tensor:
        loss = functional_call(model, {**dict(model.named_parameters()), **passed}, (X,)).mean()
        loss.backward()
        return loss

    for _ in range(3):
        opt.step(closure)
    assert all(model.get_buffer(name) is b for name, b in own.items())
    assert int(passed["1.num_batches_tracked"]) == 3
    assert int(own["1.num_batches_tracked"]) == 0


def test_buffers_that_two_modules_share() -> None:
    """The second is found when the first has moved them: the older copy is put back."""
    layer, again = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    again._buffers = dict(layer._buffers)
    train_forward(lambda: again(layer(X)), [*layer.parameters(), *again.parameters()], steps=1)
    assert counts(layer) == counts(again) == [2]


@with_and_without_model
def test_buffers_whose_memory_moves_between_steps(pass_model: bool) -> None:
    model = normed()
    opt = wsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model if pass_model else None)
    for _ in range(3):
        opt.step(square_closure(lambda: model(X)))
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
    train_forward(lambda: discriminator(generator(X)), generator.parameters(), model)
    assert counts(generator) == counts(discriminator) == [3]


@with_and_without_model
def test_a_model_from_torch_export(pass_model: bool) -> None:
    """Its normalisation is an operation of a graph, no module that could be seen to run."""
    model = torch.export.export(normed().train(), (X,)).module()
    train(model, pass_model)
    assert counts(model) == [3]


@SCRIPTED
@with_and_without_model
@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("kind", ["scripted", "traced"])
def test_torchscript(kind: str, part: bool, pass_model: bool) -> None:
    make = torch.jit.script if kind == "scripted" else lambda m: torch.jit.trace(m, X)
    model = make(normed())
    if part:
        model = nn.Sequential(nn.Linear(4, 4), model, nn.BatchNorm1d(2))
    before = counts(model)  # a trace was made by running it
    train(model, pass_model)
    assert counts(model) == [count + 3 for count in before]


@SCRIPTED
@with_and_without_model
def test_torchscript_without_statistics(pass_model: bool) -> None:
    train(nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.ReLU()), nn.Linear(4, 2)), pass_model)
