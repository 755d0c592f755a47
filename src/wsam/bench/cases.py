"""The cases of a benchmark: the floor, the plain base optimizer and our methods, in each form.

A case builds its own model and optimizer and returns a function that makes one step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wsam.accel.cuda_graph import capture, no_garbage_collection
from wsam.accel.triton_backend import triton_is_installed
from wsam.bench.workload import GAMMA, RHO, Workload
from wsam.lab.passes import FORWARD, ONE_PASS
from wsam.methods import METHODS, create
from wsam.schedule import Every
from wsam.training_step import train_step

Step = Callable[[], object]
StepFactory = Callable[[Workload, str], Step]
FLOOR, BASE, OURS, PEER = "floor", "base", "ours", "peer"
INTERVALS = (2, 5, 10)
LOOKSAM_INTERVAL = 5
ESAM_SHARE = 0.6


@dataclass(frozen=True)
class Case:
    """One row of the benchmark's table.

    Args:
        name: Name of the method or library.
        form: ``eager``, ``compiled`` (the model only) or ``captured`` (the whole step).
        kind: ``floor``, ``base``, ``ours`` or ``peer``.
        make: Builds the step for a workload and a form.
        period: The number of timed steps is a multiple of this, because the steps of an interval
            differ in cost.
        passes: Average number of forward-backward passes per step.
    """

    name: str
    form: str
    kind: str
    make: StepFactory = field(repr=False, compare=False)
    period: int = 1
    passes: float = 2.0

    @property
    def label(self) -> str:
        """Name and form."""
        return f"{self.name} ({self.form})"

    def identity(self) -> dict[str, Any]:
        """Return name, form and kind, as every row of a record has them."""
        return {"name": self.name, "form": self.form, "kind": self.kind}

    def build(self, workload: Workload) -> Step:
        """Return a function that makes one step."""
        return self.make(workload, self.form)


def forward_backward(workload: Workload, forward: Callable[..., Tensor], select: Any) -> Step:
    """Return one forward-backward pass on the workload's batch."""
    loss_fn = workload.make_loss(forward, select)

    def closure() -> Tensor:
        loss = loss_fn(*workload.batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return closure


def two_passes(workload: Workload, form: str) -> Step:
    """The floor: two forward-backward passes without an optimizer."""
    model = workload.build_model()
    params = list(model.parameters())
    closure = forward_backward(workload, workload.forward(model, form), torch.mean)

    def passes() -> None:
        for _ in range(2):
            for p in params:
                p.grad = None
            closure()

    return capture_graph(passes) if form == "captured" else passes


def capture_graph(run: Step, warm: int = 3) -> Step:
    """Capture the kernels of `run` in a CUDA graph, after `warm` calls, and return its replay."""
    warm_up(run, warm)
    graph = torch.cuda.CUDAGraph()
    with no_garbage_collection(), torch.cuda.graph(graph):
        run()
    return GraphReplay(graph, run)


def warm_up(run: Step, count: int) -> None:
    """Run on a side stream, as is necessary before a capture."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(count):
            run()
    torch.cuda.current_stream().wait_stream(stream)


@dataclass(frozen=True)
class GraphReplay:
    """Replays a CUDA graph; holds references to everything that the graph uses."""

    graph: torch.cuda.CUDAGraph
    references: object

    def __call__(self) -> None:
        """Replay the graph."""
        self.graph.replay()


def base_step(workload: Workload, form: str) -> Step:
    """The plain base optimizer: one pass and its update."""
    model = workload.build_model()
    base = workload.base(model)
    forward = workload.forward(model, form)
    if form == "captured":
        step = capture(base, workload.make_loss(forward, torch.mean), *workload.batch)
        return lambda: step(*workload.batch)
    closure = forward_backward(workload, forward, torch.mean)

    def eager_step() -> None:
        base.zero_grad()
        closure()
        base.step()

    return eager_step


def method_step(method: str, *, fuse: bool | None = None, **options: Any) -> StepFactory:
    """Return a factory for steps of one of our methods with the benchmark's hyperparameters.

    Args:
        method: Its name in `METHODS`.
        fuse: As for `capture`; eager steps ignore it.
        **options: Further arguments of the method.
    """
    options = hyperparameters(method) | options

    def make(workload: Workload, form: str) -> Step:
        model = workload.build_model()
        optimizer = create(method, workload.base(model), model=model, **options)
        select = optimizer.select if method == "esam" else torch.mean
        forward = workload.forward(model, form)
        if form == "captured":
            loss_fn = workload.make_loss(forward, select)
            step = capture(optimizer, loss_fn, *workload.batch, fuse=fuse)
            return lambda: step(*workload.batch)
        closure = forward_backward(workload, forward, select)
        return lambda: optimizer.step(closure)

    return make


def gathered_step(workload: Workload, form: str) -> Step:
    """ESAM with a second pass on the selected samples alone."""
    model = workload.build_model()
    optimizer = create("esam", workload.base(model), model=model, rho=RHO, gamma=ESAM_SHARE)
    loss_fn = workload.make_loss(workload.forward(model, form), optimizer.select)
    step = train_step(optimizer, loss_fn, capture=form == "captured")
    return lambda: step(*workload.batch)


def hyperparameters(method: str) -> dict[str, Any]:
    """Return the benchmark's hyperparameters of a method; the others keep their defaults."""
    found: dict[str, Any] = {} if method == "asam" else {"rho": RHO}
    if method == "looksam":
        found["n"] = LOOKSAM_INTERVAL
    if method in ("wsam", "coupled_wsam"):
        found["gamma"] = GAMMA
    return found


def baseline_cases(forms: Iterable[str]) -> list[Case]:
    """Return the floor and the plain base optimizer in each form."""
    cases = []
    for form in forms:
        cases.append(Case("two passes", form, FLOOR, two_passes))
        cases.append(Case("SGD", form, BASE, base_step, passes=1.0))
    return cases


def method_cases(forms: Iterable[str], best: str) -> list[Case]:
    """Return our cases: WSAM and SAM in each form; the other methods and intervals in form `best`."""
    cases = []
    for form in forms:
        cases.append(method_case("wsam", form))
        if form != "compiled":
            cases.append(lean_case(form))
            cases.append(method_case("sam", form))
        if form == "captured" and triton_is_installed():
            for method in ("wsam", "sam"):
                name = f"{METHODS[method].__name__} not fused"
                cases.append(Case(name, form, OURS, method_step(method, fuse=False)))
    cases += [method_case(method, best) for method in METHODS if method not in ("wsam", "sam")]
    return cases + [interval_case(n, best) for n in INTERVALS]


def every_method(forms: Iterable[str]) -> list[Case]:
    """Return all methods and their cheaper variants, in each form."""
    cases = []
    for form in forms:
        cases += [method_case(method, form) for method in METHODS]
        cases.append(lean_case(form))
        cases += [interval_case(n, form, reuse=True) for n in INTERVALS]
        # One pass, a forward pass to select samples, and a pass on these.
        passes = 1 + FORWARD + ESAM_SHARE
        cases.append(Case("ESAM gathered", form, OURS, gathered_step, passes=passes))
    return cases


def method_case(method: str, form: str) -> Case:
    """Return a method without further options."""
    make, name = method_step(method), METHODS[method].__name__
    if method == "looksam":
        n = LOOKSAM_INTERVAL
        return Case(name, form, OURS, make, period=n, passes=1 + 1 / n)
    return Case(name, form, OURS, make, passes=1.0 if method in ONE_PASS else 2.0)


def lean_case(form: str) -> Case:
    """Return WSAM whose base steps between the passes."""
    return Case("WSAM lean", form, OURS, method_step("wsam", lean=True))


def interval_case(n: int, form: str, reuse: bool = False) -> Case:
    """Return WSAM at every n-th step; the steps between are those of the base, or reuse h."""
    make = method_step("wsam", when=Every(n), reuse=reuse)
    name = f"WSAM reuse {n}" if reuse else f"WSAM every {n}"
    return Case(name, form, OURS, make, period=n, passes=1 + 1 / n)


def select_cases(cases: list[Case], only: Iterable[str]) -> list[Case]:
    """Return the cases whose label begins with one of the given prefixes, and their baselines.

    Raises:
        ValueError: A prefix matches no case, or two cases have the same name and form.
    """
    labels = Counter(case.label for case in cases)
    for case in cases:
        if labels[case.label] > 1:  # a file of the user: its times would replace the other's
            raise ValueError(f"--peer {case.name}: another case has this name; choose another one")
    prefixes = [prefix.lower() for prefix in only]
    if not prefixes:
        return cases
    for prefix in prefixes:
        if not any(case.label.lower().startswith(prefix) for case in cases):
            names = ", ".join(dict.fromkeys(case.name for case in cases))
            raise ValueError(f"--only {prefix} fits no case; there are {names}")
    selected = [c for c in cases if c.label.lower().startswith(tuple(prefixes))]
    forms = {case.form for case in selected}
    return [c for c in cases if c in selected or (c.kind in (FLOOR, BASE) and c.form in forms)]
