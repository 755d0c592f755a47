"""On a CPU the base steps by torch's fused code where the user left that open, with the same result."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wsam
from wsam.accel.base_optimizers import can_step_fused
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
FUSED = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_")
STEPS = 5


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of torch's fused code."""
    calls: list[str] = []

    def counted(name: str, own: Any) -> Any:
        return lambda *given, **more: (calls.append(name), own(*given, **more))[1]

    for name in FUSED:
        monkeypatch.setattr(torch, name, counted(name, getattr(torch, name)))
    return calls


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 7, 3, bias=False),
        nn.BatchNorm2d(7),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(7 * 36, 4),
    )
    return nn.Sequential(*layers).double().to(memory_format=torch.channels_last)


def train(model: nn.Module, opt: torch.optim.Optimizer, plain: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(5, 3, 8, 8, generator=generator).double()

        def closure(x: Tensor = x) -> Tensor:
            loss = model(x).square().mean().log()
            loss.backward()
            return loss

        if plain:
            opt.zero_grad()
            closure()
            opt.step()
        else:
            opt.step(closure)
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


def closure_of(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return closure


# Steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "lean"), [*((base, False) for base in BASES), ("momentum", True), ("adamw", True)]
)
def test_fused_steps_equal_the_others(base: str, lean: bool, fused: list[str]) -> None:
    models = [network(), network()]
    bases = [
        BASES[base](models[0].parameters(), foreach=False),
        BASES[base](models[1].parameters()),
    ]
    form: dict[str, Any] = {"lean": True, "precondition": False} if lean else {}
    opts = [wsam.WSAM(b, model=m, **form) for b, m in zip(bases, models, strict=True)]
    slow = train(models[0], opts[0])
    assert not fused, "the user chose foreach=False"
    fast = train(models[1], opts[1])
    # The base creates its state in the first step.
    assert len(fused) == (STEPS if base == "sgd" else STEPS - 1)
    for a, b in zip(slow, fast, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)
    assert opts[1].lean is lean
    assert all(group["fused"] is None for group in bases[1].param_groups)
    names = [state.keys() for state in bases[0].state.values()]
    assert names == [state.keys() for state in bases[1].state.values()]


def test_steps_of_the_base_alone_are_not_fused(fused: list[str]) -> None:
    """They equal the plain base's bit for bit: between intervals, with rho = 0 and with gamma = 0."""
    options: list[dict[str, Any]] = [
        {"when": Every(100, offset=99)},
        {"rho": 0.0},
        {"gamma": 0.0},
    ]
    plain = network()
    wanted = train(plain, BASES["momentum"](plain.parameters()), plain=True)
    for more in options:
        model = network()
        opt = wsam.WSAM(BASES["momentum"](model.parameters()), model=model, **more)
        assert all(map(torch.equal, wanted, train(model, opt)))
    assert not fused


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore::wsam.WsamWarning")
def test_half_precision_is_not_fused(dtype: torch.dtype, fused: list[str]) -> None:
    model = nn.Linear(4, 4).to(dtype)
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    opt.step(closure_of(model, torch.ones(2, 4, dtype=dtype)))
    assert not fused


def test_gradients_with_other_strides_are_not_fused(fused: list[str]) -> None:
    """torch's fused code assumes the strides of the weight and does not check them."""
    models = [nn.Linear(4, 3).double(), nn.Linear(4, 3).double()]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(2, 4, dtype=torch.float64)
    for model, foreach in zip(models, (False, None), strict=True):
        opt = wsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach), model=model)
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


def test_a_parameter_without_momentum_yet(fused: list[str]) -> None:
    """torch's fused code needs the momenta of all parameters or of none."""
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
    assert len(fused) == 4, "all but step 0 and step 3, when the second layer is unfrozen"
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-10, atol=1e-12)


