"""The bench's instruments: timing, traffic and memory tell the truth on cases that are known."""

import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import emulated
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wsam
from wsam import aside
from wsam.bench import cases, memory, peers, traffic
from wsam.bench.cases import Case
from wsam.bench.problem import BASE, Problem, image_problem
from wsam.bench.timing import Spread, Visitor, Visits, clock_of, differences, interleave, ratios
from wsam.bench.traffic import ODD, Moved, Traffic
from wsam.block import Block
from wsam.kernels import Begun, Kernels
from wsam.plan import Plan
from wsam.rule import Weighted

CPU = torch.device("cpu")
Fused = Callable[[torch.nn.Module], torch.optim.Optimizer]
SPEED = Path(__file__).parents[2] / "docs" / "speed.md"


# --- timing --------------------------------------------------------------------------------------


class Time:
    """A clock that steps move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.made: Counter[str] = Counter()
        self.order: list[str] = []

    def step(self, name: str, cost: float) -> Callable[[], None]:
        def run() -> None:
            self.now += cost
            self.made[name] += 1
            if not self.order or self.order[-1] != name:
                self.order.append(name)

        return run


def test_interleaving_measures_what_steps_cost() -> None:
    time = Time()
    steps = {"a": time.step("a", 1.0), "b": time.step("b", 0.25), "c": time.step("c", 3.0)}
    visits = Visits(rounds=6, seconds=2.0, warmup=2)
    periods = {"a": 1, "b": 5, "c": 1}
    found = interleave(steps, periods, visits, Visitor(CPU, lambda: time.now))
    assert found == {"a": [1.0] * 6, "b": [0.25] * 6, "c": [3.0] * 6}
    assert ratios(found["c"], found["b"]) == Spread(12, 12, 12)
    assert differences(found["c"], found["a"], 0.5) == Spread(2.5, 2.5, 2.5)
    # 2 periods of warm-up, 1 to calibrate, then 6 visits of at least 2 seconds, in whole periods.
    assert time.made == {"a": 3 + 6 * 2, "b": 15 + 6 * 10, "c": 3 + 6 * 1}


def test_rounds_visit_every_case_in_changing_order() -> None:
    time = Time()
    names = "abcde"
    steps = {name: time.step(name, 1.0) for name in names}
    interleave(steps, dict.fromkeys(names, 1), Visits(8, 0.0), Visitor(CPU, lambda: time.now))
    orders = {tuple(time.order[i : i + 5]) for i in range(5, len(time.order) - 5, 5)}
    assert len(orders) > 3


def test_a_slow_spell_leaves_ratios_alone() -> None:
    """Both cases slow down together from the third round on: medians move, the ratio does not."""
    time, factor = Time(), [1.0]

    def step(cost: float) -> Callable[[], None]:
        def run() -> None:
            time.now += cost * factor[0]

        return run

    def follow(line: str) -> None:
        factor[0] = 7.0 if line.startswith(("round 3", "round 4", "round 5")) else 1.0

    steps = {"a": step(1.0), "b": step(2.0)}
    visitor = Visitor(CPU, lambda: time.now)
    found = interleave(steps, {"a": 1, "b": 1}, Visits(5, 0.0), visitor, follow)
    assert Spread.of(found["a"]).median == 7
    assert ratios(found["b"], found["a"]) == Spread(2, 2, 2)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_spread_is_median_and_quartiles(values: list[float]) -> None:
    found = Spread.of(values)
    assert found.median == pytest.approx(statistics.median(values), abs=1e-6)
    assert min(values) - 1e-6 <= found.low <= found.median <= found.high <= max(values) + 1e-6


def test_cpu_clock_does_not_see_sleep() -> None:
    import time

    clock = clock_of("cpu", CPU)
    assert Visitor(CPU, clock).visit(lambda: time.sleep(0.2), 1) < 0.1


# --- traffic -------------------------------------------------------------------------------------

A, B = torch.zeros(ODD), torch.zeros(ODD)
OPERATIONS: dict[str, tuple[Callable[[], object], int, int]] = {
    "add_": (lambda: A.add_(B), 2, 1),
    "add": (lambda: A + B, 2, 1),
    "copy_": (lambda: A.copy_(B), 1, 1),
    "add out": (lambda: torch.add(A, A, out=B), 2, 1),
    "zero_": (A.zero_, 0, 1),
    "clone": (A.clone, 1, 1),
    "empty_like": (lambda: torch.empty_like(A), 0, 0),
    "view": (lambda: A.view(1, ODD), 0, 0),
    "norm": (A.norm, 1, 0),
    "small": (lambda: torch.ones(3) + 1, 0, 0),
    "foreach_add_": (lambda: torch._foreach_add_([A, B], [B, A], alpha=0.1), 4, 2),
    "foreach_mul": (lambda: torch._foreach_mul([A, B], 2.0), 2, 2),
    "foreach_copy_": (lambda: torch._foreach_copy_([A], [B]), 1, 1),
    "foreach_norm": (lambda: torch._foreach_norm([A, B]), 2, 0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_traffic_of_single_operations(name: str) -> None:
    operation, reads, writes = OPERATIONS[name]
    counter = Moved()
    with counter:
        operation()
    assert (counter.reads, counter.writes) == (reads, writes)


def test_traffic_of_a_fused_base() -> None:
    """`_fused_sgd_` may write into gradients by its schema; without a GradScaler it does not."""
    p = torch.nn.Parameter(torch.zeros(ODD))
    base = torch.optim.SGD([p], lr=0.1, momentum=0.9, fused=True)
    counter = Moved()
    for _ in range(2):
        p.grad = torch.ones(ODD)
        counter = Moved()
        with counter:
            base.step()
    assert (counter.reads, counter.writes) == (3, 2)


def test_traffic_of_fused_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that torch does not see are counted by what they are given."""
    block = Block({"lr": 0.1}, [A, B], [0, 1])
    monkeypatch.setattr(Kernels, "scales", lambda self, *given: [torch.ones(())])
    monkeypatch.setattr(Kernels, "save_and_add", lambda self, block, direction, scale: True)
    monkeypatch.setattr(Kernels, "_finish_block", lambda self, *given: None)
    counter, kernels = Moved(), object.__new__(Kernels)
    with traffic.fused_kernels(counter):
        kernels.scales([block], [[A, B]])
        assert (counter.reads, counter.writes) == (2, 0)
        assert kernels.save_and_add(block, [A, B], torch.ones(()))
        assert (counter.reads, counter.writes) == (6, 4)
        saved, weights, second, first = [A, B], [A, B], [A, B], [A, B]
        kernels._finish_block(block, [saved, weights, second, first], [[A, B]], [])
    # Of each parameter w, g1, g0 and the momentum are read, w and the momentum written.
    assert (counter.reads, counter.writes) == (6 + 2 * 4, 4 + 2 * 2)
    assert kernels.save_and_add(block, [A, B], torch.ones(()))
    assert counter.reads == 14, "what is measured is put back as it was"


