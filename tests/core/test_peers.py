"""Methods of other papers: LookSAM, VaSSO, FriendlySAM."""

from collections.abc import Callable
from dataclasses import replace
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

import wsam
from wsam.geometry import Averaged, WithoutAverage
from wsam.rule import Weighted
from wsam.schedule import Every

STEPS = 50
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
        {"geometry": WithoutAverage(), "gamma": 0.8, "lean": True},
        Method("wsam", "without_average", gamma=0.8),
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


def test_nothing_to_reuse_is_no_division_by_zero() -> None:
    """A gradient that does not turn leaves no orthogonal part."""
    p = nn.Parameter(torch.ones(3))
    opt = wsam.LookSAM(torch.optim.SGD([p], lr=0.1), n=2)
    for _ in range(4):
        make_step(opt, p.sum)
    assert torch.allclose(p, torch.full((3,), 0.6))


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
    share = 0.4 if kind is wsam.VaSSO else 0.1
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
    with pytest.raises(ValueError, match="differ between ranks"):
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
