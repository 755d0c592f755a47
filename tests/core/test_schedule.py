"""Schedules of hyperparameters, and intervals of steps that are sharpness-aware."""

import copy
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from helpers import (
    METHODS,
    PROBLEMS,
    STYLES,
    covering,
    gap,
    make_method,
    make_step,
    parameters,
    reference_base,
    torch_base,
    train,
)
from hypothesis import given
from hypothesis import strategies as st
from reference import Method
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LinearLR, LRScheduler, OneCycleLR

import wsam
from wsam._core.schedule_base import unpack
from wsam.schedule import (
    Between,
    Constant,
    Every,
    FollowLR,
    Function,
    Interval,
    InverseSqrt,
    NormAbove,
    Schedule,
    Warmup,
)

MLP = PROBLEMS["mlp"]

FORMULAS: dict[str, tuple[Schedule, Callable[[int], float]]] = {
    "constant": (Constant(0.3), lambda t: 0.3),
    "warmup": (Warmup(0.6, 4), lambda t: 0.6 * min(1.0, t / 4)),
    "warmup_from": (Warmup(0.6, 4, start=0.2), lambda t: 0.2 + 0.4 * min(1.0, t / 4)),
    "no_warmup": (Warmup(0.6, 0), lambda t: 0.6),
    "inverse_sqrt": (InverseSqrt(0.5), lambda t: 0.5 / math.sqrt(t + 1)),
    "function": (Function(lambda t: 0.1 + 0.05 * t), lambda t: 0.1 + 0.05 * t),
    "follow_lr": (FollowLR(0.4, 0.1, lr_high=0.02, lr_low=0.0), lambda t: 0.4),
}


@covering(
    2,
    value=[("wsam", "gamma"), ("wsam", "rho"), ("gsam", "alpha")],
    kind=list(FORMULAS),
    style=STYLES,
)
def test_scheduled_values(value: tuple[str, str], kind: str, style: str) -> None:
    """Each step uses the formula's value; steps are counted from zero."""
    (name, key), (schedule, formula) = value, FORMULAS[kind]
    params, w, base = parameters(MLP.weights()), MLP.weights(), reference_base("momentum")
    opt = make_method(name, torch_base("momentum", params), **{key: schedule})
    for t in range(6):
        method = Method(reference.METHODS[name].rule, **{key: formula(t)})
        g0, g1 = reference.two_gradients(method, w, lambda v, t=t: MLP.losses(v, t))
        w = reference.update(method, base, w, g0, g1)
        train(opt, params, MLP, range(t, t + 1), style)
        assert opt.param_groups[0][f"sam_{key}"] == pytest.approx(formula(t))
    assert gap(params, w) < 1e-12


@pytest.mark.parametrize("name", METHODS)
def test_scheduled_radius_of_every_method(name: str) -> None:
    ours, theirs = parameters(MLP.weights()), parameters(MLP.weights())
    opt = make_method(name, torch_base("sgd", ours), rho=Function(lambda t: 0.1 * (t + 1)))
    twin = make_method(name, torch_base("sgd", theirs), rho=0.1)
    for t in range(4):
        twin.param_groups[0]["sam_rho"] = 0.1 * (t + 1)
        train(opt, ours, MLP, range(t, t + 1))
        train(twin, theirs, MLP, range(t, t + 1))
    assert gap(ours, theirs) < 1e-14


@given(lr=st.floats(0.0, 0.2))
def test_radius_follows_the_learning_rate(lr: float) -> None:
    """rho_min + (rho_max - rho_min)(lr - lr_min)/(lr_max - lr_min), clamped."""
    wanted = min(0.3, max(0.02, 0.02 + (0.3 - 0.02) * (lr - 0.01) / (0.1 - 0.01)))
    found = FollowLR(0.3, 0.02, lr_high=0.1, lr_low=0.01).value(0, lr)
    assert float(found) == pytest.approx(wanted, rel=1e-9)
    rate = torch.tensor(lr, dtype=torch.float64)
    assert float(FollowLR(0.3, 0.02, lr_high=0.1, lr_low=0.01).value(0, rate)) == float(found)


