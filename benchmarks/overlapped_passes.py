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
graph. All other settings are those of `wsam paper run cheap`. Two options lower the cost further: the
base may train alone at first (`--start`), and only the last blocks may be perturbed (`--tail`). Then
the pass at w + d begins with the features that enter these, and the layers before have no h.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from wsam.lab.callbacks import LogLines
from wsam.lab.data.datasets import DataSource
from wsam.lab.distributed import init_distributed
from wsam.lab.execution import ExecutionConfig
from wsam.lab.models import ResNet18
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
SHARE_OF_STEPS = 0.975
"""Share of the timed steps in the time of training: epochs took 2% longer than their steps alone."""

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


class Split:
    """A model in two parts, of which the first may be empty; keeps the first part's last output.

    Args:
        head: The first layers; None if all belong to `tail`.
        tail: The other layers.
    """

    def __init__(self, head: Callable[[Tensor], Tensor] | None, tail: Callable[[Tensor], Tensor]):
        self.head, self.tail = head, tail

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the model's output."""
        self.features = inputs if self.head is None else self.head(inputs)
        return self.tail(self.features)


class OverlappedStepper(Stepper):
    """Makes n steps when it has n batches.

    Args:
        optimizer: A `wsam.WSAM` around `torch.optim.SGD`. Only its hyperparameters are used.
        objective: Computes the loss of a batch.
        capture: Replay the steps from a CUDA graph.
        n: A pass at w + d belongs to every n-th step.
        head: The layers that are not perturbed and have no h; None for none.
        tail: The other layers.
        priority: Give the passes at w priority over that at w + d.
        start: The base makes this many steps alone, a multiple of n.
        compiled: Compile both parts.
    """

    def __init__(
        self,
        optimizer: Any,
        objective: Objective,
        capture: bool,
        n: int,
        head: nn.Module | None,
        tail: nn.Module,
        priority: bool = False,
        start: int = 0,
        compiled: bool = False,
    ) -> None:
        self.device, self.capture, self.objective, self.n = objective.device, capture, objective, n
        self.start, self.made = start, 0
        (self.group,) = optimizer.param_groups
        self.params: list[Tensor] = [*optimizer.model.parameters()]
        self.tail_params: list[Tensor] = [*tail.parameters()]
        place = {id(p): i for i, p in enumerate(self.params)}
        self.places = [place[id(p)] for p in self.tail_params]
        second_tail = copy.deepcopy(tail)
        self.perturbed: list[Tensor] = [*second_tail.parameters()]

        def prepare(part: nn.Module) -> Callable[[Tensor], Tensor]:
            return torch.compile(part, dynamic=False) if compiled else part

        objective.select = torch.mean
        self.model = Split(None if head is None else prepare(head), prepare(tail))
        objective.model = self.model
        self.second_objective = copy.copy(objective)
        self.second_objective.model = prepare(second_tail)
        self.momentum = [torch.zeros_like(p) for p in self.params]
        self.h, self.g0 = ([torch.zeros_like(p) for p in self.tail_params] for _ in range(2))
        self.loss_at_w = torch.zeros((), device=self.device)
        self.rho, self.k = float(optimizer.rho), optimizer.gamma / (1 - optimizer.gamma)
        self.rates = torch.zeros(n, device=self.device)
        self.batches: list[tuple[Tensor, Tensor]] = []
        self.second_batch: tuple[Tensor, Tensor] | None = None
        self.received = 0
        self.graphed: dict[bool, GraphedSteps] = {}
        if self.device.type == "cuda":
            self.main = torch.cuda.Stream(priority=-1 if priority else 0)
        self.side = torch.cuda.Stream() if self.device.type == "cuda" else None
        self.reset_totals()

    def __call__(self, inputs: Tensor, targets: Tensor) -> None:
        """Receive a batch; make n steps if it is the last of n."""
        if not self.batches:
            self.batches = [(inputs.clone(), targets.clone()) for _ in range(self.n)]
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
        current = torch.cuda.current_stream() if self.device.type == "cuda" else None
        second = None
        if self.second_batch is not None and sharp:  # None in the first call
            if current:
                self.side.wait_stream(current)
            with torch.cuda.stream(self.side):
                second = self._pass(self.second_objective, self.perturbed, self.second_batch)
        losses, counts = [], []
        sharpness = torch.zeros((), device=self.device)
        for i, batch in enumerate(self.batches):
            loss, count, gradient = self._pass(self.objective, self.params, batch)
            losses.append(loss)
            counts.append(count)
            if sharp and i == self.n - 1:
                if second is not None:
                    if current:
                        current.wait_stream(self.side)
                    loss_1, _, g1 = second
                    torch._foreach_copy_(self.h, torch._foreach_sub(g1, self.g0))
                    sharpness = loss_1 - self.loss_at_w
                self._perturb(loss, gradient, batch[1])
            self._update(gradient, self.rates[i], sharp)
        measured = torch.full((), float(second is not None), device=self.device)
        return torch.stack(losses).sum(), torch.stack(counts).sum(0), sharpness, measured

    def _pass(
        self, objective: Objective, params: list[Tensor], batch: tuple[Tensor, Tensor]
    ) -> Pass:
        loss, counts = objective(*batch)
        return loss.detach(), cast(Tensor, counts), [*torch.autograd.grad(loss, params)]

    @torch.no_grad()
    def _perturb(self, loss: Tensor, gradient: list[Tensor], targets: Tensor) -> None:
        """Prepare the next pass at w + d: its weights and its batch."""
        g0 = [gradient[i] for i in self.places]
        norm = torch.stack(torch._foreach_norm(g0)).square().sum().sqrt()
        move = torch._foreach_mul(g0, self.rho / (norm + 1e-12))
        torch._foreach_copy_(self.perturbed, torch._foreach_add(self.tail_params, move))
        torch._foreach_copy_(self.g0, g0)
        batch = self.model.features.detach(), targets
        if self.second_batch is None:
            self.second_batch = batch[0].clone(), batch[1].clone()
        for tensor, given in zip(self.second_batch, batch, strict=True):
            tensor.copy_(given)
        self.loss_at_w.copy_(loss)

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
            torch._foreach_sub_(self.tail_params, torch._foreach_mul(self.h, self.k * rate))


