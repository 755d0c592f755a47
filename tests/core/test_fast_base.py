"""On a CPU a base that was left to choose steps by torch's fused code, and to the same numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wsam
from wsam.bases import _can_be_fused
from wsam.schedule import Every

BASES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **more: torch.optim.SGD(p, lr=0.1, **more),
    "momentum": lambda p, **more: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01, **more
    ),
    "nesterov": lambda p, **more: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **more),
    "maximize": lambda p, **more: torch.optim.SGD(p, lr=0.01, momentum=0.9, maximize=True, **more),
    "adam": lambda p, **more: torch.optim.Adam(p, lr=0.01, weight_decay=0.01, **more),
    "amsgrad": lambda p, **more: torch.optim.Adam(p, lr=0.01, amsgrad=True, **more),
    "adamw": lambda p, **more: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, **more),
}
KERNELS = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_")
STEPS = 6


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch's fused code is called for."""
    calls: list[str] = []

    def counted(name: str, own: Any) -> Any:
        return lambda *given, **more: (calls.append(name), own(*given, **more))[1]

    for name in KERNELS:
        monkeypatch.setattr(torch, name, counted(name, getattr(torch, name)))
    return calls


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 7, 3, bias=False),
        nn.BatchNorm2d(7),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(7 * 36, 4),
    )
    return nn.Sequential(*layers).to(dtype).to(memory_format=torch.channels_last)


def train(
    model: nn.Module, opt: torch.optim.Optimizer, steps: int = STEPS, by_hand: bool = False
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        x = torch.randn(5, 3, 8, 8, generator=generator).to(dtype)

        def closure(x: Tensor = x) -> Tensor:
            loss = model(x).square().mean().log()
            loss.backward()
            return loss

        if by_hand:
            opt.zero_grad()
            closure()
            opt.step()
        else:
            opt.step(closure)
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("base", BASES)
def test_the_same_numbers(base: str, lean: bool, fused: list[str]) -> None:
    models = [network(), network()]
    chosen = {"foreach": False}
    bases = [BASES[base](models[0].parameters(), **chosen), BASES[base](models[1].parameters())]
    opts = [wsam.WSAM(b, model=m, lean=lean) for b, m in zip(bases, models, strict=True)]
    slow = train(models[0], opts[0])
    assert not fused, "whoever has chosen gets that"
    fast = train(models[1], opts[1])
    # The first step makes the base's state, as it always does.
    assert len(fused) == (STEPS if base == "sgd" else STEPS - 1)
    for a, b in zip(slow, fast, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)
    assert all(group["fused"] is None for group in bases[1].param_groups)
    names = [state.keys() for state in bases[0].state.values()]
    assert names == [state.keys() for state in bases[1].state.values()]


def test_steps_of_the_base_alone_are_its_own(fused: list[str]) -> None:
    """Bit for bit: the interval's other steps, and a radius of zero."""
    options: list[dict[str, Any]] = [{"when": Every(100, offset=99)}, {"rho": 0.0}]
    plain = network()
    wanted = train(plain, BASES["momentum"](plain.parameters()), by_hand=True)
    for more in options:
        model = network()
        opt = wsam.WSAM(BASES["momentum"](model.parameters()), model=model, **more)
        assert all(map(torch.equal, wanted, train(model, opt)))
    assert not fused


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore::wsam.WsamWarning")
def test_half_precision_is_left_alone(dtype: torch.dtype, fused: list[str]) -> None:
    model = nn.Linear(4, 4).to(dtype)
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    opt.step(closure_of(model, torch.ones(2, 4, dtype=dtype)))
    assert not fused


def closure_of(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return closure


def test_another_layout_is_left_alone(fused: list[str]) -> None:
    """torch's fused code walks through memory without looking how it is laid out."""
    models = [nn.Linear(4, 3).double(), nn.Linear(4, 3).double()]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(2, 4, dtype=torch.float64)
    for model in models:
        base = torch.optim.SGD(
            model.parameters(), lr=0.1, foreach=None if model is models[1] else False
        )
        opt = wsam.SAM(base, model=model)
        inner = closure_of(model, x)

        def closure(inner: Any = inner, model: nn.Module = model) -> Tensor:
            loss = inner()
            grad = model.weight.grad
            assert isinstance(grad, Tensor)
            model.weight.grad = grad.t().contiguous().t()
            return loss

        for _ in range(3):
            opt.step(closure)
    assert not fused
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_weight_that_comes_late_waits_for_its_momentum(fused: list[str]) -> None:
    """torch's fused code cannot begin with some momenta there and some not."""
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(2, 4, dtype=torch.float64)
    for model, foreach in zip(models, (False, None), strict=True):
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=foreach)
        opt = wsam.WSAM(base, model=model)
        model[1].requires_grad_(False)
        for step in range(6):
            if step == 3:
                model[1].requires_grad_(True)
            opt.step(closure_of(model, x))
    assert len(fused) == 4, "not in the first step, nor in that of the latecomers"
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-10, atol=1e-12)