def test_gsam_radius_through_warmup_and_decay() -> None:
    """The radius follows the scheduler's learning rate and is not negative during warm-up."""
    p = nn.Parameter(torch.tensor([1.0, -2.0]))
    opt = wsam.GSAM(torch.optim.SGD([p], lr=0.1), rho=0.3, rho_min=0.02, lr_min=0.01)
    rates = [0.0, 0.05, 1.0, 0.5, 0.1, 0.001]
    scheduler = LambdaLR(opt, lambda t: rates[t])
    for t in range(5):
        make_step(opt, lambda: opt.select(p**4))
        lr = 0.1 * rates[t]
        wanted = max(0.02, 0.02 + 0.28 * (lr - 0.01) / 0.09)
        assert opt.param_groups[0]["sam_rho"] == pytest.approx(wanted)
        scheduler.step()


SCHEDULERS: dict[str, Callable[[Any], LRScheduler]] = {
    "warmup": lambda opt: LinearLR(opt, start_factor=0.01, total_iters=5),
    "from zero": lambda opt: LambdaLR(opt, lambda t: min(1.0, t / 5)),
    "one cycle": lambda opt: OneCycleLR(opt, max_lr=0.1, total_steps=12, cycle_momentum=False),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("kind", "lr"), [("warmup", 0.1), ("from zero", 0.1), ("one cycle", 0.01), ("one cycle", 0.7)]
)
def test_gsam_radius_with_a_scheduler(kind: str, lr: float, first: bool) -> None:
    """Constructed before the optimizer or after it; the largest learning rate is 0.1."""
    p = nn.Parameter(torch.tensor([1.0, -2.0]))
    base = torch.optim.SGD([p], lr=lr)
    scheduler = SCHEDULERS[kind](base) if first else None
    opt = wsam.GSAM(base, rho=0.05, rho_min=0.01)
    scheduler = scheduler or SCHEDULERS[kind](opt)
    radii = []
    for _ in range(11):
        make_step(opt, lambda: p.square().sum())
        group = opt.param_groups[0]
        assert group["sam_rho"] == pytest.approx(0.01 + 0.04 * group["lr"] / 0.1)
        radii.append(group["sam_rho"])
        scheduler.step()
    assert max(radii) <= 0.05
    assert max(radii) == pytest.approx(0.05, rel=0.01)
    assert min(radii) < 0.015


def test_gsam_radius_above_the_largest_known_rate() -> None:
    p = nn.Parameter(torch.ones(2))
    opt = wsam.GSAM(torch.optim.SGD([p], lr=0.1), rho=0.05, rho_min=0.01)
    LambdaLR(opt, lambda t: 3.0)
    make_step(opt, lambda: p.square().sum())
    assert opt.param_groups[0]["sam_rho"] == pytest.approx(0.05, rel=1e-15)
    other = torch.optim.SGD([p], lr=0.1)
    LambdaLR(other, lambda t: 2.0)
    again = wsam.GSAM(other, rho=0.05, rho_min=0.01)  # the scheduler has set 0.2 before
    again.param_groups[0]["lr"] = 0.1
    make_step(again, lambda: p.square().sum())
    assert again.param_groups[0]["sam_rho"] == pytest.approx(0.03)


def test_gsam_radius_with_rates_that_a_loop_sets() -> None:
    """The largest rate so far counts: the loop sets it after construction."""
    p = nn.Parameter(torch.ones(2))
    opt = wsam.GSAM(torch.optim.SGD([p], lr=0.0), rho=0.2, rho_min=0.01)
    radii = []
    for rate in (0.0, 0.05, 0.1, 0.05, 0.0):
        opt.param_groups[0]["lr"] = rate
        make_step(opt, lambda: p.square().sum())
        radii.append(opt.param_groups[0]["sam_rho"])
    assert radii == pytest.approx([0.01, 0.2, 0.2, 0.105, 0.01])


def test_follow_lr_with_another_method() -> None:
    p = nn.Parameter(torch.ones(2))
    opt = wsam.WSAM(torch.optim.SGD([p], lr=torch.tensor(0.1)), rho=FollowLR(0.05, 0.01))
    assert "rho=FollowLR(high=0.05, low=0.01, lr_high=None, lr_low=0.0)" in repr(opt)
    opt.param_groups[0]["lr"].fill_(0.05)
    make_step(opt, lambda: p.square().sum())
    assert float(opt.param_groups[0]["sam_rho"]) == pytest.approx(0.03)


