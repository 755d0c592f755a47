"""Memory traffic: counted operation by operation, and as documented in docs/speed.md."""

import re
from collections.abc import Callable
from pathlib import Path

import emulated_kernels
import pytest
import torch

import wsam
from wsam._core.param_blocks import Block
from wsam.accel.tensor_table import WorkPlan
from wsam.accel.triton_backend import KernelBlock, TritonBackend
from wsam.bench import cases, memory_traffic, third_party
from wsam.bench.cases import Case
from wsam.bench.memory_traffic import NUMEL, TENSORS, Traffic, TrafficCounter
from wsam.bench.timing import Timer, make_clock
from wsam.bench.workload import BASE_ARGS, Workload, synthetic_workload
from wsam.rule import Weighted
from wsam.schedule import Every

CPU = torch.device("cpu")
Fused = Callable[[torch.nn.Module], torch.optim.Optimizer]
SPEED = Path(__file__).parents[2] / "docs" / "speed.md"


A, B = torch.zeros(NUMEL), torch.zeros(NUMEL)
OPERATIONS: dict[str, tuple[Callable[[], object], int, int]] = {
    "add_": (lambda: A.add_(B), 2, 1),
    "add": (lambda: A + B, 2, 1),
    "copy_": (lambda: A.copy_(B), 1, 1),
    "add out": (lambda: torch.add(A, A, out=B), 2, 1),
    "zero_": (A.zero_, 0, 1),
    "clone": (A.clone, 1, 1),
    "empty_like": (lambda: torch.empty_like(A), 0, 0),
    "view": (lambda: A.view(1, NUMEL), 0, 0),
    "norm": (A.norm, 1, 0),
    "small": (lambda: torch.ones(3) + 1, 0, 0),
    "foreach_add_": (lambda: torch._foreach_add_([A, B], [B, A], alpha=0.1), 4, 2),
    "foreach_mul": (lambda: torch._foreach_mul([A, B], 2.0), 2, 2),
    "foreach_copy_": (lambda: torch._foreach_copy_([A], [B]), 1, 1),
    "foreach_norm": (lambda: torch._foreach_norm([A, B]), 2, 0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_traffic_of_operations(name: str) -> None:
    operation, reads, writes = OPERATIONS[name]
    counter = TrafficCounter()
    with counter:
        operation()
    assert (counter.reads, counter.writes) == (reads, writes)


def test_traffic_of_a_fused_base() -> None:
    """By its schema `_fused_sgd_` writes gradients; without a GradScaler it does not."""
    p = torch.nn.Parameter(torch.zeros(NUMEL))
    base = torch.optim.SGD([p], lr=0.1, momentum=0.9, fused=True)
    counter = TrafficCounter()
    for _ in range(2):
        p.grad = torch.ones(NUMEL)
        counter = TrafficCounter()
        with counter:
            base.step()
    assert (counter.reads, counter.writes) == (3, 2)


def test_traffic_of_fused_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They bypass torch's dispatcher and are counted by their arguments."""
    block = Block({"lr": 0.1}, [A, B], [0, 1])
    monkeypatch.setattr(TritonBackend, "_scales", lambda self, *given: [torch.ones(())])
    monkeypatch.setattr(TritonBackend, "_save_and_add", lambda self, *given: True)
    monkeypatch.setattr(TritonBackend, "_finish_block", lambda self, *given: None)
    counter, backend = TrafficCounter(), object.__new__(TritonBackend)
    with memory_traffic.count_fused_kernels(counter):
        backend._scales([block], [], [[A, B]], True)
        assert (counter.reads, counter.writes) == (2, 0)
        assert backend._save_and_add(block, [A, B], torch.ones(()))
        assert (counter.reads, counter.writes) == (6, 4)
        saved, weights, g1, g0, momentum, kept = ([0, 0] for _ in range(6))
        plan = WorkPlan(block.params, CPU)
        backend._finish_block(block, plan, [saved, weights, g1, g0], [momentum], kept)
    # Reads w, g1, g0 and the momentum of each parameter; writes w, the momentum and the kept vector.
    assert (counter.reads, counter.writes) == (6 + 2 * 4, 4 + 2 * 3)
    assert backend._save_and_add(block, [A, B], torch.ones(()))
    assert counter.reads == 14, "the methods are restored"


def test_traffic_of_lean_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six reads and four writes with SGD and momentum, as documented."""
    block = Block({"lr": 0.1}, [A], [0])
    monkeypatch.setattr(TritonBackend, "_scales", lambda self, *given: [torch.ones(())])
    monkeypatch.setattr(TritonBackend, "_step_block", lambda self, *given, **branches: None)
    base = torch.optim.SGD([torch.nn.Parameter(A)], lr=0.1)
    counter, backend = TrafficCounter(), TritonBackend(CPU, base, Weighted(), 1.0)
    plan, weights, g0, momentum = WorkPlan(block.params, CPU), [1], [2], [3]
    backend._kernel_blocks[id(block)] = KernelBlock(plan, g0, g0, plan.buffer(), torch.zeros(3))
    with memory_traffic.count_fused_kernels(counter):
        backend._scales([block], [], [[B]], True)
        backend._begin_lean_block(block, [weights, g0, g0], torch.ones(()), [momentum])
        backend._end_lean_block(block, [[4], weights, [5]])
    assert (counter.reads, counter.writes) == (6, 4)


def test_steps_without_a_kernel_are_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonBackend, "_save_and_add", lambda self, *given: False)
    counter = TrafficCounter()
    with memory_traffic.count_fused_kernels(counter):
        backend = object.__new__(TritonBackend)
        backend._save_and_add(Block({}, [A], [0]), [A], torch.ones(()))
    assert counter.reads == 0


def documented(table: str, skip: int = 0) -> dict[str, tuple[float, float]]:
    """Return reads and writes by name from a table in docs/speed.md, after `skip` columns."""
    text = SPEED.read_text().partition(f"\n| {table} |")[2].partition("\n\n")[0]
    cells = r" \d+ \|" * skip
    rows = re.findall(rf"^\| ([\w ]+?) \|{cells} (\d+) \| (\d+) \|", text, re.MULTILINE)
    return {name: (float(reads), float(writes)) for name, reads, writes in rows}


DOCUMENTED = {"SGD", "WSAM", "WSAM lean", "SAM", "CoupledWSAM", "GSAM", "ASAM", "FisherSAM"}


def test_documented_traffic_of_eager_steps() -> None:
    ours = [*cases.baseline_cases(["eager"]), *cases.method_cases(["eager"], "eager")]
    named = {case.name: case for case in [*ours, *third_party.installed_cases(["eager"])[0]]}
    table = documented("eager, on a CPU")
    assert set(table) >= DOCUMENTED
    for name, (reads, writes) in table.items():
        counted = memory_traffic.optimizer_traffic(named[name], CPU)
        assert (counted.reads, counted.writes) == pytest.approx((reads, writes)), name


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), fused=True, **BASE_ARGS)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


FUSED = {sgd: 0, adamw: 1}  # additional reads and writes compared with the documented tables
WITH_BASE = pytest.mark.parametrize("fused", FUSED, ids=lambda fused: fused.__name__)


def like_captured(method: str | None, lean: bool, fused: Fused) -> Case:
    """Return an eager case like a captured step: a fused base and tensors as hyperparameters."""

    def make(workload: Workload, form: str) -> Callable[[], object]:
        model = workload.build_model()
        base = fused(model)
        closure = cases.forward_backward(workload, model, torch.mean)
        options = (
            {}
            if method is None
            else cases.hyperparameters(method) | ({"lean": True} if lean else {})
        )
        if method == "wsam":
            options["precondition"] = False
        opt = wsam.create(method, base, model=model, **options) if method else None
        for key in ("lr", "sam_rho", "sam_gamma", "sam_alpha"):
            if key in base.param_groups[0]:
                base.param_groups[0][key] = torch.tensor(float(base.param_groups[0][key]))
        if opt is not None:
            opt._backend = None  # as in a captured step without kernels
            return lambda: opt.step(closure)
        return lambda: (base.zero_grad(), closure(), base.step())

    return Case("", "eager", "ours", make, passes=2.0 if method else 1.0)


@WITH_BASE
def test_documented_traffic_of_captured_steps(fused: Fused) -> None:
    methods = {kind.__name__: name for name, kind in wsam.METHODS.items()}
    table = documented("captured")
    assert set(table) == DOCUMENTED
    for name, (reads, writes) in table.items():
        method, more = methods.get(name.removesuffix(" lean")), FUSED[fused]
        counted = memory_traffic.optimizer_traffic(
            like_captured(method, name.endswith(" lean"), fused), CPU
        )
        assert (counted.reads, counted.writes) == pytest.approx((reads + more, writes + more)), name


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        *((name, sgd) for name in sorted(DOCUMENTED - {"SGD"})),
        *((name, adamw) for name in ("WSAM", "WSAM lean", "FisherSAM")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_documented_traffic_of_fused_steps(
    name: str, fused: Fused, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = emulated_kernels.install(monkeypatch)
    for kernel in vars(kernels).values():
        kernel.run = without_dispatch_modes(kernel.run)
    kind = name.removesuffix(" lean")
    (method,) = (method for method, found in wsam.METHODS.items() if found.__name__ == kind)

    def make(workload: Workload, form: str) -> Callable[[], object]:
        model = workload.build_model()
        base = fused(model)
        options = cases.hyperparameters(method) | ({"lean": True} if name != kind else {})
        options |= {"precondition": False} if method == "wsam" else {}
        opt = wsam.create(method, base, model=model, **options)
        emulated_kernels.attach(opt)
        closure = cases.forward_backward(workload, model, torch.mean)
        return lambda: opt.step(closure)

    counted = memory_traffic.optimizer_traffic(Case("", "eager", "ours", make), CPU)
    reads, writes = documented("captured", skip=2)[name]
    more = FUSED[fused]
    assert (counted.reads, counted.writes) == pytest.approx((reads + more, writes + more))


def reusing_step(form: str, workload: Workload) -> Callable[[], object]:
    """Return steps of WSAM that compute h on each second step: on a CPU, or as on CUDA."""
    model = workload.build_model()
    base = sgd(model) if form != "eager, on a CPU" else workload.base(model)
    opt = wsam.WSAM(base, model=model, when=Every(2), reuse=True)
    closure = cases.forward_backward(workload, model, torch.mean)
    if form == "`fuse=False`":
        for key in ("lr", "sam_rho", "sam_gamma"):
            base.param_groups[0][key] = torch.tensor(float(base.param_groups[0][key]))
        opt._backend = None
    if form == "fused":
        emulated_kernels.attach(opt)
    return lambda: opt.step(closure)


REUSE_COLUMNS = ["eager, on a CPU", "`fuse=False`", "fused"]


@pytest.mark.parametrize("form", REUSE_COLUMNS)
def test_documented_traffic_of_reused_sharpness(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "fused":
        for kernel in vars(emulated_kernels.install(monkeypatch)).values():
            kernel.run = without_dispatch_modes(kernel.run)
    workload = synthetic_workload(TENSORS, TENSORS * NUMEL, CPU)
    floor = memory_traffic._step_traffic(cases.two_passes(workload, "eager"), 1)
    step = reusing_step(form, workload)
    step()
    text = SPEED.read_text().partition("\n| WSAM with `reuse` |")[2].partition("\n\n")[0]
    for kind, passes in (("a step between", 1), ("a two-pass step", 2)):
        own = count_one(step) - floor * (passes / 2)
        (row,) = re.findall(rf"^\| {kind} \|(.*)\|$", text, re.MULTILINE)
        reads, writes = row.split("|")[REUSE_COLUMNS.index(form)].split("/")
        assert (own.reads, own.writes) == (float(reads), float(writes)), kind


def count_one(step: Callable[[], object]) -> Traffic:
    """Return the traffic of the next step."""
    counter = TrafficCounter()
    with counter, memory_traffic.count_fused_kernels(counter):
        step()
    return Traffic(counter.reads, counter.writes) * (1 / TENSORS)


def without_dispatch_modes(run: Callable[..., None]) -> Callable[..., None]:
    """Hide the torch operations of an emulated kernel from the counter."""

    def hidden(*given: object, **flags: object) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            run(*given, **flags)

    return hidden


def test_bandwidth_share() -> None:
    traffic = Traffic(reads=3, writes=2)
    assert memory_traffic.bandwidth_share(traffic, 10**6, 0.01, 4e9) == pytest.approx(0.5)
    assert memory_traffic.bandwidth_share(traffic, 10**6, -0.01, 4e9) is None


def test_copy_bandwidth_is_plausible() -> None:
    found = memory_traffic.copy_bandwidth(Timer(CPU, make_clock("wall", CPU)), 1 << 22)
    assert 1e8 < found < 1e13