class Head(nn.Module):
    """The first blocks of a ResNet18."""

    def __init__(self, model: ResNet18, blocks: int) -> None:
        super().__init__()
        self.stem, self.bn, self.blocks = model.stem, model.bn, model.blocks[:blocks]

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        return cast(Tensor, self.blocks(nn.functional.relu(self.bn(self.stem(x)))))


class Tail(nn.Module):
    """The blocks from a number on, and the classifier."""

    def __init__(self, model: ResNet18, first: int) -> None:
        super().__init__()
        self.blocks, self.head = model.blocks[first:], model.head

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return cast(Tensor, self.head(self.blocks(x).mean((2, 3))))


@dataclass(frozen=True)
class Form:
    """How the steps are made: `OverlappedStepper`'s arguments.

    Attributes:
        n: A pass at w + d belongs to every n-th step.
        tail: The first of the ResNet18's eight blocks that is perturbed; 0 perturbs all layers.
        priority: Give the passes at w priority.
        start: Share of the steps of the base alone.
    """

    n: int = 2
    tail: int = 0
    priority: bool = False
    start: float = 0.0


class OverlappedTrainer(Trainer):
    """A `Trainer` that makes its steps with an `OverlappedStepper`."""

    form = Form()

    def _make_stepper(self) -> Stepper:
        model, form = cast(ResNet18, self.model), self.form
        objective = Objective(model, torch.mean, self.run.precision, self.device)
        head, tail = (
            (Head(model, form.tail), Tail(model, form.tail)) if form.tail else (None, model)
        )
        start = round(form.start * self.run.epochs * self.feed.steps / form.n) * form.n
        return OverlappedStepper(
            self.optimizer,
            objective,
            self.captured,
            form.n,
            head,
            tail,
            form.priority,
            start,
            self.compiled,
        )