def test_schedules_of_groups() -> None:
    params = parameters(MLP.weights())
    groups = [
        {"params": params[:2], "sam_gamma": Warmup(0.8, 4)},
        {"params": params[2:], "gamma": 0.5},
    ]
    opt = wsam.WSAM(torch.optim.SGD(groups, lr=0.01), rho=InverseSqrt(0.2))
    for t in range(5):
        train(opt, params, MLP, range(t, t + 1))
        assert opt.param_groups[0]["sam_gamma"] == pytest.approx(0.8 * min(1.0, t / 4))
        assert opt.param_groups[1]["sam_gamma"] == 0.5
        assert [g["sam_rho"] for g in opt.param_groups] == [pytest.approx(0.2 / (t + 1) ** 0.5)] * 2


def test_schedule_that_raises_can_be_replaced() -> None:
    p = nn.Parameter(torch.ones(2))
    opt = wsam.SAM(torch.optim.SGD([p], lr=0.1))
    make_step(opt, lambda: p.square().sum())
    values = [0.05]
    with pytest.raises(IndexError):
        opt.rho = Function(lambda step: values[step])
    opt.rho = 0.02
    make_step(opt, lambda: p.square().sum())
    assert opt.rho == 0.02


def passes_of(when: Any, steps: int, style: str = "closure", rho: Any = 0.5) -> list[bool]:
    """Return for each step whether the second pass was at other weights than the first."""
    w = nn.Parameter(torch.tensor([3.0, -1.0]))
    opt = wsam.SAM(torch.optim.SGD([w], lr=0.01), rho=rho, when=when)
    chosen = []
    for t in range(steps):
        seen: list[Tensor] = []

        def loss(t: int = t, seen: list[Tensor] = seen) -> Tensor:
            seen.append(w.detach().clone())
            return (1.0 + 10.0 * (t == 3)) * (w**2).mean()

        make_step(opt, loss, style)
        chosen.append(len(seen) == 2 and not torch.equal(*seen))
    return chosen


@pytest.mark.parametrize("style", STYLES)
def test_intervals(style: str) -> None:
    yes, no = True, False
    assert passes_of(None, 3, style) == [yes, yes, yes]
    assert passes_of(Every(3), 7, style) == [yes, no, no, yes, no, no, yes]
    assert passes_of(Every(2, offset=1), 5, style) == [no, yes, no, yes, no]
    assert passes_of(Between(2, 4), 6, style) == [no, no, yes, yes, no, no]
    assert passes_of(Between(3), 5, style) == [no, no, no, yes, yes]
    assert passes_of(Between(0, 0), 3, style) == [no, no, no]
    assert passes_of(Every(2) & Between(2), 5, style) == [no, no, yes, no, yes]
    assert passes_of(Every(4) | Between(2, 3), 5, style) == [yes, no, yes, no, yes]


@pytest.mark.parametrize("combine", [operator.and_, operator.or_])
@pytest.mark.parametrize("other", [3, Every])
def test_only_intervals_combine(combine: Callable[[Any, Any], Any], other: Any) -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        combine(Every(2), other)


def test_intervals_have_no_truth_value() -> None:
    """`Every(4) and Between(30)` would be `Between(30)`."""
    with pytest.raises(TypeError, match=r"combine intervals with & and \|"):
        _ = Every(4) and Between(30)


def test_interval_by_gradient_norm() -> None:
    """The step with a large gradient is chosen, the next one is not."""
    chosen = passes_of(NormAbove(), 6)
    assert chosen[3]
    assert not chosen[4]


def test_interval_by_gradient_norm_formula() -> None:
    """q >= mean + factor sqrt(variance); the first call, at any step, sets the mean."""
    when = NormAbove(factor=2.0, decay=0.5)
    answers, statistics = [], []
    for step, square in enumerate([4.0, 9.0, 15.0, 14.0], start=7):
        answers.append(when.chosen(step, lambda square=square: math.sqrt(square)))
        statistics.append((when.mean, when.variance))
    # Thresholds: none, 4 + 2 sqrt(8), 6.5 + 2 sqrt(16.5) = 14.6, 10.75 + 2 sqrt(44.375) = 24.1.
    assert answers == [True, False, True, False]
    for found, wanted in zip(
        statistics, [(4, 8), (6.5, 16.5), (10.75, 44.375), (12.375, 27.46875)], strict=True
    ):
        assert found == pytest.approx(wanted)
    assert NormAbove().chosen(7, lambda: 1e-9), "the first is chosen, however small"
    for norm in (math.inf, math.nan, 1e100):  # the square of the last has no finite square
        assert when.chosen(8, lambda norm=norm: norm)
    assert (when.mean, when.variance) == statistics[-1], "a norm that overflows is ignored"


