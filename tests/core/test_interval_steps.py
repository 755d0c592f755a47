"""Steps outside an interval are bitwise those of the base optimizer, with one pass."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import MEMBERS, STYLES, make_step, member
from torch import Tensor, nn

from wsam.schedule import Between, Every, Interval, NormAbove

BASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
}
INTERVALS: dict[str, Interval] = {
    "every": Every(3),
    "offset": Every(2, offset=1),
    "last part": Between(4),
    "both": Every(2) & Between(3),
    "norm": NormAbove(factor=0.0),
}


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    )


def images(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(12, 6, generator=draw), torch.randint(3, (12,), generator=draw)


def losses(model: nn.Module, step: int) -> Tensor:
    x, y = images(step)
    return nn.functional.cross_entropy(model(x), y, reduction="none")


class Twins:
    """A method with an interval and, for each of its steps, a plain base in the same state."""

    def __init__(self, name: str, base: str, when: Interval) -> None:
        self.base_name = base
        self.model = network()
        self.opt = member(name, BASES[base](self.model.parameters()), when=when)
        self.passes = 0

    def step(self, number: int, style: str) -> tuple[bool, Tensor, Tensor]:
        """Make one step with both; return whether they are bitwise equal, and both losses."""
        plain = copy.deepcopy(self.model)
        base = BASES[self.base_name](plain.parameters())
        saved = {k: v for k, v in self.opt.state_dict().items() if k != "sharpness"}
        base.load_state_dict(copy.deepcopy(saved))
        start = torch.get_rng_state()
        self.passes = 0

        def run() -> Tensor:
            self.passes += 1
            return self.opt.select(losses(self.model, number))

        ours = make_step(self.opt, run, style)
        end = torch.get_rng_state()
        torch.set_rng_state(start)
        base.zero_grad()
        loss = losses(plain, number).mean()
        loss.backward()
        base.step()
        same = all(
            torch.equal(p, q)
            for p, q in zip(
                [*self.model.state_dict().values(), *tensors(self.opt)],
                [*plain.state_dict().values(), *tensors(base)],
                strict=True,
            )
        )
        if style != "two_step":  # has no begin(), so both passes draw
            same = same and torch.equal(end, torch.get_rng_state())
        return same, ours, loss.detach()


def tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all state tensors of an optimizer, in the order of its parameters."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [v for p in params for v in optimizer.state[p].values() if isinstance(v, Tensor)]


@pytest.mark.parametrize(
    ("name", "base"), [(name, list(BASES)[i % 2]) for i, name in enumerate(MEMBERS)]
)
def test_off_steps_are_bitwise_the_base(name: str, base: str) -> None:
    """Weights, statistics, optimizer state, generator and loss; one pass per step."""
    twins = Twins(name, base, Every(3))
    for number in range(7):
        same, ours, plain = twins.step(number, "closure")
        assert same == (number % 3 != 0), number
        assert twins.passes == (2 if number % 3 == 0 else 1)
        assert torch.equal(ours, plain)
        assert twins.opt.sharpness is not None
        assert bool(twins.opt.sharpness.isnan()) == (number % 3 != 0)


@pytest.mark.parametrize(
    ("kind", "style"), [(kind, STYLES[i % len(STYLES)]) for i, kind in enumerate(INTERVALS)]
)
def test_off_steps_of_intervals_and_styles(kind: str, style: str) -> None:
    """In a manual loop the second pass may run nevertheless, without any effect."""
    when = copy.deepcopy(INTERVALS[kind])
    twins = Twins("wsam", "momentum", when)
    seen = [twins.step(number, style)[0] for number in range(8)]
    assert any(seen)
    assert not all(seen)
    if kind == "last part":
        assert seen == [True] * 4 + [False] * 4
    if kind == "both":
        assert seen == [number % 2 == 1 or number < 3 for number in range(8)]


def test_off_step_with_micro_batches() -> None:
    """Each closure runs once, and the gradients are summed."""
    model, plain = network().eval(), network().eval()
    opt = member("wsam", BASES["momentum"](model.parameters()), when=Every(2, offset=1))
    base = BASES["momentum"](plain.parameters())
    runs: list[int] = []

    def closure(number: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            runs.append(number)
            loss = losses(model, number).mean()
            loss.backward()
            return loss

        return run

    opt.step([closure(number) for number in range(3)])
    for number in range(3):
        losses(plain, number).mean().backward()
    base.step()
    assert runs == [0, 1, 2]
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


def test_off_steps_are_counted() -> None:
    twins = Twins("wsam", "momentum", Every(3))
    for number in range(5):
        twins.step(number, "closure")
    assert twins.opt.param_groups[0]["sam_step"] == 5


def test_interval_is_resumed() -> None:
    """After four steps of `Every(3)`, the third one is perturbed."""
    twins = Twins("sam", "momentum", Every(3))
    for number in range(4):
        twins.step(number, "closure")
    again = Twins("sam", "momentum", Every(3))
    again.model.load_state_dict(twins.model.state_dict())
    again.opt.load_state_dict(twins.opt.state_dict())
    assert [again.step(number, "closure")[0] for number in range(4, 8)] == [True, True, False, True]