def test_what_else_is_left_to_the_base(fused: list[str]) -> None:
    class Own(torch.optim.SGD):
        """A base of one's own."""

    model = nn.Linear(4, 4)
    bases = [
        Own(model.parameters(), lr=0.1),
        torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1)),
        torch.optim.SGD(model.parameters(), lr=0.1, differentiable=False, foreach=True),
        torch.optim.RMSprop(model.parameters(), lr=0.1),
    ]
    for base in bases:
        opt = wsam.WSAM(base, model=model)
        for _ in range(2):
            opt.step(closure_of(model, torch.ones(2, 4)))
    assert not fused


def test_a_step_that_fails_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = wsam.WSAM(base, model=model)

    def fail(*given: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(torch, "_fused_sgd_", fail)
        with pytest.raises(KeyboardInterrupt):
            opt.step(closure_of(model, torch.ones(2, 4)))
    assert base.param_groups[0]["fused"] is None
    opt.step(closure_of(model, torch.ones(2, 4)))


def fits(changed: Callable[[torch.optim.Optimizer], None], **options: Any) -> bool:
    """Whether fused code may step a base to which something was done."""
    model = nn.Linear(4, 4)
    base = torch.optim.Adam(model.parameters(), **options)
    closure_of(model, torch.ones(2, 4))()
    base.step()
    changed(base)
    (group,) = base.param_groups
    return _can_be_fused(base, group)


class Own(nn.Parameter):
    """A parameter of a class of its own."""


def replace_steps(base: torch.optim.Optimizer) -> None:
    for state in base.state.values():
        state["step"] = state["step"].double()


def replace_means(base: torch.optim.Optimizer) -> None:
    for state in base.state.values():
        state["exp_avg"] = state["exp_avg"].double()


def replace_a_parameter(base: torch.optim.Optimizer) -> None:
    (group,) = base.param_groups
    old = group["params"][0]
    new = Own(old.detach())
    new.grad, base.state[new] = old.grad, base.state.pop(old)
    group["params"][0] = new


def spread_out(base: torch.optim.Optimizer) -> None:
    """Let a weight, its gradient and its state take every other place of their memory."""
    (group,) = base.param_groups
    p = group["params"][1]

    def spread(t: Tensor) -> Tensor:
        return torch.stack((t, t), -1)[..., 0]

    state = base.state[p]
    gradient = spread(p.grad)
    p.grad = None
    p.data = spread(p.detach())
    p.grad = gradient
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = spread(state[name])


@pytest.mark.parametrize(
    "changed",
    [replace_steps, replace_means, replace_a_parameter, spread_out],
    ids=lambda f: f.__name__,
)
def test_what_fused_code_cannot_walk_over(changed: Any) -> None:
    assert fits(lambda base: None)
    assert not fits(changed)


def test_what_is_differentiated_or_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    base = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    (group,) = base.param_groups
    assert _can_be_fused(base, group)
    assert not _can_be_fused(base, group | {"differentiable": True})
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not _can_be_fused(base, group)


def grow(base: torch.optim.Optimizer) -> None:
    """Add a row to a weight and its gradient, but not to the state."""
    p = base.param_groups[0]["params"][0]
    gradient, p.grad = p.grad, None
    p.data = torch.cat((p.detach(), torch.zeros(1, 4)))
    p.grad = torch.cat((gradient, torch.zeros(1, 4)))


def forget_a_mean(base: torch.optim.Optimizer) -> None:
    state = base.state[base.param_groups[0]["params"][0]]
    state["own"] = state.pop("exp_avg")


def count_by_numbers(base: torch.optim.Optimizer) -> None:
    for state in base.state.values():
        state["step"] = 1.0


def listen(base: torch.optim.Optimizer) -> None:
    base.register_step_pre_hook(lambda *given: None)


def patch(base: torch.optim.Optimizer) -> None:
    own = base.step
    base.step = own  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "changed", [grow, forget_a_mean, count_by_numbers, listen, patch], ids=lambda f: f.__name__
)
def test_what_fused_code_does_not_look_at(changed: Any) -> None:
    """Sizes, missing state, and what others do to gradients once the step has begun."""
    assert not fits(changed)


def test_a_scheduler_of_the_base_does_not_matter() -> None:
    assert fits(lambda base: torch.optim.lr_scheduler.StepLR(base, 1) and None)


def test_a_momentum_of_another_size_is_refused_as_ever() -> None:
    model = nn.Linear(4, 4)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = wsam.WSAM(base, model=model)
    opt.step(closure_of(model, torch.ones(2, 4)))
    model.weight.data = torch.cat((model.weight.detach(), torch.zeros(3, 4)))
    model.bias.data = torch.zeros(7)
    with pytest.raises(RuntimeError, match="size of tensor"):
        opt.step(closure_of(model, torch.ones(2, 4)))


def test_hooks_of_the_base_may_replace_gradients(fused: list[str]) -> None:
    found = []
    for foreach in (None, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 4, bias=False).double()
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=foreach)

        def orthogonal(base: Any, *given: Any, model: nn.Linear = model) -> None:
            assert model.weight.grad is not None
            model.weight.grad = torch.linalg.qr(model.weight.grad).Q

        base.register_step_pre_hook(orthogonal)
        opt = wsam.SAM(base, model=model)
        for _ in range(3):
            opt.step(closure_of(model, torch.eye(4, dtype=torch.float64)))
        found.append(model.weight.detach())
    assert torch.equal(*found)
    assert not fused
