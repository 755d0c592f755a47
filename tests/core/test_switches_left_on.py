"""Whoever looks at batch norms outside a closure's second pass finds them as he left them."""

import copy
import gc
import io
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from squares import X
from switching import STEPS, closure_of, count, normed, optimizer, train, trained, watched
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from wsam import passes, switches

# --- who looks at them ---------------------------------------------------------------------------


def test_loops_by_hand_and_looks_leave_switches_alone() -> None:
    """There the user is at work between the passes: he may copy the model, or set its statistics."""
    model = normed()
    opt = trained(model)
    opt.begin()
    closure_of(model)()
    opt.ascend()
    assert model[1].track_running_stats
    closure_of(model)()
    opt.descend()
    opt.step()
    assert count(model[1]) == STEPS + 1
    opt.zero_grad()
    closure_of(model)()
    with opt.perturbed():
        assert copy.deepcopy(model)[1].track_running_stats
        update_bn([X, X + 1.0], model)
        assert count(model[1]) == 2
    assert count(model[1]) == STEPS + 2


def test_a_closure_may_save_the_model() -> None:
    model = normed()
    opt = optimizer(model, model)
    file = io.BytesIO()

    def forward(x: Tensor) -> Tensor:
        torch.save(model, file)
        return model(x)

    train(opt, forward)
    assert file.tell()


def test_an_optimizer_within_the_second_pass_of_another() -> None:
    model = normed()
    inner, outer = optimizer(model[3], model), optimizer(model[0], model)

    def forward(x: Tensor) -> Tensor:
        inner.step(closure_of(model))
        outer.zero_grad()
        return model(x)

    train(inner, model)
    train(outer, forward)
    assert model[1].track_running_stats
    assert count(model[1]) == STEPS + 2 * STEPS


# --- interruptions and memory --------------------------------------------------------------------


def interrupted_at(line: int, run: Callable[[], object]) -> bool:
    """Run with Ctrl-C at a certain line among those of the rooms that throw switches."""
    files, left = (switches.__file__, passes.__file__), [line]

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_ctrl_c_at_any_line_leaves_no_switch_off() -> None:
    line = 0
    while True:
        line += 1
        model = normed()
        opt = trained(model)
        statistics = copy.deepcopy(dict(model[1].named_buffers()))
        after = normed()
        after.load_state_dict(model.state_dict())
        after(X)  # as the first pass leaves them
        seen = watched(model[1])
        if not interrupted_at(line, lambda opt=opt, model=model: opt.step(closure_of(model))):
            break
        assert model[1].track_running_stats, line
        wanted = dict(after[1].named_buffers()) if seen else statistics
        for name, buffer in model[1].named_buffers():
            assert torch.equal(buffer, wanted[name]), (line, name)
        train(opt, model)
        assert count(model[1]) in (2 * STEPS, 2 * STEPS + 1)
    assert line > 30, "lines were interrupted"


def test_a_pass_that_fails_leaves_no_switch_off() -> None:
    model = normed()
    opt = trained(model)
    seen = watched(model[1])

    def forward(x: Tensor) -> Tensor:
        y = model(x)
        if len(seen) == 2:
            raise RuntimeError("in the second pass")
        return y

    with pytest.raises(RuntimeError, match="in the second pass"):
        opt.step(closure_of(forward))
    assert seen == [True, False]
    assert model[1].track_running_stats
    assert count(model[1]) == STEPS + 1


def test_layers_may_go_that_nobody_else_holds() -> None:
    """Without a model they are remembered weakly; a hook of theirs may hold the whole of it."""

    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.norm.register_forward_hook(self.note)

        def note(self, *_: Any) -> None:
            pass

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)

    model = nn.Linear(4, 2)
    opt = optimizer(model)
    owners = [Owner()]
    train(opt, lambda x: model(owners[0](x)))
    gone = weakref.ref(owners[0])
    owners.clear()
    gc.collect()
    train(opt, model)
    gc.collect()
    assert gone() is None
