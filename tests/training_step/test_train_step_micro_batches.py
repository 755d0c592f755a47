"""Micro-batches of `train_step`: equal to the whole batch, or each with its own perturbation."""

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    ALL,
    RULES,
    VARIANTS,
    batch,
    covering,
    gap,
    make_method,
    same,
    small_model,
    snapshot,
)
from torch import Tensor, nn

import wsam


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(opt: Any, model: nn.Module) -> Any:
    def loss_fn(x: Tensor) -> tuple[Tensor, Any]:
        out = model(x)
        each = out.square().sum(1)
        outputs = {"out": out, "mean": out.mean(), "positive": (out > 0).sum()}
        return (opt.select(each) if hasattr(opt, "select") else each.mean()), outputs

    return loss_fn


@covering(name=[*VARIANTS, "base"], micro_batches=[2, 3, 4, 10, 64])
def test_micro_batches_equal_the_whole_batch(name: str, micro_batches: int) -> None:
    """Ten samples: parts of unequal sizes count by their sizes."""
    models = small_model(), small_model()
    opts: list[Any] = [sgd(m) for m in models]
    if name != "base":
        opts = [make_method(name, base, all_samples=True, max_norm=None) for base in opts]
    one = wsam.train_step(opts[0], loss_of(opts[0], models[0]))
    split = wsam.train_step(opts[1], loss_of(opts[1], models[1]), micro_batches=micro_batches)
    for t in range(3):
        torch.testing.assert_close(split(batch(t)), one(batch(t)), rtol=1e-12, atol=1e-12)
        if name != "base":
            torch.testing.assert_close(opts[1].sharpness, opts[0].sharpness, rtol=1e-9, atol=1e-12)
    assert gap(list(models[1].parameters()), list(models[0].parameters())) < 1e-12


@covering(name=ALL, max_norm=[None, 0.5])
def test_perturb_per_micro_batch(name: str, max_norm: float | None) -> None:
    """Equals a list of closures."""
    models = small_model(), small_model()
    opts = [make_method(name, sgd(m), all_samples=True, max_norm=max_norm) for m in models]
    step = wsam.train_step(
        opts[0], loss_of(opts[0], models[0]), micro_batches=2, perturb_per_micro_batch=True
    )
    loss_fn = loss_of(opts[1], models[1])

    def closure(part: Tensor) -> Any:
        def run() -> Tensor:
            loss = loss_fn(part)[0]
            loss.backward()
            return loss

        return run

    for t in range(3):
        loss, outputs = step(batch(t))
        closures = [closure(part) for part in batch(t).chunk(2)]
        expected = opts[1].step(closures, weights=[0.5, 0.5])
        torch.testing.assert_close(
            (loss, opts[0].sharpness), (expected, opts[1].sharpness), equal_nan=True
        )
        assert outputs["out"].shape == (10, 2)
    assert gap(list(models[0].parameters()), list(models[1].parameters())) < 1e-12


def test_each_part_is_perturbed_by_the_gradient_of_its_mean_loss() -> None:
    """Fisher SAM's d depends on the scale of the loss, so that weighting comes after d. By hand."""
    rho, model, reference = 0.5, small_model(), small_model()
    optimizer = wsam.FisherSAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=rho, eta=4.0)
    loss_fn = loss_of(optimizer, model)
    step = wsam.train_step(optimizer, loss_fn, micro_batches=3, perturb_per_micro_batch=True)

    x, params = batch(0), list(reference.parameters())
    before, sharpness = [p.detach().clone() for p in params], torch.zeros((), dtype=x.dtype)
    total = [torch.zeros_like(p) for p in params]
    for part in (x[:3], x[3:6], x[6:]):
        loss = reference(part).square().sum(1).mean()
        g0 = torch.autograd.grad(loss, params)
        direction = [g / (1 + 4.0 * g * g) for g in g0]
        norm = torch.stack([(g * d).sum() for g, d in zip(g0, direction, strict=True)]).sum().sqrt()
        with torch.no_grad():
            for p, d in zip(params, direction, strict=True):
                p.add_(rho / norm * d)
        at_d = reference(part).square().sum(1).mean()
        weight = len(part) / len(x)
        for all_g1, g1 in zip(total, torch.autograd.grad(at_d, params), strict=True):
            all_g1.add_(weight * g1)
        sharpness += weight * (at_d - loss).detach()
        with torch.no_grad():
            for p, w in zip(params, before, strict=True):
                p.copy_(w)
    wanted = [w - 0.1 * g for w, g in zip(before, total, strict=True)]

    step(x)
    assert gap(list(model.parameters()), wanted) < 1e-12
    torch.testing.assert_close(optimizer.sharpness, sharpness, rtol=1e-10, atol=1e-12)


