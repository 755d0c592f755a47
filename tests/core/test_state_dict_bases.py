"""States of bases with their own formats, as those of other libraries: nothing is lost silently."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    PROBLEMS,
    make_step,
    parameters,
    same,
    save_and_load,
    snapshot,
    torch_base,
    train,
)
from torch import nn

import wsam

MLP = PROBLEMS["mlp"]
HALF = 3
State = dict[str, Any]
MakeBase = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class ExtraEntry(torch.optim.SGD):
    """Saves a counter, which its learning rate depends on, as a separate entry."""

    count = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / self.count
        return super().step(closure)

    def state_dict(self) -> State:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: State) -> None:
        super().load_state_dict(state_dict)
        self.count = state_dict["count"]


class Nested(torch.optim.SGD):
    """Saves its groups and state in a nested dict, as wrappers of optimizers do."""

    def state_dict(self) -> State:
        return {"inner": super().state_dict()}

    def load_state_dict(self, state_dict: State) -> None:
        super().load_state_dict(state_dict["inner"])


class MomentumOnly(torch.optim.SGD):
    """Saves momentum, and no groups."""

    def state_dict(self) -> State:
        held = [p for group in self.param_groups for p in group["params"]]
        return {"momenta": [self.state[p].get("momentum_buffer") for p in held]}

    def load_state_dict(self, state_dict: State) -> None:
        held = [p for group in self.param_groups for p in group["params"]]
        for p, momentum in zip(held, state_dict["momenta"], strict=True):
            self.state[p]["momentum_buffer"] = momentum


class SavesOwnKeys(torch.optim.SGD):
    """Saves only the group keys that it defines."""

    def state_dict(self) -> State:
        state = super().state_dict()
        known = ("params", *self.defaults)
        groups = [{k: group[k] for k in known} for group in state["param_groups"]]
        return {"state": state["state"], "param_groups": groups}


class LoadsOwnKeys(torch.optim.SGD):
    """Loads only the group keys that it defines."""

    def load_state_dict(self, state_dict: State) -> None:
        groups = [dict(group) for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, mine in zip(self.param_groups, groups, strict=True):
            group.update({k: v for k, v in mine.items() if k not in self.defaults})


CUSTOM = [ExtraEntry, Nested, MomentumOnly, SavesOwnKeys, LoadsOwnKeys]


def momentum(kind: type[torch.optim.SGD]) -> MakeBase:
    return lambda params: kind(
        [{"params": params[:2], "sam_rho": 0.2}, {"params": params[2:]}], lr=0.05, momentum=0.9
    )


def check_resume(make: MakeBase) -> None:
    """A run that is saved and loaded half-way ends bitwise as an uninterrupted one."""

    def build(w: list[torch.Tensor]) -> tuple[list[nn.Parameter], wsam.SharpnessAware]:
        params = parameters(w)
        # A schedule shows whether the number of steps is lost.
        return params, wsam.SAM(make(params), rho=wsam.schedule.InverseSqrt(0.3))

    params, opt = build(MLP.weights())
    train(opt, params, MLP, range(HALF))
    other, resumed = build([p.detach().clone() for p in params])
    resumed.load_state_dict(save_and_load(opt.state_dict()))
    for ours, one in ((params, opt), (other, resumed)):
        torch.manual_seed(0)  # for bases that draw random numbers
        train(one, ours, MLP, range(HALF, 2 * HALF))
    assert same(snapshot(resumed), snapshot(opt))
    assert all(group["sam_step"] == 2 * HALF for group in resumed.param_groups)


@pytest.mark.parametrize("kind", CUSTOM)
def test_custom_format_resumes_bitwise(kind: type[torch.optim.SGD]) -> None:
    check_resume(momentum(kind))


@pytest.mark.parametrize("kind", CUSTOM)
def test_custom_format_is_loaded_by_the_plain_base(
    kind: type[torch.optim.SGD],
) -> None:
    params = parameters(MLP.weights())
    opt = wsam.SAM(momentum(kind)(params))
    train(opt, params, MLP, range(HALF))
    alone = kind([{"params": params[:2]}, {"params": params[2:]}], lr=0.3, momentum=0.9)
    alone.load_state_dict(save_and_load(opt.state_dict()))
    assert same([alone.state[p] for p in params], [opt.state[p] for p in params])


@pytest.mark.parametrize("kind", CUSTOM)
def test_custom_format_of_a_plain_base_loads(kind: type[torch.optim.SGD]) -> None:
    params = parameters(MLP.weights())
    alone = kind([{"params": params[:2]}, {"params": params[2:]}], lr=0.05, momentum=0.9)
    MLP.losses(params, 0).mean().backward()
    alone.step()
    opt = wsam.SAM(momentum(kind)(params), rho=0.1)
    opt.load_state_dict(save_and_load(alone.state_dict()))
    assert same([alone.state[p] for p in params], [opt.state[p] for p in params])
    assert [group["sam_rho"] for group in opt.param_groups] == [0.2, 0.1]
    train(opt, params, MLP, range(1, 2))


@pytest.mark.parametrize("kind", CUSTOM)
def test_load_no_alias_of_a_custom_format(kind: type[torch.optim.SGD]) -> None:
    params, theirs = parameters(MLP.weights()), parameters(MLP.weights())
    source = wsam.SAM(momentum(kind)(theirs))
    train(source, theirs, MLP, range(2))
    state = source.state_dict()
    kept = copy.deepcopy(state)
    opt = wsam.SAM(momentum(kind)(params))
    opt.load_state_dict(state)
    train(opt, params, MLP, range(2))
    assert same(state, kept)


class OneGroup(torch.optim.SGD):
    """Saves all groups as one."""

    def state_dict(self) -> State:
        state = super().state_dict()
        held = [index for group in state["param_groups"] for index in group["params"]]
        return {
            "state": state["state"],
            "param_groups": [{**state["param_groups"][0], "params": held}],
        }


def test_values_are_saved_separately_if_the_base_merges_groups() -> None:
    opt = wsam.SAM(momentum(OneGroup)(parameters(MLP.weights())), rho=0.1)
    values = opt.state_dict()["sharpness"]["values"]
    assert [group["sam_rho"] for group in values] == [0.2, 0.1]


@pytest.mark.parametrize("kind", [Nested, MomentumOnly])
def test_shape_mismatch_load_of_a_custom_format(kind: type[torch.optim.SGD]) -> None:
    """Rejected before anything changes, although the base's format has no shapes."""

    def build(*groups: list[tuple[int, ...]]) -> wsam.SharpnessAware:
        made = [{"params": [nn.Parameter(torch.ones(s)) for s in shapes]} for shapes in groups]
        return wsam.SAM(kind(made, lr=0.1, momentum=0.9))

    opt = build([(2, 3), (3,)])
    before = snapshot(opt)
    for other in (build([(3, 2), (3,)]), build([(2, 3)]), build([(2, 3)], [(3,)])):
        with pytest.raises(ValueError, match=r"shape|group"):
            opt.load_state_dict(other.state_dict())
        assert same(snapshot(opt), before)