def test_traffic_of_the_lean_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six reads and four writes over SGD with momentum, as the page says."""
    block = Block({"lr": 0.1}, [A], [0])
    monkeypatch.setattr(Kernels, "scales", lambda self, *given: [torch.ones(())])
    monkeypatch.setattr(Kernels, "_step", lambda self, *given, **flags: None)
    base = torch.optim.SGD([torch.nn.Parameter(A)], lr=0.1)
    counter, kernels = Moved(), Kernels(CPU, base, Weighted(), 1.0)
    first, plan = [B], Plan(block.params, CPU)
    kernels._begun[id(block)] = Begun(plan, first, [0], plan.piece(), torch.zeros(3))
    with traffic.fused_kernels(counter):
        kernels.scales([block], [first])
        kernels._begin_lean(block, [[A], first, first], torch.ones(()), [[A]])
        kernels._end_lean(block, [block.saved, [A], [B]])
    assert (counter.reads, counter.writes) == (6, 4)


def test_tensors_that_do_not_fit_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernels, "save_and_add", lambda self, block, direction, scale: False)
    counter = Moved()
    with traffic.fused_kernels(counter):
        object.__new__(Kernels).save_and_add(Block({}, [A], [0]), [A], torch.ones(()))
    assert counter.reads == 0


def documented(table: str, skip: int = 0) -> dict[str, tuple[float, float]]:
    """The rows of one of the page's tables of traffic: name, reads, writes; after so many columns."""
    text = SPEED.read_text().partition(f"\n| {table} |")[2].partition("\n\n")[0]
    cells = r" \d+ \|" * skip
    rows = re.findall(rf"^\| ([\w ]+?) \|{cells} (\d+) \| (\d+) \|", text, re.MULTILINE)
    return {name: (float(reads), float(writes)) for name, reads, writes in rows}


CHIEF = {"SGD", "WSAM", "WSAM lean", "SAM", "CoupledWSAM", "GSAM", "ASAM", "FisherSAM"}


def test_documented_traffic_is_counted() -> None:
    ours = [*cases.floors(["eager"]), *cases.ours(["eager"], "eager")]
    named = {case.name: case for case in [*ours, *peers.installed(["eager"])[0]]}
    table = documented("eager, on a CPU")
    assert set(table) >= CHIEF
    for name, (reads, writes) in table.items():
        moved = traffic.count(named[name], CPU)
        assert (moved.reads, moved.writes) == pytest.approx((reads, writes)), name


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), fused=True, **BASE)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


FUSED = {sgd: 0, adamw: 1}  # and so many reads and writes more than the page's tables, it says
OVER = pytest.mark.parametrize("fused", FUSED, ids=lambda fused: fused.__name__)


