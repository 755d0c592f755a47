"""Fast tests of the integrations, without importing a framework that takes seconds to import."""

import pytest
import torch
from framework_helpers import (
    Step,
    difference,
    net,
    new_scaler,
    plain_loop,
    pretend_ddp,
    reset_accelerate,
    samples,
    scaled_loop,
    split_into_steps,
    train_plain,
    wsam_over_sgd,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import wsam
from wsam.integrations import MicrobatchReplay, transformers, unwrap


def replay_loop(
    model: nn.Module, optimizer: wsam.SharpnessAware, steps: list[Step], scaler: object = None
) -> None:
    """Train as a framework does: one call per micro-batch, then `optimizer.step()`."""
    replay = MicrobatchReplay(optimizer)
    for step in steps:
        for x, y in step:

            def run(x: Tensor = x, y: Tensor = y, size: int = len(step)) -> Tensor:
                loss = cross_entropy(model(x), y) / size
                (loss if scaler is None else scaler.scale(loss)).backward()
                return loss

            replay.run_first_pass(run)
        replay.run_second_pass(scaler)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_replay_equals_the_plain_loop(accumulate: int) -> None:
    steps = split_into_steps(samples(), 4, accumulate)
    model, expected = net(), net()
    optimizer = wsam_over_sgd(model.parameters())
    other = wsam_over_sgd(expected.parameters())
    replay_loop(model, optimizer, steps)
    plain_loop(expected, other, steps, accumulate=accumulate)
    assert difference(model, expected) == 0
    assert float(optimizer.sharpness) == pytest.approx(float(other.sharpness), rel=1e-4)


@pytest.mark.parametrize("scaled", [False, True])
def test_replay_with_several_ascent_steps(scaled: bool) -> None:
    steps = split_into_steps(samples(), 4, 2)
    models = net(), net()
    optimizer, other = (wsam_over_sgd(m.parameters(), ascent_steps=3) for m in models)
    replay_loop(models[0], optimizer, steps, new_scaler() if scaled else None)
    plain_loop(models[1], other, steps, accumulate=2)
    assert difference(*models) < 1e-6
    assert float(optimizer.sharpness) == pytest.approx(float(other.sharpness), rel=1e-3)


def test_replay_with_grad_scaler() -> None:
    steps = split_into_steps(samples(), 4, 2)
    model, expected = net(), net()
    replay_loop(model, wsam_over_sgd(model.parameters()), steps, new_scaler())
    other = wsam_over_sgd(expected.parameters())
    scaled_loop(expected, other, steps, new_scaler(), accumulate=2, autocast=None)
    assert difference(model, expected) == 0


@pytest.mark.parametrize("scaled", [False, True])
def test_steps_between_are_not_replayed(scaled: bool) -> None:
    steps = split_into_steps(samples(), 4, 2)
    models = net(), net()
    passes: list[nn.Module] = []
    models[0].register_forward_hook(lambda model, *_: passes.append(model))
    options = {"when": wsam.schedule.Every(2), "reuse": True}
    optimizer, other = (wsam_over_sgd(m.parameters(), **options) for m in models)
    replay_loop(models[0], optimizer, steps, new_scaler() if scaled else None)
    plain_loop(models[1], other, steps, accumulate=2)
    assert difference(*models) < 1e-6
    assert len(passes) == 2 * (len(steps) + (len(steps) + 1) // 2)


def test_error_in_first_pass_discards_the_micro_batches() -> None:
    model = net()
    replay = MicrobatchReplay(wsam_over_sgd(model.parameters()))
    with pytest.raises(KeyError):
        replay.run_first_pass(lambda: {}["loss"])
    assert len(replay) == 0


def test_error_in_second_pass_restores_the_weights() -> None:
    model = net()
    x, y = samples().tensors
    replay = MicrobatchReplay(wsam_over_sgd(model.parameters()))

    def run() -> Tensor:
        if replay.in_second_pass:
            raise KeyError("second pass")
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    replay.run_first_pass(run)
    with pytest.raises(KeyError, match="second pass"):
        replay.run_second_pass()
    assert difference(model, net()) == 0
    assert not replay.in_second_pass


def test_local_perturbation_is_refused() -> None:
    model = pretend_ddp(net())
    with pytest.raises(ValueError, match="local=True"):
        MicrobatchReplay(wsam_over_sgd(model.parameters(), local=True, model=model))


def test_unwrap_finds_the_optimizer_inside_wrappers() -> None:
    class Wrapper:
        def __init__(self, optimizer: object) -> None:
            self.optimizer = optimizer
            self.base = None  # as a wrapper of another library may have

    optimizer = wsam_over_sgd(net().parameters())
    assert unwrap(Wrapper(Wrapper(optimizer))) is optimizer
    assert unwrap(Wrapper(torch.optim.SGD(net().parameters(), lr=0.1))) is None


def test_module_of_transformers_has_no_other_attributes() -> None:
    assert not hasattr(transformers, "nothing")


def test_accelerate_equals_the_plain_loop() -> None:
    from accelerate_helpers import Run

    reset_accelerate()
    run = Run(accumulate=2).epochs(2)
    reset_accelerate()
    assert difference(run.body, train_plain(accumulate=2)[0]) == 0