def test_perturb_per_micro_batch_of_a_plain_optimizer() -> None:
    models = small_model(), small_model()
    for model, own in zip(models, (False, True), strict=True):
        base = sgd(model)
        loss_fn = loss_of(base, model)
        wsam.train_step(base, loss_fn, micro_batches=3, perturb_per_micro_batch=own)(batch(0))
    assert gap(list(models[0].parameters()), list(models[1].parameters())) == 0


@pytest.mark.parametrize("name", RULES)
def test_perturb_per_micro_batch_differs_from_one_perturbation(name: str) -> None:
    models = small_model(), small_model()
    opts = [make_method(name, sgd(m), rho=0.5) for m in models]
    for opt, model, own in zip(opts, models, (False, True), strict=True):
        loss_fn = loss_of(opt, model)
        wsam.train_step(opt, loss_fn, micro_batches=2, perturb_per_micro_batch=own)(batch(0))
    assert gap(list(models[0].parameters()), list(models[1].parameters())) > 1e-4


def test_scalars_and_other_values_are_passed_to_each_part() -> None:
    model, seen = small_model(), []
    opt = wsam.SAM(sgd(model))

    def loss_fn(x: Tensor, scale: Tensor, name: str) -> Tensor:
        seen.append((len(x), scale.item(), name))
        return scale * model(x).square().mean()

    wsam.train_step(opt, loss_fn, micro_batches=3)(batch(0), torch.tensor(2.0), name="x")
    assert seen == [(3, 2.0, "x"), (3, 2.0, "x"), (4, 2.0, "x")] * 2


def test_numbers_are_combined_as_scalars() -> None:
    """Python's numbers as 0-d tensors: floats are averaged over samples, integers are summed."""
    model = small_model()

    def loss_fn(x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        out, size = model(x), torch.tensor(len(x))
        mean, large = float(x.mean()), bool(x.abs().max() > 9)
        return out.square().mean(), {"mean": mean, "size": [len(x), size], "large": large}

    _, found = wsam.train_step(wsam.SAM(sgd(model)), loss_fn, micro_batches=3)(batch(0))
    assert found["mean"] == pytest.approx(float(batch(0).mean()), rel=1e-12)
    assert found["size"] == [10, 10]
    assert found["large"] is False


DIFFERENT: dict[str, Callable[[Tensor], Any]] = {
    "one tensor per sample": list,
    "None in one part": lambda x: {"rare": None if len(x) == 3 else x, "x": x},
    "None in other places": lambda x: [None, x] if len(x) == 3 else [x, None],
    "None in a mapping": lambda x: UserDict(rare=None if len(x) == 3 else x),
    "labels as a list": lambda x: [1] * len(x),
    "scalar in one part": lambda x: x.sum(1)[:-2].squeeze(),
    "other keys": lambda x: {f"of {len(x)}": x},
}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("outputs", DIFFERENT)
def test_outputs_of_different_structure(outputs: str, own: bool) -> None:
    """They would be joined wrongly. The error is raised before the update."""
    model = small_model()
    opt = wsam.SAM(sgd(model))
    before = snapshot(opt)

    def loss_fn(x: Tensor) -> tuple[Tensor, Any]:
        return model(x).square().mean(), DIFFERENT[outputs](x)

    step = wsam.train_step(opt, loss_fn, micro_batches=3, perturb_per_micro_batch=own)
    with pytest.raises(ValueError, match=r"differ in structure: return tensors whose first dimens"):
        step(batch(0))
    assert same(snapshot(opt), before)


def test_other_objects_are_those_of_the_first_part() -> None:
    model = small_model()

    def loss_fn(x: Tensor) -> tuple[Tensor, Any]:
        return model(x).square().mean(), [x.numpy(), f"{len(x)} samples", None, x]

    array, text, nothing, x = wsam.train_step(wsam.SAM(sgd(model)), loss_fn, micro_batches=3)(
        batch(0)
    )[1]
    assert (array.shape, text, nothing, x.shape) == ((3, 5), "3 samples", None, (10, 5))


@pytest.mark.parametrize(
    ("args", "found"),
    [
        ((torch.ones(4, 5), torch.ones(3)), r"\[3, 4\]"),
        ((torch.ones(0, 5),), r"\[0\]"),
        ((torch.ones(()),), r"\[\]"),
        (([1.0, 2.0],), r"\[\]"),
    ],
)
def test_a_batch_that_cannot_be_split(args: Any, found: str) -> None:
    model = small_model()
    step = wsam.train_step(wsam.SAM(sgd(model)), lambda *_: None, micro_batches=2)
    with pytest.raises(ValueError, match=f"along its first dimension.*; found: {found}$"):
        step(*args)


def test_lean_needs_one_perturbation() -> None:
    model = small_model()
    opt = wsam.WSAM(sgd(model), lean=True)
    step = wsam.train_step(opt, loss_of(opt, model), micro_batches=2, perturb_per_micro_batch=True)
    with pytest.raises(ValueError, match="lean=True"):
        step(batch(0))