def test_interval_by_gradient_norm_is_not_asked_about_a_skipped_step() -> None:
    p = nn.Parameter(torch.ones(2))
    opt = wsam.SAM(torch.optim.SGD([p], lr=0.1), when=NormAbove(), nonfinite="skip")
    make_step(opt, lambda: p.sum() * math.inf)
    assert opt.skipped == 1
    assert not opt.when.begun


@pytest.mark.parametrize("pair", [NormAbove() & Every(1), Every(1) | NormAbove()])
def test_pairs_with_an_interval_by_gradient_norm(pair: Any) -> None:
    assert pair.needs_norm
    memory = pair.remember()
    pair.chosen(0, lambda: 2.0)
    assert pair.remember() != memory
    pair.recall(memory)
    assert pair.remember() == memory


def test_interval_by_gradient_norm_with_a_radius_of_zero_first() -> None:
    """It is not evaluated while the radius is 0, and then starts as at step 0."""
    rho = Function(lambda t: 0.5 if t >= 2 else 0.0)
    assert passes_of(NormAbove(), 8, rho=rho) == [False] * 2 + [True, True] + [False] * 4
    chosen = passes_of(NormAbove() | Between(100), 8, rho=rho)
    assert chosen == [False] * 2 + [True, True] + [False] * 4


def test_interval_by_gradient_norm_saved_by_an_earlier_version() -> None:
    saved = {"kind": "NormAbove", "factor": 1.0, "decay": 0.9, "mean": 4.0, "variance": 8.0}
    when = unpack(saved)
    assert isinstance(when, NormAbove)
    assert not when.chosen(3, lambda: 2.0)
    assert when.mean == pytest.approx(4.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Every(0),
        lambda: Warmup(0.9, steps=-5),
        lambda: Every(0.5),
        lambda: Every(2, offset=1.5),
        lambda: Between(-1),
        lambda: Between(0.75),
        lambda: Between(5, 3),
        lambda: FollowLR(0.1, 0.2, lr_high=0.1),
        lambda: FollowLR(0.2, 0.1, lr_high=0.1, lr_low=0.1),
        lambda: NormAbove(decay=1.0),
    ],
)
def test_bad_schedules(make: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        make()


def test_decoupled_term_uses_the_scheduled_learning_rate() -> None:
    params, w = parameters(MLP.weights()), MLP.weights()
    method, base = Method("wsam", gamma=0.8), reference_base("sgd")
    opt = wsam.WSAM(torch_base("sgd", params), gamma=0.8)
    scheduler = ExponentialLR(opt, gamma=0.5)
    for t in range(5):
        base.lr = 0.05 * 0.5**t
        g0, g1 = reference.two_gradients(method, w, lambda v, t=t: MLP.losses(v, t))
        w = reference.update(method, base, w, g0, g1)
        train(opt, params, MLP, range(t, t + 1))
        scheduler.step()
    assert gap(params, w) < 1e-12


def test_custom_schedule_with_the_name_of_a_built_in_one() -> None:
    """It is not saved, and not replaced by the built-in one."""

    class Warmup(wsam.schedule.Warmup):
        def value(self, step: int, lr: Any) -> float:
            return 0.5

    class Constant(wsam.schedule.Schedule):
        def value(self, step: int, lr: Any) -> float:
            return 0.5

    for own in (Warmup(0.1, steps=3), Constant()):
        opt = wsam.SAM(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), rho=own)
        state = opt.state_dict()
        assert state["sharpness"]["schedules"] == [{"rho": None}]
        opt.load_state_dict(state)
        assert opt._values.schedules == [{"rho": own}]


def test_failed_step_does_not_change_the_running_norm() -> None:
    p = nn.Parameter(torch.ones(2))
    when = wsam.schedule.NormAbove() & wsam.schedule.Every(1)
    opt = wsam.SAM(torch.optim.SGD([p], lr=0.1), when=when)
    passes: list[int] = []

    def fails() -> Tensor:
        passes.append(1)
        loss = p.square().sum()
        loss.backward()
        if len(passes) == 2:
            raise RuntimeError("the second pass failed")
        return loss

    with pytest.raises(RuntimeError, match="second pass"):
        opt.step(fails)
    assert opt.state_dict()["sharpness"]["interval"]["one"]["mean"] == 0.0
    opt.step(fails)
    assert opt.state_dict()["sharpness"]["interval"]["one"]["mean"] == pytest.approx(8.0)


