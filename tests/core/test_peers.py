"""Methods of other papers: LookSAM, VaSSO, FriendlySAM, SAM-ON, and the threshold of AE-SAM."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import reference
import torch
from helpers import (
    BASES,
    PROBLEMS,
    STYLES,
    batch,
    closure,
    covering,
    gap,
    make_step,
    parameters,
    reference_base,
    same,
    save_and_load,
    small_model,
    snapshot,
    torch_base,
)
from reference import Method
from torch import Tensor, nn
from torch.func import functional_call

import wsam
from wsam._core.mix import G0, NOTHING, Scalar
from wsam.geometry import Averaged, Only, WithoutAverage
from wsam.rule import Mix, Products, Reuse, Rule, Weighted
from wsam.schedule import Every, NormAbove

STEPS = 15
MLP = PROBLEMS["mlp"]
Make = Callable[..., wsam.SharpnessAware]

# name -> (constructor, arguments, the reference)
CASES: dict[str, tuple[Make, dict[str, Any], Method]] = {
    "looksam": (wsam.LookSAM, {"n": 3}, Method("looksam", alpha=0.7, n=3)),
    "looksam 10": (wsam.LookSAM, {"n": 10, "alpha": 0.3}, Method("looksam", alpha=0.3, n=10)),
    "looksam per tensor": (
        wsam.LookSAM,
        {"n": 4, "per_tensor": True},
        Method("looksam", alpha=0.7, n=4, per_tensor=True),
    ),
    "vasso": (wsam.VaSSO, {"theta": 0.2}, Method("sam", "averaged", theta=0.2)),
    "friendly_sam": (
        wsam.FriendlySAM,
        {"sigma": 0.8, "decay": 0.6},
        Method("sam", "without_average", sigma=0.8, decay=0.6),
    ),
    "wsam with the geometry of vasso": (
        wsam.WSAM,
        {"geometry": Averaged(0.3), "gamma": 0.8},
        Method("wsam", "averaged", theta=0.3, gamma=0.8),
    ),
    "wsam with the geometry of friendly_sam": (
        wsam.WSAM,
        {"geometry": WithoutAverage(), "gamma": 0.8},
        Method("wsam", "without_average", gamma=0.8),
    ),
    "lean wsam with the geometry of friendly_sam": (
        wsam.WSAM,
        {"geometry": WithoutAverage(), "gamma": 0.8, "lean": True, "precondition": False},
        Method("wsam", "without_average", gamma=0.8, precondition=False),
    ),
    "looksam with the geometry of vasso": (
        wsam.LookSAM,
        {"geometry": Averaged(0.3), "n": 2},
        Method("looksam", "averaged", theta=0.3, alpha=0.7, n=2),
    ),
    "gsam with the geometry of vasso": (
        wsam.GSAM,
        {"geometry": Averaged(0.3)},
        Method("gsam", "averaged", theta=0.3),
    ),
}
ONE_OF_EACH = ["looksam", "vasso", "friendly_sam"]
IGNORED = pytest.mark.filterwarnings("ignore::wsam.WsamWarning")


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def make(name: str, model: nn.Module, **options: Any) -> wsam.SharpnessAware:
    kind, own, _ = CASES[name]
    return kind(momentum(model), **{**own, **options})


# --- agreement ----------------------------------------------------------------------------------


@IGNORED
@covering(2, name=list(CASES), base=list(BASES), style=STYLES, clip=[None, 0.3])
def test_reference_agreement(name: str, base: str, style: str, clip: float | None) -> None:
    kind, options, method = CASES[name]
    if "lean" in options and clip is not None:
        pytest.skip("lean=True rejects max_norm")
    method = replace(method, rho=0.1, max_norm=clip)
    params, w, memory = parameters(MLP.weights()), MLP.weights(), {}
    opt = kind(torch_base(base, params), rho=0.1, max_norm=clip, **options)
    other = reference_base(base)
    for t in range(STEPS):
        make_step(opt, lambda t=t: opt.select(MLP.losses(params, t)), style)
        pair = reference.two_gradients(method, w, lambda v, t=t: MLP.losses(v, t), None, memory)
        w = reference.update(method, other, w, *pair, memory)
        assert gap(params, w) < 1e-10, t


@pytest.mark.parametrize("name", ["looksam", "looksam per tensor", "vasso", "friendly_sam"])
def test_groups(name: str) -> None:
    """One norm over all groups; alpha may differ between them, and a group may have no gradient."""
    kind, options, method = CASES[name]
    rho, alpha = [0.2, 0.2, 0.1, 0.1], [0.4, 0.4, 0.7, 0.7]
    method = replace(method, rho=rho, alpha=alpha)
    params, w, memory = parameters(MLP.weights()), MLP.weights(), {}
    own = {"sam_alpha": 0.4} if "looksam" in name else {}
    groups = [{"params": params[:2], "sam_rho": 0.2, **own}, {"params": params[2:]}]
    opt = kind(torch.optim.SGD(groups, lr=0.02, momentum=0.9), rho=0.1, **options)
    other = reference_base("momentum")
    for t in range(8):
        make_step(opt, lambda t=t: MLP.losses(params, t).mean())
        pair = reference.two_gradients(method, w, lambda v, t=t: MLP.losses(v, t), None, memory)
        w = reference.update(method, other, w, *pair, memory)
        assert gap(params, w) < 1e-10


@pytest.mark.parametrize("foreach", [False, True])
def test_looksam_per_tensor_agrees_with_pytorch_optimizer(foreach: bool) -> None:
    """It adds 1e-8 to a norm, so that the two agree to about 1e-8."""
    library = pytest.importorskip("pytorch_optimizer")
    ours, theirs = parameters(MLP.weights()), parameters(MLP.weights())
    opt = wsam.LookSAM(torch_base("momentum", ours), rho=0.1, alpha=0.7, n=3, per_tensor=True)
    other = library.LookSAM(
        theirs, torch.optim.SGD, rho=0.1, k=3, alpha=0.7, lr=0.02, momentum=0.9, foreach=foreach
    )
    for t in range(7):
        make_step(opt, lambda t=t: MLP.losses(ours, t).mean())

        def run(t: int = t) -> Tensor:
            other.zero_grad()
            loss = MLP.losses(theirs, t).mean()
            loss.backward()
            return loss

        run()
        other.step(run)
        assert gap(ours, theirs) < 1e-6


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("sigma", [1.0, 0.8])
def test_friendly_sam_agrees_with_pytorch_optimizer(sigma: float, foreach: bool) -> None:
    """Its norm is a float32."""
    library = pytest.importorskip("pytorch_optimizer")
    ours, theirs = parameters(MLP.weights()), parameters(MLP.weights())
    opt = wsam.FriendlySAM(torch_base("momentum", ours), rho=0.1, sigma=sigma, decay=0.6)
    options: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "foreach": foreach}
    other = library.FriendlySAM(theirs, torch.optim.SGD, rho=0.1, sigma=sigma, lmbda=0.6, **options)
    for t in range(10):
        make_step(opt, lambda t=t: MLP.losses(ours, t).mean())

        def run(t: int = t) -> Tensor:
            other.zero_grad()
            loss = MLP.losses(theirs, t).mean()
            loss.backward()
            return loss

        run()
        other.step(run)
        assert gap(ours, theirs) < 1e-8


# --- identities ---------------------------------------------------------------------------------

IDENTITIES: dict[str, tuple[Make, Make]] = {
    "looksam, n = 1, is sam": (lambda b: wsam.LookSAM(b, n=1), wsam.SAM),
    "looksam, alpha = 0, is sam on each n-th step": (
        lambda b: wsam.LookSAM(b, n=3, alpha=0.0),
        lambda b: wsam.SAM(b, when=Every(3)),
    ),
    "vasso, theta = 1, is sam": (lambda b: wsam.VaSSO(b, theta=1.0), wsam.SAM),
    "friendly_sam, sigma = 0, is sam": (lambda b: wsam.FriendlySAM(b, sigma=0.0), wsam.SAM),
}


@pytest.mark.parametrize("base", ["momentum", "adam"])
@pytest.mark.parametrize("name", IDENTITIES)
def test_identities(name: str, base: str) -> None:
    """Bit for bit; but a step of Adam that reuses nothing is fused, unlike the base's own."""
    models = small_model(torch.float32), small_model(torch.float32)
    for model, kind in zip(models, IDENTITIES[name], strict=True):
        opt = kind(torch_base(base, list(model.parameters())))
        for t in range(5):
            opt.step(closure(opt, model, t))
    ours, theirs = (list(model.parameters()) for model in models)
    if "alpha" in name and base == "adam":
        assert gap(ours, theirs) < 1e-6
    else:
        assert same(ours, theirs)


