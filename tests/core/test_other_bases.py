"""Bases of other libraries, that save in ways of their own: nothing of them is lost, or it is said."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import PROBLEMS, make_step, parameters, same, snapshot, torch_base, train
from test_state_dict import through_a_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from workers.pair import team
from workers.problem import net, share

import wsam

MLP = PROBLEMS["mlp"]
HALF = 3
State = dict[str, Any]
MakeBase = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Beside(torch.optim.SGD):
    """Keeps a number of its own, by which its rate falls, and saves it beside its state."""

    seen = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.seen += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / self.seen
        return super().step(closure)

    def state_dict(self) -> State:
        return {**super().state_dict(), "seen": self.seen}

    def load_state_dict(self, state_dict: State) -> None:
        super().load_state_dict(state_dict)
        self.seen = state_dict["seen"]


class Nested(torch.optim.SGD):
    """Saves its groups and its state one floor deeper, as wrappers of optimizers do."""

    def state_dict(self) -> State:
        return {"inner": super().state_dict()}

    def load_state_dict(self, state_dict: State) -> None:
        super().load_state_dict(state_dict["inner"])


class Momenta(torch.optim.SGD):
    """Saves momentum alone, and no groups at all."""

    def state_dict(self) -> State:
        held = [p for group in self.param_groups for p in group["params"]]
        return {"momenta": [self.state[p].get("momentum_buffer") for p in held]}

    def load_state_dict(self, state_dict: State) -> None:
        held = [p for group in self.param_groups for p in group["params"]]
        for p, momentum in zip(held, state_dict["momenta"], strict=True):
            self.state[p]["momentum_buffer"] = momentum


class Chosen(torch.optim.SGD):
    """Saves of its groups what it knows itself."""

    def state_dict(self) -> State:
        state = super().state_dict()
        known = ("params", *self.defaults)
        groups = [{k: group[k] for k in known} for group in state["param_groups"]]
        return {"state": state["state"], "param_groups": groups}


class Merging(torch.optim.SGD):
    """Takes from a state's groups what it knows itself."""

    def load_state_dict(self, state_dict: State) -> None:
        groups = [dict(group) for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, mine in zip(self.param_groups, groups, strict=True):
            group.update({k: v for k, v in mine.items() if k not in self.defaults})


OWN = [Beside, Nested, Momenta, Chosen, Merging]


def momentum(kind: type[torch.optim.SGD]) -> MakeBase:
    return lambda params: kind(
        [{"params": params[:2], "rho": 0.2}, {"params": params[2:]}], lr=0.05, momentum=0.9
    )


def resumes(make: MakeBase) -> None:
    """Half a run, saved and loaded by another optimizer, ends as the whole one, to the bit."""

    def build(w: list[torch.Tensor]) -> tuple[list[nn.Parameter], wsam.SharpnessAware]:
        params = parameters(w)
        # A schedule shows whether the steps' number is lost.
        return params, wsam.SAM(make(params), rho=wsam.schedule.InverseSqrt(0.3))

    params, opt = build(MLP.weights())
    train(opt, params, MLP, range(HALF))
    other, resumed = build([p.detach().clone() for p in params])
    resumed.load_state_dict(through_a_file(opt.state_dict()))
    for ours, one in ((params, opt), (other, resumed)):
        torch.manual_seed(0)  # for bases that throw dice
        train(one, ours, MLP, range(HALF, 2 * HALF))
    assert same(snapshot(resumed), snapshot(opt))
    assert all(group["sam_step"] == 2 * HALF for group in resumed.param_groups)


@pytest.mark.parametrize("kind", OWN)
def test_a_base_that_saves_in_its_own_way_resumes_bitwise(kind: type[torch.optim.SGD]) -> None:
    resumes(momentum(kind))


@pytest.mark.parametrize("kind", OWN)
def test_a_base_that_saves_in_its_own_way_loads_the_state_alone(
    kind: type[torch.optim.SGD],
) -> None:
    params = parameters(MLP.weights())
    opt = wsam.SAM(momentum(kind)(params))
    train(opt, params, MLP, range(HALF))
    alone = kind([{"params": params[:2]}, {"params": params[2:]}], lr=0.3, momentum=0.9)
    alone.load_state_dict(through_a_file(opt.state_dict()))
    assert same([alone.state[p] for p in params], [opt.state[p] for p in params])


@pytest.mark.parametrize("kind", OWN)
def test_the_state_of_such_a_base_alone_loads(kind: type[torch.optim.SGD]) -> None:
    params = parameters(MLP.weights())
    alone = kind([{"params": params[:2]}, {"params": params[2:]}], lr=0.05, momentum=0.9)
    MLP.losses(params, 0).mean().backward()
    alone.step()
    opt = wsam.SAM(momentum(kind)(params), rho=0.1)
    opt.load_state_dict(through_a_file(alone.state_dict()))
    assert same([alone.state[p] for p in params], [opt.state[p] for p in params])
    assert [group["sam_rho"] for group in opt.param_groups] == [0.2, 0.1]
    train(opt, params, MLP, range(1, 2))


@pytest.mark.parametrize("kind", OWN)
def test_loading_does_not_tie_such_a_base_to_the_source(kind: type[torch.optim.SGD]) -> None:
    params, theirs = parameters(MLP.weights()), parameters(MLP.weights())
    source = wsam.SAM(momentum(kind)(theirs))
    train(source, theirs, MLP, range(2))
    state = source.state_dict()
    kept = copy.deepcopy(state)
    opt = wsam.SAM(momentum(kind)(params))
    opt.load_state_dict(state)
    train(opt, params, MLP, range(2))
    assert same(state, kept)


class Split(torch.optim.SGD):
    """Saves its groups as one."""

    def state_dict(self) -> State:
        state = super().state_dict()
        held = [index for group in state["param_groups"] for index in group["params"]]
        return {
            "state": state["state"],
            "param_groups": [{**state["param_groups"][0], "params": held}],
        }


def test_a_base_that_saves_another_number_of_groups_has_our_values_beside() -> None:
    opt = wsam.SAM(momentum(Split)(parameters(MLP.weights())), rho=0.1)
    values = opt.state_dict()["sharpness"]["values"]
    assert [group["sam_rho"] for group in values] == [0.2, 0.1]


@pytest.mark.parametrize("kind", [Nested, Momenta])
def test_the_state_of_another_model_is_refused(kind: type[torch.optim.SGD]) -> None:
    """Though the base's own format does not tell, and before anything is changed."""

    def build(*groups: list[tuple[int, ...]]) -> wsam.SharpnessAware:
        made = [{"params": [nn.Parameter(torch.ones(s)) for s in shapes]} for shapes in groups]
        return wsam.SAM(kind(made, lr=0.1, momentum=0.9))

    opt = build([(2, 3), (3,)])
    before = snapshot(opt)
    for other in (build([(3, 2), (3,)]), build([(2, 3)]), build([(2, 3)], [(3,)])):
        with pytest.raises(ValueError, match=r"shape|group"):
            opt.load_state_dict(other.state_dict())
        assert same(snapshot(opt), before)


@pytest.mark.parametrize("values", [[{}], {"sam_rho": 1.0}, [{"sam_rho": -1.0}, {}]])
def test_damaged_values_change_nothing(values: Any) -> None:
    opt = wsam.SAM(momentum(Momenta)(parameters(MLP.weights())))
    state, before = opt.state_dict(), snapshot(opt)
    state["sharpness"]["values"] = values
    with pytest.raises(ValueError, match=r"damaged|rho"):
        opt.load_state_dict(state)
    assert same(snapshot(opt), before)


def test_the_state_of_another_base_is_refused_in_words() -> None:
    params = parameters(MLP.weights())
    plain = wsam.SAM(torch_base("momentum", [{"params": params[:2]}, {"params": params[2:]}]))
    opt = wsam.SAM(momentum(Nested)(params))
    with pytest.raises(ValueError, match="Nested finds no 'inner' in the state_dict"):
        opt.load_state_dict(plain.state_dict())


@pytest.mark.parametrize(
    ("saves", "error"), [(["a", "list"], TypeError), ({"sharpness": 1}, ValueError)]
)
def test_a_format_that_cannot_carry_ours_is_refused(saves: Any, error: type[Exception]) -> None:
    class Odd(torch.optim.SGD):
        def state_dict(self) -> Any:
            return saves

    with pytest.raises(error, match=r"Odd\.state_dict\(\)"):
        wsam.SAM(Odd(parameters(MLP.weights()), lr=0.1)).state_dict()


@pytest.mark.parametrize("kind", [torch.optim.SGD, Beside, Nested])
def test_hooks_of_both_run_once(kind: type[torch.optim.SGD]) -> None:
    """What a hook of the base adds travels along, to a hook of the base that loads it."""
    opt = wsam.SAM(momentum(kind)(parameters(MLP.weights())))
    heard: list[Any] = []
    opt.register_state_dict_pre_hook(lambda one: heard.append(("before", one)))
    opt.register_state_dict_post_hook(lambda one, state: heard.append(("after", one)))
    opt.register_state_dict_post_hook(lambda one, state: {**state, "more": 1})
    if kind is not Nested:  # whose own state is one floor deeper
        opt.base.register_state_dict_post_hook(lambda _, state: {**state, "of_base": 2})
        opt.base.register_load_state_dict_pre_hook(lambda _, state: heard.append(state["of_base"]))
    state = opt.state_dict()
    assert heard == [("before", opt), ("after", opt)]
    assert state["more"] == 1
    opt.load_state_dict(state)
    assert heard[2:] == ([] if kind is Nested else [2])


def test_the_state_over_a_base_of_torch_is_what_it_was() -> None:
    params = parameters(MLP.weights())
    opt = wsam.SAM(torch_base("adam", params))
    train(opt, params, MLP, range(2))
    state, plain = opt.state_dict(), opt.base.state_dict()
    assert list(state) == ["state", "param_groups", "sharpness"]
    assert same(state["state"], plain["state"])
    assert same(state["param_groups"], plain["param_groups"])
    kept = {"shapes", "schedules", "interval", "interval_lost", "skipped", "rule"}
    assert set(state["sharpness"]) == kept


# --- shapes and types of a state ---------------------------------------------------------------


class RowWise(torch.optim.Optimizer):
    """Has a second moment for each row, under the name that torch uses for one of each weight."""

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


def test_a_state_of_other_shapes_than_torch_has_resumes() -> None:
    resumes(lambda params: RowWise(params, lr=0.01))


@pytest.mark.parametrize("base", ["momentum", "adam"])
def test_a_plain_state_of_another_model_is_still_refused(base: str) -> None:
    """It does not say the shapes of its weights: torch's momentum does."""
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
def test_counters_of_a_weight_alone_keep_their_type(shape: tuple[int, ...], kind: Any) -> None:
    p = nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
    opt = wsam.SAM(kind([p], lr=0.01), rho=0.3)
    for _ in range(2):
        make_step(opt, lambda: p.float().square().sum())
    q = nn.Parameter(p.detach().clone())
    other = wsam.SAM(kind([q], lr=0.01), rho=0.3)
    other.load_state_dict(through_a_file(opt.state_dict()))
    assert same(dict(other.state[q]), dict(opt.state[p]))


@pytest.mark.filterwarnings("ignore::wsam.WsamWarning")
def test_momentum_of_a_weight_alone_takes_the_type_of_the_weight() -> None:
    p, q = (nn.Parameter(torch.ones(1, dtype=t)) for t in (torch.float32, torch.bfloat16))
    opt, other = wsam.SAM(torch.optim.NAdam([p])), wsam.SAM(torch.optim.NAdam([q]))
    make_step(opt, lambda: p.square().sum())
    other.load_state_dict(opt.state_dict())
    assert other.state[q]["exp_avg"].dtype == torch.bfloat16
    assert other.state[q]["mu_product"].dtype == torch.float32


# --- other libraries ---------------------------------------------------------------------------


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


PEERS: dict[str, Callable[[Any, list[nn.Parameter]], torch.optim.Optimizer]] = {
    "StableSPAM": lambda peer, params: peer.StableSPAM(params, lr=0.01),
    "Lookahead": lambda peer, params: peer.Lookahead(sgd(params), k=2),
    "Magma": lambda peer, params: peer.Magma(sgd(params)),
    "TRAC": lambda peer, params: peer.TRAC(sgd(params)),
    "Nero": lambda peer, params: peer.Nero(params, lr=0.01),
    "Amos": lambda peer, params: peer.Amos(params, lr=0.01),
    "SPAM": lambda peer, params: peer.SPAM(params, lr=0.01),
    "SARA": lambda peer, params: peer.load_optimizer("sara")(params, lr=0.01),
}


@pytest.mark.parametrize("name", PEERS)
def test_bases_of_pytorch_optimizer_resume_bitwise(name: str) -> None:
    peer = pytest.importorskip("pytorch_optimizer")
    resumes(lambda params: PEERS[name](peer, params))


def resume_with_shared_state() -> list[bool]:
    """Save half a run on rank 0, load it on both; say whether both runs end the same."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns of torch.jit

    def build() -> tuple[nn.Module, wsam.SharpnessAware]:
        model = DDP(net())
        base = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        return model, wsam.WSAM(base, rho=0.1, model=model)

    def go(model: nn.Module, opt: wsam.SharpnessAware, steps: range) -> None:
        for t in steps:
            make_step(opt, lambda t=t: model(share(t, dist.get_rank())).square().mean())

    model, opt = build()
    go(model, opt, range(HALF))
    opt.base.consolidate_state_dict(to=0)
    saved = [opt.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved, src=0)
    other, resumed = build()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(saved[0])
    go(model, opt, range(HALF, 2 * HALF))
    go(other, resumed, range(HALF, 2 * HALF))
    moments = len(saved[0]["state"]) == len(list(model.parameters()))
    return [moments, same(list(model.parameters()), list(other.parameters()))]


def test_a_state_that_ranks_share_out_resumes_bitwise() -> None:
    assert team().run(resume_with_shared_state) == [[True, True]] * 2
