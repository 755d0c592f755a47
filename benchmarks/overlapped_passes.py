"""WSAM whose pass at w + d runs next to the following steps' passes, on a second CUDA stream.

    python benchmarks/overlapped_passes.py --start 0.25 --seeds 0 1 2 --data-dir DATA --out OUT

An experiment on the cost of sharpness. ResNet18 on CIFAR-10 does not fill a large GPU, so two passes
that do not need each other's results may take less time than twice that of one; the program measures
it first. The gradient at w + d of one step is computed while the next n steps are made, and used from
the last of these on:

    at every n-th step     g = grad l(w),    v = w + rho g / norm(g)
    in the next n steps    g1 = grad l(v) with the same batch as g, on the second stream
    then                   h = g1 - g, which the n updates from then on apply: w - base(.) - lr k h

This is `WSAM(base, when=Every(n), reuse=True)` with an h that is n steps late. n steps are one CUDA
graph. The base may train alone at first. All other settings are those of `wsam paper run cheap`.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from wsam.lab.callbacks import LogLines
from wsam.lab.data.datasets import DataSource
from wsam.lab.distributed import init_distributed
from wsam.lab.execution import ExecutionConfig
from wsam.lab.run import Run
from wsam.lab.settings import VANILLA
from wsam.lab.step import Objective, Stepper, cudnn_settings
from wsam.lab.trainer import Trainer
from wsam.paper.cheap import BUDGET, IN_BUDGET
from wsam.paper.cifar import EPOCHS
from wsam.paper.registry import find

EAGER_CALLS = 3
"""How often the steps run before they are captured."""
TIMED_STEPS, TIMED_ROUNDS = 120, 5

Pass = tuple[Tensor, Tensor, list[Tensor]]
"""Loss, counts and gradients."""


class GraphedSteps:
    """Calls a function that takes no arguments, the first times eagerly and then as a CUDA graph."""

    def __init__(
        self, make_steps: Callable[[], tuple[Tensor, ...]], stream: torch.cuda.Stream
    ) -> None:
        self.make_steps, self.stream, self.calls = make_steps, stream, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: tuple[Tensor, ...] = ()

    def __call__(self) -> tuple[Tensor, ...]:
        """Return the function's result."""
        self.calls += 1
        if self.calls <= EAGER_CALLS:
            current = torch.cuda.current_stream()
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                result = self.make_steps()
            current.wait_stream(self.stream)
            return result
        if self.graph is None:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.result = self.make_steps()
        self.graph.replay()
        return self.result