def test_interrupted_choice_does_not_change_the_running_norm() -> None:
    class Interrupted(wsam.schedule.Interval):
        def chosen(self, step: int, norm: Callable[[], float]) -> bool:
            raise KeyboardInterrupt

    p, when = nn.Parameter(torch.ones(2)), wsam.schedule.NormAbove()
    opt = wsam.SAM(torch.optim.SGD([p], lr=0.1), when=when & Interrupted())
    with pytest.raises(KeyboardInterrupt):
        make_step(opt, lambda: p.square().sum())
    assert when.mean == 0.0


def test_skipped_step_does_not_change_the_running_norm() -> None:
    p, when = nn.Parameter(torch.ones(2)), wsam.schedule.NormAbove()
    opt = wsam.SAM(torch.optim.SGD([p], lr=0.1), when=when, nonfinite="skip")
    passes: list[int] = []

    def overflows() -> Tensor:
        passes.append(1)
        loss = p.square().sum() * (math.inf if len(passes) == 2 else 1.0)
        loss.backward()
        return loss

    opt.step(overflows)
    assert opt.skipped == 1
    assert opt.when is when
    assert when.mean == 0.0


def test_custom_interval_is_not_copied() -> None:
    """It may hold what cannot be copied, such as the optimizer itself."""

    class Own(wsam.schedule.Interval):
        needs_norm = True

        def chosen(self, step: int, norm: Callable[[], float]) -> bool:
            self.opt.state_dict()
            return norm() > 0

    p, when = nn.Parameter(torch.ones(2)), Own()
    when.opt = opt = wsam.SAM(torch.optim.SGD([p], lr=0.1), when=when)
    make_step(opt, lambda: p.square().sum())
    assert opt.when is when


# --- steps outside the interval --------------------------------------------------------------------

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


def losses(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 6, generator=generator), torch.randint(3, (12,), generator=generator)
    return nn.functional.cross_entropy(model(x), y, reduction="none")


class Twins:
    """A method with an interval and, for each of its steps, a plain base in the same state."""

    def __init__(self, name: str, base: str, when: Interval) -> None:
        self.base_name = base
        self.model = network()
        self.opt = make_method(name, BASES[base](self.model.parameters()), when=when)
        self.passes = 0

    def step(self, number: int, style: str = "closure") -> tuple[bool, Tensor, Tensor]:
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
                [*self.model.state_dict().values(), *state_tensors(self.opt)],
                [*plain.state_dict().values(), *state_tensors(base)],
                strict=True,
            )
        )
        if style != "two_step":  # without begin() both passes draw
            same = same and torch.equal(end, torch.get_rng_state())
        return same, ours, loss.detach()


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [v for p in params for v in optimizer.state[p].values() if isinstance(v, Tensor)]


@covering(name=[name for name in METHODS if name != "looksam"], base=list(BASES))
def test_steps_outside_the_interval_are_bitwise_the_base(name: str, base: str) -> None:
    """Weights, statistics, optimizer state, generator and loss; one pass per step."""
    twins = Twins(name, base, Every(3))
    for number in range(7):
        same, ours, plain = twins.step(number)
        assert same == (number % 3 != 0), number
        assert twins.passes == (2 if number % 3 == 0 else 1)
        assert torch.equal(ours, plain)
        assert twins.opt.sharpness is not None
        assert bool(twins.opt.sharpness.isnan()) == (number % 3 != 0)
    assert twins.opt.param_groups[0]["sam_step"] == 7


@covering(kind=list(INTERVALS), style=STYLES)
def test_steps_outside_the_interval_by_style(kind: str, style: str) -> None:
    """In a loop by hand the second pass may run nevertheless, without any effect."""
    when = copy.deepcopy(INTERVALS[kind])
    twins = Twins("wsam", "momentum", when)
    seen = [twins.step(number, style)[0] for number in range(8)]
    assert any(seen)
    assert not all(seen)
    if kind == "last part":
        assert seen == [True] * 4 + [False] * 4
    if kind == "both":
        assert seen == [number % 2 == 1 or number < 3 for number in range(8)]


def test_interval_is_resumed() -> None:
    """After four steps of `Every(3)`, the third one is perturbed."""
    twins = Twins("sam", "momentum", Every(3))
    for number in range(4):
        twins.step(number)
    again = Twins("sam", "momentum", Every(3))
    again.model.load_state_dict(twins.model.state_dict())
    again.opt.load_state_dict(twins.opt.state_dict())
    assert [again.step(number)[0] for number in range(4, 8)] == [True, True, False, True]
