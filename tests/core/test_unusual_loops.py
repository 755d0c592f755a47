"""Loops that are unusual and right, or wrong and refused: what people write besides the recipes."""

import io
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from square_loss import X, square_closure, with_and_without_model
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import wsam
from wsam.schedule import Every, NormAbove, Warmup


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def closure_of(model: nn.Module) -> Callable[[], Tensor]:
    return square_closure(lambda: model(X))


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, **options)


# --- models that change --------------------------------------------------------------------------


@with_and_without_model
def test_a_closure_may_call_train_and_eval_itself(pass_model: bool) -> None:
    model = net().eval()
    opt = wsam.SAM(sgd(model), rho=0.5, model=model if pass_model else None)

    def closure() -> Tensor:
        model.train()
        loss = closure_of(model)()
        model.eval()
        return loss

    for _ in range(5):
        opt.step(closure)
    assert model[1].num_batches_tracked == 5


def test_buffers_that_cannot_be_written_are_left_alone() -> None:
    with torch.inference_mode():
        features = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).eval().requires_grad_(False)
    head = nn.Linear(6, 1)
    opt = wsam.SAM(sgd(head), model=nn.Sequential(features, head))

    def closure() -> Tensor:
        with torch.no_grad():
            seen = features(X)
        loss: Tensor = head(seen).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        opt.step(closure)


@with_and_without_model
def test_a_layer_may_be_replaced(pass_model: bool) -> None:
    """As SyncBatchNorm.convert_sync_batchnorm does."""
    model = net()
    opt = wsam.SAM(sgd(model), rho=0.5, model=model if pass_model else None)
    new = nn.BatchNorm1d(8)
    new.weight, new.bias = model[1].weight, model[1].bias
    for name, buffer in model[1].named_buffers():
        setattr(new, name, buffer)
    model[1] = new
    for _ in range(5):
        opt.step(closure_of(model))
    assert new.num_batches_tracked == 5


# --- states ---------------------------------------------------------------------------------------


def test_a_state_that_is_refused_leaves_everything_as_it_was() -> None:
    model, others = net(), net()
    opt = wsam.WSAM(torch.optim.AdamW(model.parameters(), lr=0.03), rho=0.1)
    other = wsam.WSAM(sgd(others))
    opt.step(closure_of(model))
    other.step(closure_of(others))
    before, groups = opt.state_dict(), opt.param_groups
    with pytest.raises(ValueError, match="AdamW finds no 'step'"):
        opt.load_state_dict(other.state_dict())
    assert opt.param_groups is groups
    after = opt.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, values in before["state"].items():
        assert all(torch.equal(values[name], after["state"][key][name]) for name in values)
    opt.step(closure_of(model))


class Interrupted(torch.optim.SGD):
    """Is interrupted when it has taken over half of a state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.__dict__["half"] = True
        self.__dict__["param_groups"] = []
        raise KeyboardInterrupt


def test_an_interrupted_load_leaves_everything_as_it_was() -> None:
    model = net()
    opt = wsam.WSAM(Interrupted(model.parameters(), lr=0.1))
    groups = opt.param_groups
    with pytest.raises(KeyboardInterrupt):
        opt.load_state_dict(opt.state_dict())
    assert opt.param_groups is groups
    assert not hasattr(opt.base, "half")


@pytest.mark.parametrize(
    "options",
    [
        {"when": Every(numpy.int64(3))},
        {"gamma": Warmup(numpy.float64(0.9), steps=numpy.int32(5))},
        {"when": Every(2) & NormAbove(numpy.float32(1.0))},
    ],
)
def test_numbers_of_numpy_are_saved_as_plain_ones(options: dict[str, Any]) -> None:
    model = net()
    opt = wsam.WSAM(sgd(model), **options)
    opt.step(closure_of(model))
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    again = wsam.WSAM(sgd(model))
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.when == opt.when
    assert again._values.schedules == opt._values.schedules


# --- refused ---------------------------------------------------------------------------------------


def test_lean_steps_refuse_weights_that_share_memory() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    opt = wsam.WSAM(sgd(model), lean=True)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="share memory"):
        opt.step(closure_of(model))
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("shared", [False, True])
def test_lean_steps_look_where_weights_end(shared: bool) -> None:
    rows = torch.linspace(-1, 1, 18).view(3, 6)
    parts = (rows[:2], rows[1:]) if shared else (rows[:, :3], rows[:, 3:])
    weights = [nn.Parameter(part) for part in parts]
    opt = wsam.WSAM(torch.optim.SGD(weights, lr=0.1), lean=True)

    def closure() -> Tensor:
        loss: Tensor = sum(w.square().sum() for w in weights)  # type: ignore[assignment]
        loss.backward()
        return loss

    if shared:
        with pytest.raises(RuntimeError, match="share memory"):
            opt.step(closure)
    else:
        opt.step(closure)


def test_lean_steps_are_made_where_nothing_has_an_address() -> None:
    model = net().to("meta")
    opt = wsam.WSAM(sgd(model), lean=True)

    def closure() -> Tensor:
        loss: Tensor = model(X.to("meta")).mean()
        loss.backward()
        return loss

    opt.step(closure)


def test_a_term_beside_a_differentiable_base_is_refused() -> None:
    weights = [nn.Parameter(torch.ones(2))]
    base = torch.optim.SGD(weights, lr=0.1, differentiable=True)
    with pytest.raises(ValueError, match="use CoupledWSAM"):
        wsam.WSAM(base)
    wsam.SAM(base)


def test_a_closure_is_refused_while_a_step_by_hand_waits() -> None:
    model = net()
    opt = wsam.WSAM(sgd(model))
    opt.begin()
    closure_of(model)()
    opt.ascend()
    closure_of(model)()
    opt.descend()
    with pytest.raises(RuntimeError, match="finish it with step"):
        opt.step(closure_of(model))
    opt.step()
    assert opt.param_groups[0]["sam_step"] == 1
    assert opt.skipped == 0


@pytest.mark.parametrize("name", ["rho", "gamma"])
def test_a_schedule_is_no_value_of_a_step(name: str) -> None:
    model = net()
    opt = wsam.WSAM(sgd(model))
    opt.param_groups[0][f"sam_{name}"] = Warmup(0.1, steps=10)
    with pytest.raises(TypeError, match="pass a schedule to the constructor"):
        opt.step(closure_of(model))


@pytest.mark.parametrize("name", ["rho", "gamma"])
def test_a_function_is_told_how_to_be_a_schedule(name: str) -> None:
    with pytest.raises(TypeError, match=r"wsam\.schedule\.Function"):
        wsam.WSAM(sgd(net()), **{name: lambda step: 0.1})


def test_complex_weights_are_refused_in_groups_that_come_later() -> None:
    opt = wsam.SAM(sgd(net()))
    late = {"params": [nn.Parameter(torch.ones(2, dtype=torch.complex64))]}
    with pytest.raises(TypeError, match="complex"):
        opt.add_param_group(late)
    assert len(opt.param_groups) == 1


# --- schedulers ------------------------------------------------------------------------------------


def test_a_scheduler_over_the_base_hears_of_a_step_that_was_skipped() -> None:
    model = net()
    base = sgd(model)
    scheduler = StepLR(base, 1)
    opt = wsam.SAM(base, nonfinite="skip")

    def closure() -> Tensor:
        loss: Tensor = model(X).mean() * torch.inf
        loss.backward()
        return loss

    opt.step(closure)
    assert opt.skipped == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