def test_one_tensor_makes_projections_global() -> None:
    """With a single tensor LookSAM's two forms are one."""
    found = []
    for per_tensor in (False, True):
        p = nn.Parameter(torch.linspace(-1, 2, 6, dtype=torch.float64))
        opt = wsam.LookSAM(torch.optim.SGD([p], lr=0.1), n=2, per_tensor=per_tensor)
        for t in range(4):
            make_step(opt, lambda p=p, t=t: (batch(t)[:6, 0] * p.pow(3)).sum())
        found.append(p.detach())
    assert gap([found[0]], [found[1]]) < 1e-14


def test_looksam_per_tensor_adds_nothing_to_one_element() -> None:
    """It has no part orthogonal to another: rounding errors must not be scaled up to the gradient."""
    found = []
    for alpha in (0.0, 0.7):
        params = [nn.Parameter(torch.full((1,), 0.1 * i)) for i in range(1, 8)]
        opt = wsam.LookSAM(torch.optim.SGD(params, lr=0.1), alpha=alpha, n=2, per_tensor=True)
        for _ in range(4):
            make_step(
                opt, lambda params=params: torch.stack([p.sin().sum() for p in params]).prod()
            )
        found.append([p.detach() for p in params])
    assert same(*found)


def test_other_rules_keep_a_vector_for_one_element() -> None:
    """Only an orthogonal part is 0 there."""

    @dataclass(frozen=True)
    class Difference(Rule):
        per_tensor = True
        reuse = Reuse()

        def mix(self, hyper: dict[str, Scalar], products: Products | None) -> Mix:
            return Mix(G0, NOTHING)

    p = nn.Parameter(torch.ones(1))
    opt = wsam.SharpnessAware(torch.optim.SGD([p], lr=0.1), rule=Difference(), when=Every(2))
    make_step(opt, lambda: p.square().sum())
    assert opt.state[p]["sam_kept"].item() == pytest.approx(0.1)  # 2 rho