def seconds_per_step(
    run: Run, execution: ExecutionConfig, forms: Sequence[Form | None]
) -> list[float]:
    """Return the median time of a captured step of each form; None is SGD alone."""
    steppers: list[tuple[Stepper, Any]] = []
    with init_distributed(execution.device) as (context, _), cudnn_settings(torch.device("cuda")):
        for form in forms:
            kind = Trainer if form is None else OverlappedTrainer
            chosen = run.replace(method=VANILLA, hyper={}, options={}) if form is None else run
            trainer = kind(chosen, Path("unused"), execution, (), context)
            if form is not None:
                trainer.form = form  # type: ignore[attr-defined]
            batch = next(iter(trainer.feed.epoch()))
            steppers.append((trainer._make_stepper(), [tensor.clone() for tensor in batch]))
        times: list[list[float]] = [[] for _ in forms]
        for number in range(TIMED_ROUNDS + 1):
            for own, (stepper, batch) in zip(times, steppers, strict=True):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(TIMED_STEPS):
                    stepper(*batch)
                torch.cuda.synchronize()
                if number:  # the first round compiles and captures
                    own.append((time.perf_counter() - start) / TIMED_STEPS)
    return [statistics.median(own) for own in times]


def run_of(seed: int, form: Form, epochs: int = EPOCHS, gamma: float | None = None) -> Run:
    """Return the settings that the experiment shares with the study."""
    cell = find("cheap").cell((IN_BUDGET,), "CIFAR-10")
    assert cell is not None
    run = next(run for run in cell.runs if run.seed == seed)
    options = {**run.options, "every": form.n}
    if form.start:
        options["start"] = form.start
    hyper = run.hyper if gamma is None else {**run.hyper, "gamma": gamma}
    return run.replace(epochs=epochs, options=options, hyper=hyper)


def main() -> None:
    """Time the steps, choose the number of epochs that the budget allows, and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--n", type=int, default=2)
    parser.add_argument("--tail", type=int, default=0, help="first block that is perturbed")
    parser.add_argument("--gamma", type=float, help="instead of the paper's")
    parser.add_argument("--budget", type=float, default=BUDGET, help="of SGD's training time")
    parser.add_argument("--start", type=float, default=0.0, help="share of the steps of SGD alone")
    parser.add_argument("--time-only", type=int, nargs="*", help="tails to time, without training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--give-up", type=float, default=100.0, help="train no other seed after a higher error (%%)"
    )
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # one version for each of the models
    execution = ExecutionConfig(
        source=DataSource(options.data_dir), checkpoint_seconds=float("inf")
    )
    tails = [options.tail] if options.time_only is None else options.time_only
    # With start 1 the base alone is timed.
    forms = [Form(options.n, *rest) for rest in product(tails, (False, True), (0.0, 1.0))]
    base, *others = seconds_per_step(run_of(0, Form(options.n)), execution, [None, *forms])
    ratios = {form: seconds / base for form, seconds in zip(forms, others, strict=True)}
    for form, ratio in ratios.items():
        print(f"{form}: {ratio:.3f} of SGD's {1e3 * base:.3f} ms", flush=True)
    if options.time_only is not None:
        return

    def cost(form: Form) -> float:
        alone, overlapped = (ratios[replace(form, start=start)] for start in (1.0, 0.0))
        return form.start * alone + (1 - form.start) * overlapped

    choices = [Form(options.n, options.tail, priority, options.start) for priority in (False, True)]
    form = min(choices, key=cost)
    epochs = min(EPOCHS, int(SHARE_OF_STEPS * options.budget / cost(form) * EPOCHS))
    folder = options.out / f"n{form.n}-tail{form.tail}"
    folder.mkdir(parents=True, exist_ok=True)
    OverlappedTrainer.form = form
    with init_distributed(execution.device) as (context, _):
        for seed in options.seeds:
            run = run_of(seed, form, epochs, options.gamma)
            trainer = OverlappedTrainer(run, folder, execution, (LogLines(),), context)
            record = trainer.train()
            record["overlapped"] = {**asdict(form), "seconds": base, "cost": cost(form)}
            (folder / f"{run.key}.json").write_text(json.dumps(record, indent=1) + "\n")
            if record["failure"] or record["final"]["test_error"] > options.give_up:
                break


if __name__ == "__main__":
    main()