def test_bases_that_are_not_fused(fused: list[str]) -> None:
    class Subclass(torch.optim.SGD):
        """May override anything."""

    model = nn.Linear(4, 4)
    bases = [
        Subclass(model.parameters(), lr=0.1),
        torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1)),
        torch.optim.SGD(model.parameters(), lr=0.1, foreach=True),
        torch.optim.RMSprop(model.parameters(), lr=0.1),
    ]
    for base in bases:
        opt = wsam.WSAM(base, model=model)
        for _ in range(2):
            opt.step(closure_of(model, torch.ones(2, 4)))
    assert not fused


def test_an_interrupted_step_resets_the_fused_option(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_momentum_of_another_size_is_an_error() -> None:
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

        def orthogonalize(base: Any, *given: Any, model: nn.Linear = model) -> None:
            assert model.weight.grad is not None
            model.weight.grad = torch.linalg.qr(model.weight.grad).Q

        base.register_step_pre_hook(orthogonalize)
        opt = wsam.SAM(base, model=model)
        for _ in range(3):
            opt.step(closure_of(model, torch.eye(4, dtype=torch.float64)))
        found.append(model.weight.detach())
    assert torch.equal(*found)
    assert not fused


# `can_step_fused` -----------------------------------------------------------------------------------


def fits(change: Callable[[torch.optim.Optimizer], None]) -> bool:
    """Return `can_step_fused` of Adam after a step and a change."""
    model = nn.Linear(4, 4)
    base = torch.optim.Adam(model.parameters())
    closure_of(model, torch.ones(2, 4))()
    base.step()
    change(base)
    (group,) = base.param_groups
    return can_step_fused(base, group)


def test_bases_that_can_step_fused() -> None:
    assert fits(lambda base: None)
    assert fits(lambda base: torch.optim.lr_scheduler.StepLR(base, 1) and None)


class Subclass(nn.Parameter):
    """A parameter of another class."""


def counts_in_double(base: torch.optim.Optimizer) -> None:
    for state in base.state.values():
        state["step"] = state["step"].double()


def counts_as_numbers(base: torch.optim.Optimizer) -> None:
    for state in base.state.values():
        state["step"] = 1.0


def means_in_double(base: torch.optim.Optimizer) -> None:
    for state in base.state.values():
        state["exp_avg"] = state["exp_avg"].double()


def missing_mean(base: torch.optim.Optimizer) -> None:
    state = base.state[base.param_groups[0]["params"][0]]
    state["own"] = state.pop("exp_avg")


def parameter_of_a_subclass(base: torch.optim.Optimizer) -> None:
    (group,) = base.param_groups
    old = group["params"][0]
    new = Subclass(old.detach())
    new.grad, base.state[new] = old.grad, base.state.pop(old)
    group["params"][0] = new


def not_dense(base: torch.optim.Optimizer) -> None:
    """Give a weight, its gradient and its state a stride of 2."""
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


def larger_than_its_state(base: torch.optim.Optimizer) -> None:
    p = base.param_groups[0]["params"][0]
    gradient, p.grad = p.grad, None
    p.data = torch.cat((p.detach(), torch.zeros(1, 4)))
    p.grad = torch.cat((gradient, torch.zeros(1, 4)))


def hooked(base: torch.optim.Optimizer) -> None:
    base.register_step_pre_hook(lambda *given: None)


def patched(base: torch.optim.Optimizer) -> None:
    own = base.step
    base.step = own  # type: ignore[method-assign]


CHANGES = [
    counts_in_double,
    counts_as_numbers,
    means_in_double,
    missing_mean,
    parameter_of_a_subclass,
    not_dense,
    larger_than_its_state,
    hooked,
    patched,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_states_that_fused_code_would_misread(change: Any) -> None:
    assert not fits(change)


def test_differentiable_and_compiled_steps_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    base = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    (group,) = base.param_groups
    assert can_step_fused(base, group)
    assert not can_step_fused(base, group | {"differentiable": True})
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not can_step_fused(base, group)
