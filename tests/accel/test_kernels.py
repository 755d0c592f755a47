"""Fused kernels equal the foreach path; where Triton is, by its interpreter, without a GPU, too."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import emulated
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_post_hook

import wsam
from wsam import kernels, launch
from wsam.bases import branches_of, can_finish, numbers_of
from wsam.plan import Plan, are_apart
from wsam.schedule import Scalar
from wsam.update import Flight

BASES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    hidden = nn.Sequential(nn.Conv2d(3, 7, 3, bias=False), nn.BatchNorm2d(7), nn.ReLU())
    model = nn.Sequential(hidden, nn.Flatten(), nn.Linear(7 * 36, 50), nn.Tanh(), nn.Linear(50, 4))
    return model.to(memory_format=torch.channels_last)


def compare(name: str, base: str, **options: object) -> int:
    """Train twice, the second time with kernels; return how often one finished or began a step."""
    models = [network(), network()]
    opts = [wsam.create(name, BASES[base](m.parameters()), model=m, **options) for m in models]
    second = opts[1]
    fused = emulated.attach(second)
    finished: list[bool] = []

    def heard(own: Callable[..., bool]) -> Callable[..., bool]:
        return lambda *given: finished.append(own(*given)) or finished[-1]  # type: ignore[func-returns-value]

    for name_of_kernel in ("finish", "begin_lean", "end_lean"):
        setattr(fused, name_of_kernel, heard(getattr(fused, name_of_kernel)))

    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        x = torch.randn(9, 3, 8, 8, generator=generator)
        y = torch.randint(0, 4, (9,), generator=generator)
        for opt, model in zip(opts, models, strict=True):

            def closure(opt=opt, model=model, x=x, y=y):
                loss = opt.select(cross_entropy(model(x), y, reduction="none"))
                loss.backward()
                return loss

            opt.step(closure)
    for p, q in zip(*(m.state_dict().values() for m in models), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6)
    return sum(finished)


def wanted_of(base: str) -> int:
    return 6 if base == "sgd" else 5


def check_base(base: str) -> None:
    for name in wsam.METHODS:
        done = compare(name, base)
        # The first step makes the base's state, and where a mask leaves a tensor out its weights
        # were not saved.
        wanted = 0 if name == "esam" else wanted_of(base)
        assert done == wanted, (name, base, done)
    # Lean: as many beginnings as above, and as many ends.
    assert compare("wsam", base, lean=True) == 2 * wanted_of(base)


def check_options() -> None:
    assert compare("wsam", "momentum", max_norm=0.5) == 0
    for geometry in (wsam.Adaptive(), wsam.Fisher()):
        assert compare("wsam", "momentum", geometry=geometry) == 5
        assert compare("wsam", "momentum", geometry=geometry, lean=True) == 2 * 5


def check_all() -> None:
    for base in BASES:
        check_base(base)
    check_options()


@pytest.mark.parametrize("base", BASES)
def test_what_kernels_are_given(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.install(monkeypatch)
    check_base(base)


def test_what_kernels_are_given_with_options(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.install(monkeypatch)
    check_options()


@pytest.mark.parametrize("broken", ["", "squares", "finish"])
def test_kernels_that_cannot_be_made_are_left_out(
    broken: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    device = emulated.install(monkeypatch)
    monkeypatch.setattr(launch, "available", lambda: True)

    def fail(*given: object, **flags: object) -> None:
        raise RuntimeError("no compiler")

    if broken:
        getattr(device, broken).run = fail
    assert launch.kernels_work_on.__wrapped__(torch.device("cpu")) is (not broken)
    assert ["no compiler" in str(w.message) for w in recwarn] == [True] * bool(broken)


@pytest.mark.skipif(not launch.available(), reason="Triton is not installed")
def test_kernels_equal_the_foreach_path() -> None:
    code = "import test_kernels; test_kernels.check_all()"
    path = os.pathsep.join(["tests", "tests/accel", os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=280)


class Named(torch.Tensor):
    """A tensor of a class of its own, which may keep its elements elsewhere."""


def fit(planned: torch.Tensor, other: torch.Tensor) -> bool:
    return Plan([planned], planned.device).addresses([other]) == [other.data_ptr()]


def test_what_does_not_fit() -> None:
    a = torch.zeros(4, 6)
    assert fit(a, a.clone())
    assert fit(a.t(), a.clone().t())
    assert not fit(a, a.t().contiguous().t())  # the same numbers in another order
    assert not fit(a[:, :3], a[:, 3:])
    assert not fit(a, a.double())
    assert not fit(torch.zeros(8), torch.zeros(4))
    assert not fit(torch.zeros(8), torch.zeros(9)[1:])  # not aligned
    assert not fit(torch.zeros(0), torch.zeros(0))  # nothing to launch a kernel for
    assert not fit(a, torch.zeros(8, 3))  # as many elements, other strides
    assert Plan([a], a.device).addresses([None]) is None
    assert Plan([a], a.device).addresses([torch.zeros(4, 6, device="meta")]) is None
    assert Plan([a], a.device).addresses([torch.zeros(4, 6).as_subclass(Named)]) is None


def test_copies_in_one_piece() -> None:
    weights = [torch.zeros(3), torch.zeros(4, 6).t(), torch.zeros(())]
    plan = Plan(weights, torch.device("cpu"))
    piece = plan.piece()
    assert len(piece) == 3
    for value, (mine, like) in enumerate(zip(piece, weights, strict=True)):
        assert (mine.shape, mine.stride()) == (like.shape, like.stride())
        mine.fill_(value)
    assert [t.data_ptr() for t in piece] == piece.addresses()
    assert [bool((t == i).all()) for i, t in enumerate(piece)] == [True] * 3


def test_weights_that_were_replaced_get_another_plan() -> None:
    model = nn.Linear(2, 3)
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1))
    fused = kernels.Kernels(torch.device("cpu"), opt.base, opt.rule, 1.0)
    (block,) = opt._layout()
    before = fused._plan(block)
    assert fused._plan(block) is before
    model.weight.data = model.weight.data.clone()
    assert fused._plan(block) is before, "elsewhere, and laid out alike"
    assert before.weights == [p.data_ptr() for p in model.parameters()]
    model.weight.data = model.weight.data.t().contiguous().t()
    assert fused._plan(block) is not before
    before = fused._plan(block)
    model.weight.data = model.weight.data[:, :1]
    assert fused._plan(block) is not before


def test_bases_that_kernels_know() -> None:
    weights = [nn.Parameter(torch.zeros(2))]
    assert can_finish(torch.optim.SGD(weights, lr=0.1))
    assert not can_finish(torch.optim.SGD(weights, lr=0.1, maximize=True))
    assert not can_finish(torch.optim.Adam(weights, amsgrad=True))
    assert not can_finish(torch.optim.RMSprop(weights))
    hooked = torch.optim.SGD(weights, lr=0.1)
    hooked.register_step_pre_hook(lambda *_: None)
    assert not can_finish(hooked)


def test_hooks_on_all_optimizers_are_heard() -> None:
    base = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        assert not can_finish(base)
    finally:
        handle.remove()
    assert can_finish(base)


def test_betas_in_tensors_are_left_to_the_base() -> None:
    weights = [nn.Parameter(torch.zeros(2))]
    betas = (torch.tensor(0.9), torch.tensor(0.999))
    assert not can_finish(torch.optim.Adam(weights, betas=betas, capturable=True))


def test_what_moves_from_step_to_step_is_not_compiled_in() -> None:
    base = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9, weight_decay=0.1)
    opt = wsam.WSAM(base)
    group = base.param_groups[0]
    branches, numbers = branches_of(base, group), numbers_of(group, opt.rule, 1.0)
    group.update(momentum=0.8, weight_decay=0.2, lr=0.3, sam_rho=0.4, sam_gamma=0.5)
    assert branches_of(base, group) == branches
    moved = numbers_of(group, opt.rule, 1.0)
    assert [moved[i] != numbers[i] for i in (0, 4, 5, 6, 7)] == [True] * 5


@dataclass(frozen=True)
class Projected(wsam.rule.Rule):
    """All four weights depend on inner products, where there are any to depend on."""

    share: float = 0.3

    def needs_products(self, hyper: dict[str, Scalar]) -> bool:
        return hyper["share"] != 0

    def mix(self, hyper: dict[str, Scalar], products: wsam.rule.Products | None) -> wsam.rule.Mix:
        if products is None:
            return wsam.rule.Mix(wsam.rule.Part(1.0, 0.5), wsam.rule.Part(0.25, 0.1))
        share = hyper["share"]
        cosine = products.cross / (products.first * products.second).sqrt()
        fed = wsam.rule.Part(1 + share * cosine, 1 - share * cosine)
        return wsam.rule.Mix(fed, wsam.rule.Part(share * cosine**2, 0.5))


def test_weights_of_a_rule_that_needs_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one group only, and of values that change; norms are those of all groups."""
    device = emulated.install(monkeypatch)
    models = [network(), network()]
    opts = []
    for model in models:
        bulk, last = model[0:3].parameters(), model[4].parameters()
        groups = [{"params": [*bulk], "share": 0.3}, {"params": [*last], "share": 0.0}]
        base = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
        opts.append(wsam.SharpnessAware(base, rule=Projected()))
    emulated.attach(opts[1])
    x, y = torch.randn(9, 3, 8, 8), torch.randint(0, 4, (9,))
    for share in (0.3, 0.3, 0.5, 0.1):
        for opt, model in zip(opts, models, strict=True):
            opt.param_groups[0]["sam_share"] = share

            def closure(model=model):
                loss = cross_entropy(model(x), y)
                loss.backward()
                return loss

            opt.step(closure)
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6)
    assert device.products.launches == device.finish.launches == 2 * 3, "but for the first step"


