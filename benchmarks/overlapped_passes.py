"""WSAM whose sharpness gradient is computed next to the base's steps, on a second CUDA stream.

    python benchmarks/overlapped_passes.py --start 0.25 --seeds 0 1 2 --data-dir DATA --out OUT
    python benchmarks/overlapped_passes.py --share 0.25 --gamma 0.786 --data-dir DATA --out OUT

An experiment on the cost of sharpness. ResNet18 on CIFAR-10 does not fill a large GPU, so two passes
that do not need each other's results may take less time than twice that of one; the program measures
it first. The gradient at w + d of one step is computed while the next n steps are made, and used from
the last of these on:

    at every n-th step     g = grad l(w),    v = w + rho g / norm(g)
    in the next n steps    g1 = grad l(v) with the same batch as g, on the second stream
    then                   h = g1 - g, which the n updates from then on apply: w - base(.) - lr k h

This is `WSAM(base, when=Every(n), reuse=True)` with an h that is n steps late. n steps are one CUDA
graph. All other settings are those of `wsam paper run cheap`. Two options lower the cost further: the
base may train alone at first (`--start`), and h may come from a share of the batch (`--share`). The
second stream then computes both gradients of that share, from a copy of w:

    in n steps, from w     g = grad l_A(w),    g1 = grad l_A(w + rho g / norm(g))
    in the last of these   h = g1 - g, applied by n updates as above
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
from torch.nn.utils import get_total_norm

from wsam.lab.callbacks import LogLines
from wsam.lab.data.datasets import DataSource, default_folder
from wsam.lab.distributed import init_distributed
from wsam.lab.execution import ExecutionConfig
from wsam.lab.run import Run
from wsam.lab.settings import VANILLA
from wsam.lab.step import Objective, Stepper, cudnn_settings
from wsam.lab.trainer import Trainer
from wsam.paper.cheap import BUDGET, IN_BUDGET, SMALL_EPOCHS
from wsam.paper.cifar import EPOCHS
from wsam.paper.registry import find
from wsam.paper.study import VALIDATION
from wsam.sweep.grid import with_seeds

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


class OverlappedStepper(Stepper):
    """Makes n steps when it has n batches.

    Args:
        optimizer: A `wsam.WSAM` around `torch.optim.SGD`. Only its hyperparameters are used.
        objective: Computes the loss of a batch.
        capture: Replay the steps from a CUDA graph.
        n: A sharpness gradient is computed for every n-th step.
        share: The share of the batch that it is computed from.
        start: The base makes this many steps alone, a multiple of n.
        compiled: Compile the model.
    """

    def __init__(
        self,
        optimizer: Any,
        objective: Objective,
        capture: bool,
        n: int,
        share: float = 1.0,
        start: int = 0,
        compiled: bool = False,
    ) -> None:
        self.device, self.capture, self.objective, self.n = objective.device, capture, objective, n
        self.share, self.start, self.made = share, start, 0
        (self.group,) = optimizer.param_groups
        model: nn.Module = optimizer.model
        second_model = copy.deepcopy(model)
        self.params: list[Tensor] = [*model.parameters()]
        self.second_params: list[Tensor] = [*second_model.parameters()]

        def prepare(one: nn.Module) -> Callable[[Tensor], Tensor]:
            return torch.compile(one, dynamic=False) if compiled else one

        objective.select = torch.mean
        objective.model = prepare(model)
        self.second_objective = copy.copy(objective)
        self.second_objective.model = prepare(second_model)
        self.momentum, self.h, self.g0 = (
            [torch.zeros_like(p) for p in self.params] for _ in range(3)
        )
        self.loss_at_w = torch.zeros((), device=self.device)
        self.rho, self.k = float(optimizer.rho), optimizer.gamma / (1 - optimizer.gamma)
        self.rates = torch.zeros(n, device=self.device)
        self.batches: list[tuple[Tensor, Tensor]] = []
        self.second_batch: tuple[Tensor, Tensor] | None = None
        self.received = 0
        self.graphed: dict[bool, GraphedSteps] = {}
        if self.device.type == "cuda":
            self.main = torch.cuda.Stream(priority=-1)  # the base's steps go first
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
        known = sharp and (self.share < 1 or self.second_batch is not None)  # not in the first call
        if known:
            if self.share < 1:
                self._copy_weights()
            if current:
                self.side.wait_stream(current)
            with torch.cuda.stream(self.side):
                h, increase = self._sharpness_gradient()
        losses, counts = [], []
        sharpness = torch.zeros((), device=self.device)
        for i, batch in enumerate(self.batches):
            loss, count, gradient = self._pass(self.objective, self.params, batch)
            losses.append(loss)
            counts.append(count)
            if i == self.n - 1:
                if known:
                    if current:
                        current.wait_stream(self.side)
                    torch._foreach_copy_(self.h, h)
                    sharpness = increase
                if sharp and self.share == 1:
                    self._prepare_second_pass(loss, gradient, batch)
            self._update(gradient, self.rates[i], sharp)
        measured = torch.full((), float(known), device=self.device)
        return torch.stack(losses).sum(), torch.stack(counts).sum(0), sharpness, measured

    def _sharpness_gradient(self) -> tuple[list[Tensor], Tensor]:
        """Return g1 - g and the increase of the loss. The second model is at w + d, or still at w."""
        batch, loss_0, g0 = self.second_batch, self.loss_at_w, self.g0
        if self.share < 1:
            inputs, targets = self.batches[0]
            size = round(self.share * len(inputs))
            batch = inputs[:size], targets[:size]
            loss_0, _, g0 = self._pass(self.second_objective, self.second_params, batch)
            self._perturb(g0)
        assert batch is not None
        loss_1, _, g1 = self._pass(self.second_objective, self.second_params, batch)
        return torch._foreach_sub(g1, g0), loss_1 - loss_0

    def _pass(
        self, objective: Objective, params: list[Tensor], batch: tuple[Tensor, Tensor]
    ) -> Pass:
        loss, counts = objective(*batch)
        return loss.detach(), cast(Tensor, counts), [*torch.autograd.grad(loss, params)]

    @torch.no_grad()
    def _copy_weights(self) -> None:
        """Move the second model to w."""
        torch._foreach_copy_(self.second_params, self.params)

    @torch.no_grad()
    def _perturb(self, g0: list[Tensor]) -> None:
        """Move the second model from w to w + d."""
        move = torch._foreach_mul(g0, self.rho / (get_total_norm(g0) + 1e-12))
        torch._foreach_add_(self.second_params, move)

    @torch.no_grad()
    def _prepare_second_pass(
        self, loss: Tensor, g0: list[Tensor], batch: tuple[Tensor, Tensor]
    ) -> None:
        """Move the second model to w + d, and keep what its pass is compared with."""
        self._copy_weights()
        self._perturb(g0)
        torch._foreach_copy_(self.g0, g0)
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
            torch._foreach_sub_(self.params, torch._foreach_mul(self.h, self.k * rate))


@dataclass(frozen=True)
class Form:
    """How the steps are made.

    Attributes:
        n: A sharpness gradient is computed for every n-th step.
        share: The share of the batch that it is computed from.
        start: Share of the steps of the base alone.
    """

    n: int = 2
    share: float = 1.0
    start: float = 0.0


class OverlappedTrainer(Trainer):
    """A `Trainer` that makes its steps with an `OverlappedStepper`."""

    form = Form()
    stepper = OverlappedStepper
    recorded_as = "overlapped"

    def _make_stepper(self) -> Stepper:
        form, run = self.form, self.run
        objective = Objective(self.model, torch.mean, run.precision, self.device)
        start = round(form.start * run.epochs * self.feed.steps / form.n) * form.n
        return self.stepper(
            self.optimizer, objective, self.captured, form.n, form.share, start, self.compiled
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


def run_of(
    seed: int, form: Form, epochs: int = EPOCHS, gamma: float | None = None, small: bool = False
) -> Run:
    """Return the settings that the experiment shares with the study, or with its small version."""
    if small:
        cell = find("cheap-small").cell(("WSAM reuse 2",), "noisy digits")
    else:
        cell = find("cheap").cell((IN_BUDGET,), "CIFAR-10")
    assert cell is not None
    (run,) = with_seeds(cell.runs[0], [seed])
    options: dict[str, Any] = {"reuse": True, "every": form.n} if form.n > 1 else {}
    if form.start:
        options["start"] = form.start
    hyper = run.hyper if gamma is None else {**run.hyper, "gamma": gamma}
    return run.replace(epochs=epochs, options=options, hyper=hyper)


def time_forms(execution: ExecutionConfig, forms: Sequence[Form]) -> tuple[float, list[float]]:
    """Print and return the seconds of SGD's step, and the cost of each form relative to it."""
    alone = replace(forms[0], start=1.0)  # the base's steps as this program makes them
    overlapped = [replace(form, start=0.0) for form in forms]
    sgd, of_alone, *others = seconds_per_step(
        run_of(0, forms[0]), execution, [None, alone, *overlapped]
    )
    costs = []
    for form, seconds in zip(forms, others, strict=True):
        costs.append((form.start * of_alone + (1 - form.start) * seconds) / sgd)
        print(f"{form}: {costs[-1]:.3f} of SGD's {1e3 * sgd:.3f} ms", flush=True)
    return sgd, costs


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, ExecutionConfig]:
    """Add the options of all runs to a program's own, and parse the command line."""
    parser.add_argument("--start", type=float, default=0.0, help="share of the steps of SGD alone")
    parser.add_argument("--gamma", type=float, help="instead of the paper's")
    parser.add_argument("--small", action="store_true", help="a CNN on noisy digits; not timed")
    parser.add_argument("--validation", action="store_true", help="measure on a validation split")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--data-dir", type=Path, default=default_folder())
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # one version for each of the models
    source = DataSource(options.data_dir)
    return options, ExecutionConfig(source=source, checkpoint_seconds=float("inf"))


