"""Frameworks that call `step()` after one pass are recognized by their modules' names."""

import pytest
import torch

import wsam


def step_from(module: str, optimizer: wsam.SharpnessAware) -> None:
    """Call `optimizer.step()` from a function of a module with this name."""
    names = {"__name__": module}
    exec("def step(optimizer):\n    optimizer.step()", names)
    names["step"](optimizer)


@pytest.mark.parametrize(
    ("module", "hint"),
    [
        ("deepspeed.runtime.engine", "DeepSpeed is not supported: its engine calls the optimizer"),
        ("transformers.trainer", "SharpnessAwareTrainer"),
        ("accelerate.optimizer", "TwoPasses"),
    ],
)
def test_hint_names_the_framework(module: str, hint: str) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = wsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=hint):
        step_from(module, optimizer)
    with pytest.raises(RuntimeError) as raised:
        step_from("my_program", optimizer)
    assert hint not in str(raised.value)
