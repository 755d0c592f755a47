"""A spectral norm divides by the same function of the weights in both passes, and iterates once."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from square_loss import X, square_closure, train, with_and_without_model
from torch import Tensor, nn

import wsam

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
        loss = square_closure(lambda: model(x))()
        found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        gradients.append(torch.cat(found))
        return loss

    return closure


@with_and_without_model
@SPECTRAL
def test_a_spectral_norm_is_the_same_in_both_passes(kind: str, pass_model: bool) -> None:
    """With a radius of nothing g1 is g0, and the vectors are where one pass has moved them."""
    model = spectral(kind)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = wsam.WSAM(base, rho=1e-9, model=model if pass_model else None)
    for _ in range(3):
        twin, gradients = spectral(kind), []
        twin.load_state_dict(model.state_dict())
        closure_of(twin, [])()
        opt.step(closure_of(model, gradients))
        first, second = gradients
        assert (second - first).norm() < 1e-7 * first.norm()
        assert all(map(torch.equal, model.buffers(), twin.buffers()))


@with_and_without_model
@SPECTRAL
def test_a_spectral_norm_goes_on_after_an_error(kind: str, pass_model: bool) -> None:
    model = spectral(kind)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = wsam.WSAM(base, model=model if pass_model else None)
    passes: list[Tensor] = []

    def fails() -> Tensor:
        loss = closure_of(model, passes)()
        if len(passes) == 2:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        opt.step(fails)
    assert moves(model)


def moves(model: nn.Module) -> bool:
    before = {name: b.clone() for name, b in model.named_buffers()}
    closure_of(model, [])()
    return any(not torch.equal(b, before[name]) for name, b in model.named_buffers())


@with_and_without_model
def test_a_spectral_norm_of_a_vector(pass_model: bool) -> None:
    """It iterates nothing."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4), "bias")
    train(nn.Sequential(layer, nn.Linear(4, 2)), pass_model)


def norm_of(layer: nn.Module) -> Any:
    (old,) = layer._forward_pre_hooks.values() or [None]
    return old or layer.parametrizations.weight[0]


def square_of(*layers: nn.Module) -> Callable[[], Tensor]:
    return square_closure(lambda: functools.reduce(lambda x, layer: layer(x), layers, X))


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


@with_and_without_model
@SPECTRAL
def test_iterations_that_are_set_between_and_in_steps(kind: str, pass_model: bool) -> None:
    layer = square_layer(kind)
    base = torch.optim.SGD(layer.parameters(), lr=0.1)
    opt = wsam.SAM(base, model=layer if pass_model else None)
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