def train_seeds(
    kind: type[OverlappedTrainer],
    form: Form,
    epochs: int,
    options: argparse.Namespace,
    execution: ExecutionConfig,
    timed: dict[str, float],
) -> None:
    """Train with each seed, and write the records to a folder of the form."""
    kind.form = form
    folder = options.out / f"n{form.n}-share{form.share:g}"
    folder.mkdir(parents=True, exist_ok=True)
    with init_distributed(execution.device) as (context, _):
        for seed in options.seeds:
            run = run_of(seed, form, epochs, options.gamma, options.small)
            if options.validation:
                run = run.replace(validation=VALIDATION)
            trainer = kind(run, folder, execution, (LogLines(),), context)
            record = trainer.train()
            record[kind.recorded_as] = {**asdict(form), **timed}
            (folder / f"{run.key}.json").write_text(json.dumps(record, indent=1) + "\n")
            if record["failure"]:
                break


def main() -> None:
    """Time the steps, choose the number of epochs that the budget allows, and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--n", type=int, nargs="+", default=[2], help="several are only timed")
    parser.add_argument("--share", type=float, nargs="+", default=[1.0], help="of the batch, for h")
    parser.add_argument("--budget", type=float, default=BUDGET, help="of SGD's training time")
    parser.add_argument("--epochs", type=int, help="instead of what the budget allows; not timed")
    options, execution = parse(parser)
    forms = [Form(*pair, options.start) for pair in product(options.n, options.share)]
    epochs, timed = SMALL_EPOCHS if options.small else options.epochs, {}
    if epochs is None:
        seconds, costs = time_forms(execution, forms)
        timed = {"seconds": seconds, "cost": costs[0]}
        epochs = min(EPOCHS, int(SHARE_OF_STEPS * options.budget / costs[0] * EPOCHS))
    if len(forms) == 1:
        train_seeds(OverlappedTrainer, forms[0], epochs, options, execution, timed)


if __name__ == "__main__":
    main()
