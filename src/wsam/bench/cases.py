"""What is compared: the floor, the plain base, our members and intervals, in each form.

A case builds a model and an optimizer of its own and returns a function that makes one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wsam import launch
from wsam.bench.problem import GAMMA, RHO, Problem
from wsam.graph import capture
from wsam.methods import METHODS, create
from wsam.schedule import Every

Step = Callable[[], object]
FLOOR, BASE, OURS, PEER = "floor", "base", "ours", "peer"
INTERVALS = (2, 5, 10)


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Args:
        name: What it is.
        form: ``eager``, ``compiled`` (the model only) or ``captured`` (the whole step).
        kind: ``floor``, ``base``, ``ours`` or ``peer``.
        make: Builds it for a problem and a form.
        period: A visit makes a multiple of so many steps: an interval's steps differ in cost.
        passes: Forward-backward passes per step, on average.
    """

    name: str
    form: str
    kind: str
    make: Callable[[Problem, str], Step] = field(repr=False, compare=False)
    period: int = 1
    passes: float = 2.0

    @property
    def label(self) -> str:
        """Name and form."""
        return f"{self.name} ({self.form})"

    def build(self, problem: Problem) -> Step:
        """Return a function that makes one step."""
        return self.make(problem, self.form)


def backward_of(problem: Problem, forward: Callable[..., Tensor], select: Any) -> Step:
    """Return one forward-backward pass on the problem's batch."""
    loss_fn = problem.loss(forward, select)

    def closure() -> Tensor:
        loss = loss_fn(*problem.batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return closure


def two_passes(problem: Problem, form: str) -> Step:
    """The floor: two forward-backward passes and nothing else."""
    model = problem.build()
    params = list(model.parameters())
    closure = backward_of(problem, problem.forward(model, form), torch.mean)

    def passes() -> None:
        for _ in range(2):
            for p in params:
                p.grad = None
            closure()

    return recorded(passes) if form == "captured" else passes


def recorded(run: Callable[[], None]) -> Step:
    """Record what `run` launches into a CUDA graph and return its replay."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return Replay(graph, run)


@dataclass(frozen=True)
class Replay:
    """A recorded graph, and what must stay alive as long as it does."""

    graph: torch.cuda.CUDAGraph
    kept: object

    def __call__(self) -> None:
        """Run what was recorded."""
        self.graph.replay()


def base_step(problem: Problem, form: str) -> Step:
    """The plain base optimizer: one pass and its update."""
    model = problem.build()
    base = problem.base(model)
    forward = problem.forward(model, form)
    if form == "captured":
        step = capture(base, problem.loss(forward, torch.mean), *problem.batch)
        return lambda: step(*problem.batch)
    closure = backward_of(problem, forward, torch.mean)

    def plain() -> None:
        base.zero_grad()
        closure()
        base.step()

    return plain


def member(
    method: str, *, fuse: bool | None = None, **options: Any
) -> Callable[[Problem, str], Step]:
    """Return what builds a member of the family with its options; `fuse` is of a captured step."""

    def make(problem: Problem, form: str) -> Step:
        model = problem.build()
        optimizer = create(method, problem.base(model), model=model, **options)
        select = optimizer.select if method == "esam" else torch.mean
        forward = problem.forward(model, form)
        if form == "captured":
            loss_fn = problem.loss(forward, select)
            step = capture(optimizer, loss_fn, *problem.batch, fuse=fuse)
            return lambda: step(*problem.batch)
        closure = backward_of(problem, forward, select)
        return lambda: optimizer.step(closure)

    return make


def options_of(method: str) -> dict[str, Any]:
    """Return the radius and weight that all cases share, where the method has them."""
    options: dict[str, Any] = {} if method == "asam" else {"rho": RHO}
    return {**options, "gamma": GAMMA} if method in ("wsam", "coupled_wsam") else options


def title(method: str) -> str:
    """Return a member's class name."""
    return METHODS[method].__name__


def floors(forms: Iterable[str]) -> list[Case]:
    """Return the floor and the plain base in each form."""
    cases = []
    for form in forms:
        cases.append(Case("two passes", form, FLOOR, two_passes))
        cases.append(Case("SGD", form, BASE, base_step, passes=1.0))
    return cases


def ours(forms: Iterable[str], best: str) -> list[Case]:
    """Return our cases: the chief ones in each form, the whole family and intervals in the best."""
    cases = []
    for form in forms:
        cases.append(Case("WSAM", form, OURS, member("wsam", **options_of("wsam"))))
        if form != "compiled":
            lean = member("wsam", lean=True, **options_of("wsam"))
            cases.append(Case("WSAM lean", form, OURS, lean))
            cases.append(Case("SAM", form, OURS, member("sam", **options_of("sam"))))
        if form == "captured" and launch.available():
            for method in ("wsam", "sam"):
                foreach = member(method, fuse=False, **options_of(method))
                cases.append(Case(f"{title(method)} not fused", form, OURS, foreach))
    for method in METHODS:
        if method not in ("wsam", "sam"):
            cases.append(Case(title(method), best, OURS, member(method, **options_of(method))))
    return cases + [interval(n, best) for n in INTERVALS]


def interval(n: int, form: str) -> Case:
    """Return WSAM on every n-th step; the others are the base's."""
    make = member("wsam", when=Every(n), **options_of("wsam"))
    return Case(f"WSAM every {n}", form, OURS, make, period=n, passes=1 + 1 / n)


def chosen(cases: list[Case], only: Iterable[str]) -> list[Case]:
    """Return the cases whose label begins with one of the given words, and their forms' floors.

    Raises:
        ValueError: A word that fits no case.
    """
    wanted = [word.lower() for word in only]
    if not wanted:
        return cases
    for word in wanted:
        if not any(case.label.lower().startswith(word) for case in cases):
            names = ", ".join(dict.fromkeys(case.name for case in cases))
            raise ValueError(f"--only {word} fits no case; there are {names}")
    left = [c for c in cases if any(c.label.lower().startswith(word) for word in wanted)]
    forms = {case.form for case in left}
    return [c for c in cases if c in left or (c.kind in (FLOOR, BASE) and c.form in forms)]