def test_few_plans_are_kept() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(30)))
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1))
    fused = kernels.Kernels(torch.device("cpu"), opt.base, opt.rule, 1.0)
    (block,) = opt._layout()
    for number in range(30):
        part = block.subset([n == number for n in range(30)])
        assert part is not None
        fused._plan(part)
    assert len(fused._plans) <= kernels.PLANS


@pytest.mark.parametrize(("begins", "apart"), [((0, 64), True), ((0, 32), False), ((0, 0), False)])
def test_weights_that_share_memory_are_left_alone(begins: tuple[int, int], apart: bool) -> None:
    flat = torch.zeros(128)
    params = [nn.Parameter(flat[begin : begin + 64]) for begin in begins]
    opt = wsam.WSAM(torch.optim.SGD(params, lr=0.1))
    fused = kernels.Kernels(torch.device("cpu"), opt.base, opt.rule, 1.0)
    plans = [fused._plan(block) for block in opt._layout()]
    assert fused._are_apart(plans) is apart
    gradients = [torch.ones_like(p) for p in params]
    assert apart or fused.scales(opt._layout(), [gradients]) is None


def test_fuse_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wsam.graph.available", lambda: False)
    model = nn.Linear(2, 2)
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="Triton"):
        wsam.capture(opt, lambda x: model(x).sum(), torch.ones(2, 2), fuse=True)


def test_shards_are_left_to_the_foreach_path() -> None:
    """The norm of a sharded parameter is summed over ranks, which no kernel here does."""
    model = nn.Linear(2, 2)
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1))
    fused = kernels.Kernels(torch.device("cpu"), opt.base, opt.rule, 1.0)
    (block,) = opt._layout()
    block.sharded = True
    gradients = [torch.ones_like(p) for p in block.params]
    assert fused.scales([block], [gradients]) is None
    assert not fused.finish(Flight([block]))
    block.weights = lambda: block.params  # type: ignore[method-assign]
    assert not fused.save_and_add(block, gradients, torch.ones(()))


def test_memory_that_is_shared_is_found_behind_a_smaller_piece() -> None:
    assert not are_apart([0, 8, 90], [100, 0, 8])
    assert are_apart([100, 0, 50], [8, 50, 50])
    assert not are_apart([0, 0], [4, 4])