def like_captured(method: str | None, lean: bool, fused: Fused) -> Case:
    """What a captured step runs: a fused base, and tensors for what may change."""

    def make(problem: Problem, form: str) -> Callable[[], object]:
        model = problem.build()
        base = fused(model)
        closure = cases.backward_of(problem, model, torch.mean)
        options = (
            {} if method is None else cases.options_of(method) | ({"lean": True} if lean else {})
        )
        opt = wsam.create(method, base, model=model, **options) if method else None
        for key in ("lr", "sam_rho", "sam_gamma", "sam_alpha"):
            if key in base.param_groups[0]:
                base.param_groups[0][key] = torch.tensor(float(base.param_groups[0][key]))
        if opt is not None:
            return lambda: opt.step(closure)
        return lambda: (base.zero_grad(), closure(), base.step())

    return Case("", "eager", "ours", make, passes=2.0 if method else 1.0)


@OVER
def test_documented_traffic_of_captured_steps(
    fused: Fused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aside, "ALONE", None)  # on CUDA weights are copied
    methods = {kind.__name__: name for name, kind in wsam.METHODS.items()}
    table = documented("captured")
    assert set(table) == CHIEF
    for name, (reads, writes) in table.items():
        method, more = methods.get(name.removesuffix(" lean")), FUSED[fused]
        moved = traffic.count(like_captured(method, name.endswith(" lean"), fused), CPU)
        assert (moved.reads, moved.writes) == pytest.approx((reads + more, writes + more)), name


@OVER
@pytest.mark.parametrize("name", sorted(CHIEF - {"SGD"}))
def test_documented_traffic_of_fused_steps(
    name: str, fused: Fused, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated.install(monkeypatch)
    monkeypatch.setattr(aside, "ALONE", None)
    kind = name.removesuffix(" lean")
    (method,) = (method for method, found in wsam.METHODS.items() if found.__name__ == kind)

    def make(problem: Problem, form: str) -> Callable[[], object]:
        model = problem.build()
        base = fused(model)
        options = cases.options_of(method) | ({"lean": True} if name != kind else {})
        opt = wsam.create(method, base, model=model, **options)
        emulated.attach(opt)
        closure = cases.backward_of(problem, model, torch.mean)
        return lambda: opt.step(closure)

    with monkeypatch.context() as quiet:
        for kernel in vars(sys.modules["wsam._triton"]).values():
            quiet.setattr(kernel, "run", unseen(kernel.run))
        moved = traffic.count(Case("", "eager", "ours", make), CPU)
    reads, writes = documented("captured", skip=2)[name]
    more = FUSED[fused]
    assert (moved.reads, moved.writes) == pytest.approx((reads + more, writes + more))


def unseen(run: Callable[..., None]) -> Callable[..., None]:
    """Let the counter not see what an emulated kernel does in torch."""

    def hidden(*given: object, **flags: object) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            run(*given, **flags)

    return hidden


def test_share_of_bandwidth() -> None:
    moved = Traffic(reads=3, writes=2)
    assert traffic.share_of_bandwidth(moved, 10**6, 0.01, 4e9) == pytest.approx(0.5)
    assert traffic.share_of_bandwidth(moved, 10**6, -0.01, 4e9) is None


def test_copy_bandwidth_is_of_this_world() -> None:
    found = traffic.copy_bandwidth(Visitor(CPU, clock_of("wall", CPU)), 1 << 22)
    assert 1e8 < found < 1e13


# --- memory --------------------------------------------------------------------------------------


def test_live_bytes_sees_what_is_alive() -> None:
    known = torch.zeros(100)
    counter = memory.LiveBytes([known])
    with counter:
        a = torch.zeros(1000)
        b = a + 1
        assert counter.live() == 4 * 2100
        view = b[:10]
        del a, b
        assert counter.live() == 4 * 1100, "a view keeps its storage"
        del view
        torch.zeros(1)
    assert counter.live() == 400
    assert counter.peak >= 4 * 2100


def test_peak_memory_beyond_the_base() -> None:
    """Where activations make the peak: SAM one copy of the weights, WSAM two, lean one."""
    problem = image_problem("cnn", 16, CPU)
    count = problem.facts()["weights"]
    chosen = [*cases.floors(["eager"])[1:], *cases.ours(["eager"], "eager")]
    rows = memory.peaks(problem, [c for c in chosen if c.period == 1], 4 * count)
    found = {row["name"]: row["copies_beyond_base"] for row in rows}
    wanted = {"SGD": 0, "SAM": 1, "WSAM lean": 1, "WSAM": 2, "CoupledWSAM": 2, "GSAM": 2, "ASAM": 1}
    for name, copies in wanted.items():
        assert math.isclose(found[name], copies, abs_tol=0.05), (name, found[name])