def test_load_rejects_the_state_of_another_format() -> None:
    params = parameters(MLP.weights())
    plain = wsam.SAM(torch_base("momentum", [{"params": params[:2]}, {"params": params[2:]}]))
    opt = wsam.SAM(momentum(Nested)(params))
    with pytest.raises(KeyError, match="inner"):
        opt.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("kind", [torch.optim.SGD, ExtraEntry, Nested])
def test_state_dict_hooks_run_once(kind: type[torch.optim.SGD]) -> None:
    """Those of the optimizer and of its base; entries that they add are passed on."""
    opt = wsam.SAM(momentum(kind)(parameters(MLP.weights())))
    calls: list[Any] = []
    opt.register_state_dict_pre_hook(lambda one: calls.append(("before", one)))
    opt.register_state_dict_post_hook(lambda one, state: calls.append(("after", one)))
    opt.register_state_dict_post_hook(lambda one, state: {**state, "more": 1})
    if kind is not Nested:  # its state is nested
        opt.base.register_state_dict_post_hook(lambda _, state: {**state, "of_base": 2})
        opt.base.register_load_state_dict_pre_hook(lambda _, state: calls.append(state["of_base"]))
    state = opt.state_dict()
    assert calls == [("before", opt), ("after", opt)]
    assert state["more"] == 1
    opt.load_state_dict(state)
    assert calls[2:] == ([] if kind is Nested else [2])