def test_nothing_to_reuse_is_no_division_by_zero() -> None:
    """A gradient that does not turn leaves no orthogonal part."""
    p = nn.Parameter(torch.ones(3))
    opt = wsam.LookSAM(torch.optim.SGD([p], lr=0.1), n=2)
    for _ in range(4):
        make_step(opt, p.sum)
    assert torch.allclose(p, torch.full((3,), 0.6))


def test_rounding_errors_are_not_reused() -> None:
    """The gradient of the bias of two classes is (a, -a): it never turns."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 2), torch.randn(16, 4), torch.arange(16) % 2
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = wsam.LookSAM(base, rho=0.5, n=2, per_tensor=True)
    before = model.bias.sum().item()
    for _ in range(20):
        make_step(opt, lambda: nn.functional.cross_entropy(model(x), y))
    assert model.bias.sum().item() == pytest.approx(before, abs=1e-6)


# --- what is kept -------------------------------------------------------------------------------

KEPT = {"looksam": "sam_kept", "vasso": "sam_average", "friendly_sam": "sam_average"}


def kept(opt: wsam.SharpnessAware, name: str) -> list[Tensor]:
    params = [p for group in opt.param_groups for p in group["params"]]
    return [opt.state[p][KEPT[name]].clone() for p in params]


@pytest.mark.parametrize("base", ["momentum", "adamw", "adagrad"])
@covering(name=ONE_OF_EACH, stop=[1, 2, 3, 4])
def test_kept_tensors_resume(name: str, stop: int, base: str) -> None:
    def new() -> tuple[nn.Module, wsam.SharpnessAware]:
        model = small_model()
        kind, options, _ = CASES[name]
        return model, kind(torch_base(base, list(model.parameters())), **options)

    (model, opt), (other, again) = new(), new()
    for t in range(stop):
        opt.step(closure(opt, model, t))
    weights, state = save_and_load([model.state_dict(), opt.state_dict()])
    other.load_state_dict(weights)
    again.load_state_dict(state)
    for t in range(stop, stop + 4):
        opt.step(closure(opt, model, t))
        again.step(closure(again, other, t))
    assert same(snapshot(opt), snapshot(again))


@pytest.mark.parametrize("in_pass", [1, 2])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_step_that_is_not_made_keeps_what_was_kept(name: str, in_pass: int) -> None:
    """Neither a skipped step nor one that ends in an error changes the memory."""
    model = small_model()
    opt = make(name, model, nonfinite="skip", **({"n": 1} if name == "looksam" else {}))
    for t in range(2):
        opt.step(closure(opt, model, t))
    before = kept(opt, name)

    def broken(fault: Callable[[], None]) -> Callable[[], Tensor]:
        inner, calls = closure(opt, model, 2), []

        def run() -> Tensor:
            loss = inner()
            calls.append(1)
            if len(calls) == in_pass:
                fault()
            return loss

        return run

    def spoil() -> None:
        model[0].weight.grad[0, 0] = torch.nan

    def fail() -> None:
        raise KeyboardInterrupt

    opt.step(broken(spoil))
    assert opt.skipped == 1
    assert same(kept(opt, name), before)
    with pytest.raises(KeyboardInterrupt):
        opt.step(broken(fail))
    assert same(kept(opt, name), before)
    with opt.perturbed() if all(p.grad is not None for p in model.parameters()) else fresh(opt):
        pass
    assert same(kept(opt, name), before)
    opt.step(closure(opt, model, 3))
    assert not same(kept(opt, name), before)


def fresh(opt: wsam.SharpnessAware) -> Any:
    """Return `perturbed()` with gradients of ones."""
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    return opt.perturbed()


@pytest.mark.parametrize(("kind", "first"), [(wsam.VaSSO, 1.0), (wsam.FriendlySAM, 1.0)])
def test_a_late_parameter_begins_its_own_average(kind: Make, first: float) -> None:
    """Its first gradient is its average; those of the others continue."""
    a, b = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    opt = kind(torch.optim.SGD([a, b], lr=0.1), rho=0.0001)
    make_step(opt, lambda: 2 * a.sum())
    make_step(opt, lambda: 4 * a.sum() + first * b.sum())
    share = 0.9 if kind is wsam.VaSSO else 0.1
    assert torch.allclose(opt.state[a]["sam_average"], 2 + share * torch.full_like(a, 2))
    assert torch.allclose(opt.state[b]["sam_average"], torch.ones_like(b))


@pytest.mark.parametrize("name", ["vasso", "friendly_sam"])
def test_micro_batches_continue_one_average(name: str) -> None:
    """Each closure of a list counts as a gradient of its own in the average."""
    model = small_model()
    opt = make(name, model)
    shares = {"vasso": 0.2, "friendly_sam": 0.4}
    opt.step([closure(opt, model, 0), closure(opt, model, 1)])
    twin, gradients = small_model(), []
    for t in range(2):
        (weight,) = torch.autograd.grad((twin(batch(t)) ** 2).sum(1).mean(), [twin[0].weight])
        gradients.append(weight)
    wanted = torch.lerp(gradients[0], gradients[1], shares[name])
    assert torch.allclose(opt.state[model[0].weight]["sam_average"], wanted, rtol=1e-12)


@pytest.mark.parametrize("name", ["vasso", "friendly_sam"])
def test_local_perturbations_are_rejected(name: str) -> None:
    model = small_model()
    with pytest.raises(TypeError, match="local"):
        make(name, model, local=True)
    geometry = {"vasso": Averaged(), "friendly_sam": WithoutAverage()}[name]
    model.require_backward_grad_sync = True  # like DistributedDataParallel
    model.find_unused_parameters = model.static_graph = False
    with pytest.raises(ValueError, match=r"averages one gradient a step.*local=True"):
        wsam.SharpnessAware(
            momentum(model), rule=Weighted(), model=model, local=True, geometry=geometry
        )


# --- passes -------------------------------------------------------------------------------------


def test_looksam_runs_the_closure_twice_on_each_nth_step() -> None:
    model, passes = small_model(), []
    opt = wsam.LookSAM(momentum(model), n=3)
    inner = closure(opt, model)

    def run() -> Tensor:
        passes.append(opt.second_pass)
        return inner()

    for _ in range(6):
        opt.step(run)
    assert passes == [False, True, False, False] * 2


def test_looksam_with_an_interval_of_its_own() -> None:
    opt = wsam.LookSAM(momentum(small_model()), n=3, when=Every(2))
    assert opt.when == Every(2)


@pytest.mark.parametrize("name", ["looksam", "looksam per tensor", "vasso", "friendly_sam"])
def test_train_step(name: str) -> None:
    models = small_model(), small_model()
    opts = [make(name, model) for model in models]
    step = wsam.train_step(opts[1], lambda x: (models[1](x) ** 2).sum(1).mean())
    for t in range(5):
        opts[0].step(closure(opts[0], models[0], t))
        step(batch(t))
    assert same(snapshot(opts[0]), snapshot(opts[1]))


# --- SAM-ON -------------------------------------------------------------------------------------


def with_norms() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_only_normalization_layers_are_perturbed(style: str, named: bool) -> None:
    """d = rho g_M / norm(g_M) over the tensors of these layers; the others do not move."""
    model = with_norms()
    geometry = Only.layers(model)
    assert geometry.names == ("1.weight", "1.bias", "3.weight", "3.bias")
    base = torch.optim.SGD(model.named_parameters() if named else model.parameters(), lr=0.1)
    opt = wsam.SAM(base, rho=0.3, geometry=geometry, model=None if named else model)
    w = {name: p.detach().clone() for name, p in model.named_parameters()}
    twin = copy.deepcopy(model)
    (twin(batch(0)) ** 2).mean().backward()
    g0 = {name: p.grad for name, p in twin.named_parameters()}
    norm = torch.sqrt(sum((g0[name] ** 2).sum() for name in geometry.names))
    seen: list[dict[str, Tensor]] = []

    def loss() -> Tensor:
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return (model(batch(0)) ** 2).mean()

    make_step(opt, loss, style)
    for name, p in seen[1].items():
        d = 0.3 * g0[name] / norm if name in geometry.names else 0.0
        assert torch.allclose(p, w[name] + d, rtol=1e-12, atol=1e-12)
        assert name in geometry.names or torch.equal(p, w[name])
    wanted = {name: p + 0 for name, p in seen[1].items()}
    x = functional_call(with_norms(), {k: v.requires_grad_() for k, v in wanted.items()}, batch(0))
    g1 = torch.autograd.grad((x**2).mean(), list(wanted.values()))
    for p, start, g in zip(model.parameters(), w.values(), g1, strict=True):
        assert torch.allclose(p, start - 0.1 * g, rtol=1e-10, atol=1e-12)


def test_only_takes_patterns_and_types() -> None:
    model = with_norms()
    assert Only.layers(model, (nn.LayerNorm,)).names == ("3.weight", "3.bias")
    opt = wsam.WSAM(momentum(model), geometry=Only(("*.bias", "4.*")), model=model)
    assert opt._mask() == [False, True, False, True, False, True, True, True]
    with pytest.raises(ValueError, match="needs parameter names"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@pytest.mark.parametrize(
    ("names", "model", "message"),
    [(("3.*",), False, "pass model="), (("absent",), True, "absent"), ("*.bias", True, "tuple")],
)
def test_only_rejects(names: Any, model: bool, message: str) -> None:
    trained = with_norms()
    with pytest.raises((TypeError, ValueError), match=message):
        wsam.SAM(momentum(trained), geometry=Only(names), model=trained if model else None)


def test_only_with_all_names_is_a_ball() -> None:
    """Bit for bit."""
    models = with_norms(), with_norms()
    opts = [
        wsam.SAM(momentum(model), geometry=geometry, model=model)
        for model, geometry in zip(models, (Only(("*",)), None), strict=True)
    ]
    for t in range(3):
        for opt, model in zip(opts, models, strict=True):
            opt.step(closure(opt, model, t))
    assert same(list(models[0].parameters()), list(models[1].parameters()))


# --- AE-SAM -------------------------------------------------------------------------------------


def test_falling_threshold() -> None:
    """c falls linearly from 1 to -1: q = mean + c_t std is the limit at each step."""
    interval = NormAbove(1.0, final=-1.0, steps=10)
    assert [interval.factor_at(t) for t in (0, 5, 10, 20)] == [1.0, 0.0, -1.0, -1.0]
    constant, chosen = NormAbove(1.0), []
    for each in (interval, constant):
        assert each.chosen(0, lambda: 1.0)
    mean, variance = interval.mean, interval.variance
    for t in range(1, 30):
        q = 1 + 0.5 * math.sin(2.1 * t)
        wanted = q >= mean + max(1 - 0.2 * t, -1.0) * math.sqrt(variance)
        assert interval.chosen(t, lambda q=q: math.sqrt(q)) == wanted
        variance, mean = 0.9 * variance + 0.1 * (q - mean) ** 2, 0.9 * mean + 0.1 * q
        chosen.append((wanted, constant.chosen(t, lambda q=q: math.sqrt(q))))
    falling, same_factor = (sum(column[-10:]) for column in zip(*chosen, strict=True))
    assert falling > same_factor


def test_falling_threshold_resumes() -> None:
    def new() -> tuple[nn.Module, wsam.SharpnessAware]:
        model = small_model()
        return model, wsam.SAM(momentum(model), when=NormAbove(1.0, final=-1.0, steps=8))

    (model, opt), (other, again) = new(), new()
    for t in range(4):
        opt.step(closure(opt, model, t))
    weights, state = save_and_load([model.state_dict(), opt.state_dict()])
    other.load_state_dict(weights)
    again.load_state_dict(state)
    assert again.when == opt.when
    for t in range(4, 9):
        opt.step(closure(opt, model, t))
        again.step(closure(again, other, t))
    assert same(snapshot(opt), snapshot(again))


@pytest.mark.parametrize("options", [{"final": 0.0}, {"steps": 5}])
def test_falling_threshold_rejects(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"final|steps"):
        NormAbove(1.0, **options)
