"""Steps by kernels equal steps without: emulated, and by Triton's interpreter where it is installed."""

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import emulated_kernels
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import wsam
from wsam._core.step_state import StepState
from wsam.accel import triton_backend
from wsam.accel.backend import Backend
from wsam.rule import Reuse
from wsam.schedule import Between, Every, Scalar

STEPS = 4
ADAM = {"lr": 0.01, "eps": 1e-4}  # with torch's epsilon, rounding of small gradients would show
BASES: dict[str, Any] = {
    "sgd": lambda p, **more: torch.optim.SGD(p, lr=0.1, **more),
    "momentum": lambda p, **more: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, weight_decay=0.01, **more
    ),
    "nesterov": lambda p, **more: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **more),
    "dampening": lambda p, **more: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, **more),
    "adam": lambda p, **more: torch.optim.Adam(p, **ADAM, weight_decay=0.01, **more),
    "adamw": lambda p, **more: torch.optim.AdamW(p, **ADAM, weight_decay=0.1, **more),
}
Case = tuple[str, str, dict[str, Any]]
# Each base with a rule that keeps g0, one that does not, and a lean step uses other branches of the
# kernels, and GSAM needs inner products.
BRANCHES: list[Case] = [
    *(("wsam", base, {"precondition": False}) for base in BASES),
    *(("sam", base, {}) for base in BASES),
    *(("wsam", base, {"lean": True, "precondition": False}) for base in BASES),
    ("gsam", "momentum", {}),
    ("wsam", "adam", {}),  # preconditioned
    ("wsam", "adamw", {}),
]
EVERY_2: dict[str, Any] = {"when": Every(2)}
# How many steps kernels perturb and finish, of four with a kept vector; the first creates that vector.
KEPT: list[tuple[str, str, dict[str, Any], tuple[int, int]]] = [
    *(("wsam", base, {**EVERY_2, "precondition": False, "reuse": True}, (2, 3)) for base in BASES),
    ("wsam", "adamw", {**EVERY_2, "reuse": True}, (2, 3)),  # preconditioned
    ("wsam", "momentum", {**EVERY_2, "reuse": Reuse(weight=0.5)}, (2, 3)),
    (
        "wsam",
        "momentum",
        {**EVERY_2, "reuse": Reuse(average=0.5)},
        (2, 2),
    ),  # the steps with one pass only
    (
        "wsam",
        "momentum",
        {**EVERY_2, "reuse": Reuse(weight=0.0)},
        (2, 1),
    ),  # the second two-pass step only
    ("wsam", "momentum", {**EVERY_2, "reuse": Reuse(scale_by_norm=True)}, (2, 0)),
    ("wsam", "momentum", {"when": Every(2) & Between(2), "reuse": True}, (1, 2)),
    ("looksam", "momentum", EVERY_2, (2, 0)),
]
# These differ on the host only.
CASES: list[Case] = [
    *BRANCHES,
    ("coupled_wsam", "adamw", {"gamma": 0.8}),
    ("gsam", "adam", {}),
    ("asam", "nesterov", {}),
    ("fisher_sam", "adamw", {}),
    ("esam", "momentum", {}),
    ("wsam", "momentum", {"max_norm": 0.5}),
    ("wsam", "adam", {"geometry": wsam.Adaptive(), "precondition": False}),
    ("wsam", "adamw", {"geometry": wsam.Fisher()}),
    ("wsam", "momentum", {"geometry": wsam.Fisher(), "lean": True}),
]