def test_state_over_a_base_of_torch() -> None:
    params = parameters(MLP.weights())
    opt = wsam.SAM(torch_base("adam", params))
    train(opt, params, MLP, range(2))
    state, plain = opt.state_dict(), opt.base.state_dict()
    assert list(state) == ["state", "param_groups", "sharpness"]
    assert same(state["state"], plain["state"])
    assert same(state["param_groups"], plain["param_groups"])
    kept = {
        "shapes",
        "schedules",
        "interval",
        "interval_lost",
        "skipped",
        "rule",
        "base",
        "options",
    }
    assert set(state["sharpness"]) == kept


# --- shapes and types ------------------------------------------------------------------------------


class RowWise(torch.optim.Optimizer):
    """Has a second moment for each row, under the name that torch uses for elementwise ones."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                rows = p.grad.square().flatten(1).mean(1) if p.dim() > 1 else p.grad.square().mean()
                rows = rows.reshape(-1, *[1] * (p.dim() - 1)) if p.dim() > 1 else rows
                moment = self.state[p].setdefault("exp_avg_sq", torch.zeros_like(rows))
                moment.lerp_(rows, 0.1)
                p.addcdiv_(p.grad, moment.sqrt() + 1e-3, value=-group["lr"])


def test_state_tensors_of_other_shapes_resume() -> None:
    check_resume(lambda params: RowWise(params, lr=0.01))


class Counting(torch.optim.SGD):
    """A third-party base whose state has a number under a name of torch's counters."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["mu"] = self.state[p].get("mu", 0.0) + 0.5


def test_numbers_in_the_state_resume() -> None:
    check_resume(lambda params: Counting(params, lr=0.01, momentum=0.9))


@pytest.mark.parametrize("base", ["momentum", "adam"])
def test_shape_mismatch_load_of_a_plain_state(base: str) -> None:
    """It has no shapes of weights; those of torch's momentum are compared."""
    p, q = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3, 2))
    plain = torch_base(base, [p])
    p.grad = torch.ones(2, 3)
    plain.step()
    opt = wsam.SAM(torch_base(base, [q]))
    with pytest.raises(ValueError, match=r"shape \(2, 3\) in the state"):
        opt.load_state_dict(plain.state_dict())


@pytest.mark.filterwarnings("ignore::wsam.WsamWarning")
@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
@pytest.mark.parametrize("shape", [(1,), ()])
def test_bf16_load_keeps_counters_of_scalar_weights(shape: tuple[int, ...], kind: Any) -> None:
    p = nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
    opt = wsam.SAM(kind([p], lr=0.01), rho=0.3)
    for _ in range(2):
        make_step(opt, lambda: p.float().square().sum())
    q = nn.Parameter(p.detach().clone())
    other = wsam.SAM(kind([q], lr=0.01), rho=0.3)
    other.load_state_dict(save_and_load(opt.state_dict()))
    assert same(dict(other.state[q]), dict(opt.state[p]))


@pytest.mark.filterwarnings("ignore::wsam.WsamWarning")
def test_bf16_load_casts_momentum_of_scalar_weights() -> None:
    p, q = (nn.Parameter(torch.ones(1, dtype=t)) for t in (torch.float32, torch.bfloat16))
    opt, other = wsam.SAM(torch.optim.NAdam([p])), wsam.SAM(torch.optim.NAdam([q]))
    make_step(opt, lambda: p.square().sum())
    other.load_state_dict(opt.state_dict())
    assert other.state[q]["exp_avg"].dtype == torch.bfloat16
    assert other.state[q]["mu_product"].dtype == torch.float32


# --- other libraries -------------------------------------------------------------------------------


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


THIRD_PARTY: dict[str, Callable[[Any, list[nn.Parameter]], torch.optim.Optimizer]] = {
    "StableSPAM": lambda library, params: library.StableSPAM(params, lr=0.01),
    "Lookahead": lambda library, params: library.Lookahead(sgd(params), k=2),
    "Magma": lambda library, params: library.Magma(sgd(params)),
    "TRAC": lambda library, params: library.TRAC(sgd(params)),
    "Nero": lambda library, params: library.Nero(params, lr=0.01),
    "Amos": lambda library, params: library.Amos(params, lr=0.01),
    "SPAM": lambda library, params: library.SPAM(params, lr=0.01),
    "SARA": lambda library, params: library.load_optimizer("sara")(params, lr=0.01),
}


@pytest.mark.parametrize("name", THIRD_PARTY)
def test_bases_of_pytorch_optimizer_resume_bitwise(name: str) -> None:
    library = pytest.importorskip("pytorch_optimizer")
    check_resume(lambda params: THIRD_PARTY[name](library, params))