class OverlappedStepper(Stepper):
    """Makes n steps when it has n batches.

    Args:
        optimizer: A `wsam.WSAM` around `torch.optim.SGD`. Only its hyperparameters are used.
        objective: Computes the loss of a batch.
        capture: Replay the steps from a CUDA graph.
        n: A pass at w + d belongs to every n-th step.
        priority: Give the passes at w priority over that at w + d.
        start: The base makes this many steps alone, a multiple of n.
    """

    def __init__(
        self,
        optimizer: Any,
        objective: Objective,
        capture: bool,
        n: int,
        priority: bool,
        start: int = 0,
    ) -> None:
        self.device, self.capture, self.objective, self.n = objective.device, capture, objective, n
        self.start, self.made = start, 0
        (self.group,) = optimizer.param_groups
        objective.select = torch.mean
        second_model = copy.deepcopy(optimizer.model)
        self.second_objective = copy.copy(objective)
        self.second_objective.model = (
            second_model
            if objective.model is optimizer.model
            else torch.compile(second_model, dynamic=False)
        )
        self.params: list[Tensor] = [*optimizer.model.parameters()]
        self.perturbed: list[Tensor] = [*second_model.parameters()]
        self.momentum, self.h, self.g0 = (
            [torch.zeros_like(p) for p in self.params] for _ in range(3)
        )
        self.loss_at_w = torch.zeros((), device=self.device)
        self.has_second_gradient = torch.zeros((), device=self.device)
        self.rho, self.k = float(optimizer.rho), optimizer.gamma / (1 - optimizer.gamma)
        self.rates = torch.zeros(n, device=self.device)
        self.batches: list[tuple[Tensor, Tensor]] = []
        self.received = 0
        self.graphed: dict[bool, GraphedSteps] = {}
        if self.device.type == "cuda":
            self.main = torch.cuda.Stream(priority=-1 if priority else 0)
        self.side = torch.cuda.Stream() if self.device.type == "cuda" else None
        self.reset_totals()

    def __call__(self, inputs: Tensor, targets: Tensor) -> None:
        """Receive a batch; make n steps if it is the last of n."""
        if not self.batches:  # the last is that of the pass at w + d
            self.batches = [(inputs.clone(), targets.clone()) for _ in range(self.n + 1)]
        for tensor, given in zip(self.batches[self.received], (inputs, targets), strict=True):
            tensor.copy_(given)
        self.rates[self.received] = self.group["lr"]
        self.received = (self.received + 1) % self.n
        if self.received == 0:
            loss, counts, sharpness, measured = self._replay(self.made >= self.start)
            self.made += self.n
            self.totals.loss += loss
            self.totals.counts += counts
            self.totals.sharpness += sharpness
            self.totals.measured += measured
            self.totals.steps += self.n

    def _replay(self, sharp: bool) -> tuple[Tensor, ...]:
        """Make n steps, eagerly or from a graph."""
        if not self.capture:
            return self._make_steps(sharp)
        if sharp not in self.graphed:
            self.graphed[sharp] = GraphedSteps(lambda: self._make_steps(sharp), self.main)
        return self.graphed[sharp]()

    def _make_steps(self, sharp: bool) -> tuple[Tensor, ...]:
        """Make n steps; return the sums of loss and counts, the sharpness and whether it is known."""
        *batches, batch_of_g0 = self.batches
        current = torch.cuda.current_stream() if self.device.type == "cuda" else None
        if sharp:
            if current:
                self.side.wait_stream(current)
            with torch.cuda.stream(self.side):
                loss_1, _, g1 = self._pass(self.second_objective, self.perturbed, batch_of_g0)
        losses, counts = [], []
        sharpness = measured = torch.zeros((), device=self.device)
        for i, batch in enumerate(batches):
            loss, count, gradient = self._pass(self.objective, self.params, batch)
            losses.append(loss)
            counts.append(count)
            if sharp and i == self.n - 1:
                if current:
                    current.wait_stream(self.side)
                sharpness, measured = self._exchange(loss_1, g1, loss, gradient, batch)
            self._update(gradient, self.rates[i], sharp)
        return torch.stack(losses).sum(), torch.stack(counts).sum(0), sharpness, measured

    def _pass(
        self, objective: Objective, params: list[Tensor], batch: tuple[Tensor, Tensor]
    ) -> Pass:
        loss, counts = objective(*batch)
        return loss.detach(), cast(Tensor, counts), [*torch.autograd.grad(loss, params)]

    @torch.no_grad()
    def _exchange(
        self,
        loss_1: Tensor,
        g1: list[Tensor],
        loss: Tensor,
        gradient: list[Tensor],
        batch: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Compute h of the pass that has ended, and prepare the next one; return its sharpness."""
        measured = self.has_second_gradient.clone()  # 0 in the first call
        torch._foreach_copy_(self.h, torch._foreach_mul(torch._foreach_sub(g1, self.g0), measured))
        sharpness = (loss_1 - self.loss_at_w) * measured
        norm = torch.stack(torch._foreach_norm(gradient)).square().sum().sqrt()
        move = torch._foreach_mul(gradient, self.rho / (norm + 1e-12))
        torch._foreach_copy_(self.perturbed, torch._foreach_add(self.params, move))
        torch._foreach_copy_(self.g0, gradient)
        for tensor, given in zip(self.batches[-1], batch, strict=True):
            tensor.copy_(given)
        self.loss_at_w.copy_(loss)
        self.has_second_gradient.fill_(1.0)
        return sharpness, measured

    @torch.no_grad()
    def _update(self, gradient: list[Tensor], rate: Tensor, sharp: bool) -> None:
        """Make the base's step, and apply the sharpness term if `sharp`."""
        torch._fused_sgd_(
            self.params,
            gradient,
            self.momentum,
            weight_decay=self.group["weight_decay"],
            momentum=self.group["momentum"],
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )
        if sharp:
            torch._foreach_sub_(self.params, torch._foreach_mul(self.h, self.k * rate))


class OverlappedTrainer(Trainer):
    """A `Trainer` that makes its steps with an `OverlappedStepper`."""

    n, priority, start = 2, True, 0.0

    def _make_stepper(self) -> Stepper:
        model: Any = self.model
        if self.compiled:
            model = torch.compile(model, dynamic=False)
        objective = Objective(model, torch.mean, self.run.precision, self.device)
        start = round(self.start * self.run.epochs * self.feed.steps / self.n) * self.n
        return OverlappedStepper(
            self.optimizer, objective, self.captured, self.n, self.priority, start
        )


def seconds_per_step(
    run: Run, execution: ExecutionConfig, forms: Sequence[tuple[int, bool]]
) -> dict[str, float]:
    """Return the median time of a captured step of SGD, and of each form (n, priority)."""
    steppers: dict[str, tuple[Stepper, Any]] = {}
    with init_distributed(execution.device) as (context, _), cudnn_settings(torch.device("cuda")):
        for form in (None, *forms):
            kind = Trainer if form is None else OverlappedTrainer
            chosen = run.replace(method=VANILLA, hyper={}, options={}) if form is None else run
            trainer = kind(chosen, Path("unused"), execution, (), context)
            if form is None:
                name = "SGD"
            else:
                trainer.n, trainer.priority = form  # type: ignore[attr-defined]
                name = f"n={form[0]}" + (", priority" if form[1] else "")
            batch = next(iter(trainer.feed.epoch()))
            steppers[name] = trainer._make_stepper(), [tensor.clone() for tensor in batch]
        times: dict[str, list[float]] = {name: [] for name in steppers}
        for number in range(TIMED_ROUNDS + 1):
            for name, (stepper, batch) in steppers.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(TIMED_STEPS):
                    stepper(*batch)
                torch.cuda.synchronize()
                if number:  # the first round compiles and captures
                    times[name].append((time.perf_counter() - start) / TIMED_STEPS)
    return {name: statistics.median(found) for name, found in times.items()}


def run_of(seed: int, epochs: int, start: float) -> Run:
    """Return the settings that the experiment shares with the study."""
    cell = find("cheap").cell((IN_BUDGET,), "CIFAR-10")
    assert cell is not None
    run = next(run for run in cell.runs if run.seed == seed)
    options = {**run.options, "start": start} if start else run.options
    return run.replace(epochs=epochs, options=options)


def main() -> None:
    """Time the steps, choose the number of epochs that the budget allows, and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--n", type=int, default=2)
    parser.add_argument("--budget", type=float, default=BUDGET, help="of SGD's training time")
    parser.add_argument("--start", type=float, default=0.0, help="share of the steps of SGD alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--give-up", type=float, default=100.0, help="train no other seed after a higher error (%%)"
    )
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch._dynamo.config.recompile_limit = 64  # one version for each of the models
    execution = ExecutionConfig(
        source=DataSource(options.data_dir), checkpoint_seconds=float("inf")
    )
    forms = [(n, priority) for n in (options.n, 3) for priority in (False, True)]
    seconds = seconds_per_step(run_of(0, EPOCHS, 0.0), execution, forms)
    ratios = {name: value / seconds["SGD"] for name, value in seconds.items()}
    plain, prioritized = ratios[f"n={options.n}"], ratios[f"n={options.n}, priority"]
    cost = options.start + (1 - options.start) * min(plain, prioritized)
    epochs = min(EPOCHS, int(0.99 * options.budget / cost * EPOCHS))
    timing = {
        "n": options.n,
        "start": options.start,
        "priority": prioritized < plain,
        "seconds_per_step": seconds,
        "ratios": ratios,
        "epochs": epochs,
    }
    print(json.dumps(timing), flush=True)
    (options.out / "overlapped-timing.json").write_text(json.dumps(timing, indent=1) + "\n")
    OverlappedTrainer.n, OverlappedTrainer.start = options.n, options.start
    OverlappedTrainer.priority = prioritized < plain
    with init_distributed(execution.device) as (context, _):
        for seed in options.seeds:
            run = run_of(seed, epochs, options.start)
            trainer = OverlappedTrainer(run, options.out, execution, (LogLines(),), context)
            record = trainer.train()
            record["overlapped"] = timing
            path = options.out / f"overlapped-{epochs}-seed{seed}.json"
            path.write_text(json.dumps(record, indent=1) + "\n")
            if record["final"]["test_error"] > options.give_up:
                break


if __name__ == "__main__":
    main()