class Counted:
    """A backend that counts the calls of which it returned True."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.perturbed = self.finished = 0

    def perturb(self, state: StepState) -> bool:
        done = self._backend.perturb(state)
        self.perturbed += done
        return done

    def finish(self, state: StepState) -> bool:
        done = self._backend.finish(state)
        self.finished += done
        return done


def network() -> nn.Module:
    torch.manual_seed(0)
    hidden = nn.Sequential(nn.Conv2d(3, 7, 3, bias=False), nn.BatchNorm2d(7), nn.ReLU())
    model = nn.Sequential(hidden, nn.Flatten(), nn.Linear(7 * 36, 50), nn.Tanh(), nn.Linear(50, 4))
    return model.to(memory_format=torch.channels_last)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(9, 3, 8, 8, generator=generator)
    return x, torch.randint(0, 4, (9,), generator=generator)


def train(model: nn.Module, opt: wsam.SharpnessAware) -> list[Tensor]:
    for step in range(STEPS):
        x, y = batch(step)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            loss = opt.select(cross_entropy(model(x), y, reduction="none"))
            loss.backward()
            return loss

        opt.step(closure)
    return list(model.state_dict().values())


def check(
    method: str,
    base: str,
    options: dict[str, Any],
    by_kernels: tuple[int, int] | None = None,
) -> None:
    """Train with and without kernels, compare, and check which calls kernels have handled."""
    slow, fast = network(), network()
    opt = wsam.create(method, BASES[base](slow.parameters(), foreach=False), model=slow, **options)
    opt._backend = None
    expected = train(slow, opt)
    opt = wsam.create(method, BASES[base](fast.parameters(), fused=True), model=fast, **options)
    counted = opt._backend = Counted(emulated_kernels.attach(opt))
    torch.testing.assert_close(train(fast, opt), expected, rtol=1e-5, atol=1e-6)
    with_state = STEPS if base == "sgd" else STEPS - 1  # the base creates its state by itself
    if by_kernels is not None:  # the last step has one pass, whose gradient stays
        wanted = by_kernels
        grads = [[p.grad for p in model.parameters()] for model in (fast, slow)]
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)
    elif method == "esam":  # masked
        wanted = (0, 0)
    elif "max_norm" in options:
        wanted = (STEPS, 0)
    else:
        wanted = (with_state if options.get("lean") else STEPS, with_state)
    assert (counted.perturbed, counted.finished) == wanted


@pytest.mark.parametrize(("method", "base", "options"), CASES)
def test_emulated_kernels_agree_with_the_core(
    method: str, base: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated_kernels.install(monkeypatch)
    check(method, base, options)


@pytest.mark.parametrize(("method", "base", "options", "by_kernels"), KEPT)
def test_emulated_kernels_with_a_kept_vector(
    method: str,
    base: str,
    options: dict[str, Any],
    by_kernels: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulated_kernels.install(monkeypatch)
    check(method, base, options, by_kernels)


def check_branches() -> None:
    with pytest.MonkeyPatch.context() as patched:
        emulated_kernels.allow_cpu(patched)
        for case in (*BRANCHES, *KEPT):
            check(*case)


@pytest.mark.slow
@pytest.mark.skipif(not triton_backend.triton_is_installed(), reason="Triton is not installed")
def test_interpreted_kernels_agree_with_the_core() -> None:
    code = "import test_triton_kernels; test_triton_kernels.check_branches()"
    path = os.pathsep.join(["tests", "tests/accel", os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=600)


@dataclass(frozen=True)
class Projected(wsam.rule.Rule):
    """A rule whose four coefficients all depend on inner products, unless share is 0."""

    share: float = 0.3

    def needs_products(self, hyper: dict[str, Scalar]) -> bool:
        return hyper["share"] != 0

    def mix(self, hyper: dict[str, Scalar], products: wsam.rule.Products | None) -> wsam.rule.Mix:
        if products is None:
            return wsam.rule.Mix(wsam.rule.Part(1.0, 0.5), wsam.rule.Part(0.25, 0.1))
        share = hyper["share"]
        cosine = products.g0_g1 / (products.g0_g0 * products.g1_g1).sqrt()
        base_grad = wsam.rule.Part(1 + share * cosine, 1 - share * cosine)
        return wsam.rule.Mix(base_grad, wsam.rule.Part(share * cosine**2, 0.5))


def test_products_in_one_of_two_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products are over all groups, and the hyperparameter changes between steps."""
    kernels = emulated_kernels.install(monkeypatch)
    models = [network(), network()]
    opts = []
    for model in models:
        bulk, last = model[0:3].parameters(), model[4].parameters()
        groups = [{"params": [*bulk], "share": 0.3}, {"params": [*last], "share": 0.0}]
        base = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
        opts.append(wsam.SharpnessAware(base, rule=Projected()))
    opts[0]._backend = None
    emulated_kernels.attach(opts[1])
    x, y = batch(0)
    for share in (0.3, 0.3, 0.5, 0.1):
        for opt, model in zip(opts, models, strict=True):
            opt.param_groups[0]["sam_share"] = share

            def closure(model: nn.Module = model) -> Tensor:
                loss = cross_entropy(model(x), y)
                loss.backward()
                return loss

            opt.step(closure)
        torch.testing.assert_close(
            list(models[1].parameters()), list(models[0].parameters()), rtol=1e-5, atol=1e-6
        )
    assert kernels.products.launches == kernels.finish.launches == 2 * 3, "all but the first step"


@pytest.mark.parametrize("broken", ["", "squares", "finish"])
def test_kernels_that_do_not_compile_are_not_used(
    broken: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    kernels = emulated_kernels.install(monkeypatch)
    monkeypatch.setattr(triton_backend, "triton_is_installed", lambda: True)

    def fail(*given: object, **constants: object) -> None:
        raise RuntimeError("no compiler")

    if broken:
        getattr(kernels, broken).run = fail
    works = triton_backend.kernels_work_on.__wrapped__(torch.device("cpu"))
    assert works is (not broken)
    assert ["no compiler" in str(w.message) for w in recwarn] == [True] * bool(broken)
