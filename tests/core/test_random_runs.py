"""Random runs: neither the style of a step nor what happens between steps changes the result.

Two optimizers have the same random options. One makes steps with a closure. The other makes each step
in a random style, and between steps it is copied, saved and loaded, passes fail, steps are abandoned.
"""

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import ALL, MORE_BASES, ONE_PASS, batch, save_and_load, torch_base
from torch import Tensor, nn

import wsam
from wsam.rule import Reuse
from wsam.schedule import Between, Every, FollowLR, InverseSqrt, NormAbove, Warmup

STEPS = 10
FAST, SLOW = range(10), range(10, 100)
RADII = [0.0, 0.05, 0.2, Warmup(0.1, steps=5), FollowLR(0.1, 0.01), InverseSqrt(0.2)]
INTERVALS = [Every(2), Every(3, 1), Between(2), Every(2) & Between(3), Every(2) | Between(6)]
STYLES = ["closure", "train_step", "phases", "scaler", "train_step with scaler"]


def draw_options(draw: random.Random, name: str) -> dict[str, Any]:
    """Return arguments of a method that may be used together."""
    when = draw.choice([None, *INTERVALS, *([] if name in ONE_PASS else [NormAbove()])])
    options: dict[str, Any] = {"rho": draw.choice(RADII)}
    if name == "looksam":
        options["per_tensor"] = draw.random() < 0.5
    else:
        options["when"] = when
    if name == "wsam":
        options["gamma"] = draw.choice([0.0, 0.5, 0.9, Warmup(0.8, steps=4)])
        options["precondition"] = draw.choice(["auto", False])
        if when is not None and draw.random() < 0.6:
            options["reuse"] = draw.choice(
                [True, Reuse(scale_by_norm=True), Reuse(average=0.5, weight=0.7)]
            )
        elif not options["precondition"] and draw.random() < 0.5:
            return {**options, "lean": True}
    if name in ("sam", "wsam", "coupled_wsam", "gsam"):
        geometries = [wsam.Adaptive(), wsam.Fisher(), wsam.PerLayer(), wsam.Masked(0.5, 1)]
        options["geometry"] = draw.choice([None, None, *geometries])
        options.update(draw.choice([{}, {}, {"ascent_steps": 2}, {"keep": 0.5}]))
    options["max_norm"] = draw.choice([None, None, 0.5])
    options["nonfinite"] = draw.choice(["propagate", "skip", "raise"])
    return options


class Trainer:
    """A model with dropout and perhaps BatchNorm, and its optimizer."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.name = draw.choice([*ALL, *["wsam"] * 4])
        self.options = draw_options(draw, self.name)
        with_momentum = ["momentum", "nesterov", "adam", "adamw", "nadam", "radam"]
        self.base = draw.choice(with_momentum if self.name in ONE_PASS else [*MORE_BASES])
        self.layers = [nn.BatchNorm1d(6)] if draw.random() < 0.5 else []
        self.has_model, self.has_groups = draw.random() < 0.6, draw.random() < 0.4
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        self.restart(seed)

    def restart(self, seed: int) -> None:
        """Make a new model and optimizer."""
        torch.manual_seed(seed)
        layers = [nn.Linear(5, 6), *copy.deepcopy(self.layers), nn.Tanh(), nn.Dropout(0.3)]
        self.model = nn.Sequential(*layers, nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).double()
        params: Any = list(self.model.parameters())
        if self.has_groups:
            params = [{"params": params[:2]}, {"params": params[2:], "sam_rho": 0.03}]
        model = self.model if self.has_model else None
        base, options = torch_base(self.base, params), copy.deepcopy(self.options)
        self.opt = wsam.create(self.name, base, model=model, **options)

    @property
    def is_lean(self) -> bool:
        return "lean" in self.options

    def loss(self, x: Tensor) -> Tensor:
        return self.opt.select(self.model(x).square().sum(1))

    def run(self, x: Tensor) -> Tensor:
        """Run a pass."""
        loss = self.loss(x)
        loss.backward()
        return loss

    def step(self, t: int, style: str, factor: float = 1.0) -> None:
        """Make step number t. A factor of NaN spoils the batch."""
        opt, x = self.opt, batch(t) * factor
        torch.manual_seed(1000 + t)
        if style == "closure":
            opt.step(lambda: self.run(x))
        elif style == "phases":
            self.passes_by_hand(lambda: self.run(x), None)
            opt.descend()
            opt.step()
        elif style == "scaler":
            scale = self.scaler.get_scale()
            self.passes_by_hand(lambda: self.scaler.scale(self.loss(x)).backward(), scale)
            self.scaler.unscale_(opt)
            opt.descend()
            self.scaler.step(opt)
            self.scaler.update()
        else:
            scaler = self.scaler if style == "train_step with scaler" else None
            wsam.train_step(opt, self.loss, gather_selected=False, scaler=scaler)(x)

    def passes_by_hand(self, run: Callable[[], Any], scale: float | None) -> None:
        self.opt.begin()
        if self.opt.geometry.needs_g0:
            run()
        for _ in range(self.opt.ascent_steps):
            self.opt.ascend(scale)
            run()

    def result(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.model.state_dict(), self.opt.state_dict()["state"]


# What may happen between steps ----------------------------------------------------------------------


def is_copied(trainer: Trainer, draw: random.Random) -> None:
    trainer.model, trainer.opt = copy.deepcopy((trainer.model, trainer.opt))


def is_pickled(trainer: Trainer, draw: random.Random) -> None:
    trainer.model, trainer.opt = pickle.loads(pickle.dumps((trainer.model, trainer.opt)))


def is_saved_and_loaded(trainer: Trainer, draw: random.Random) -> None:
    states = save_and_load({"model": trainer.model.state_dict(), "opt": trainer.opt.state_dict()})
    trainer.restart(seed=12345)
    trainer.model.load_state_dict(states["model"])
    trainer.opt.load_state_dict(states["opt"])


def weights_move(trainer: Trainer, draw: random.Random) -> None:
    for p in trainer.model.parameters():
        p.data = p.data.clone()


def a_pass_fails(trainer: Trainer, draw: random.Random) -> None:
    before, wanted = copy.deepcopy((trainer.model, trainer.opt)), draw.choice([1, 2])
    passes = 0

    def run() -> Tensor:
        nonlocal passes
        passes += 1
        loss = trainer.run(batch(99))
        if passes == wanted:
            raise KeyboardInterrupt
        return loss

    try:
        trainer.opt.step(run)
    except KeyboardInterrupt:
        return
    trainer.model, trainer.opt = before  # the step had one pass only, and was made


def a_step_is_abandoned(trainer: Trainer, draw: random.Random) -> None:
    trainer.opt.begin()
    trainer.run(batch(99))
    if trainer.opt.ascend():
        with pytest.raises(RuntimeError, match="cannot save a state"):
            trainer.opt.state_dict()
    if draw.random() < 0.5:
        trainer.run(batch(99))
    trainer.opt.abandon()


def the_model_is_evaluated(trainer: Trainer, draw: random.Random) -> None:
    trainer.run(batch(99))
    with trainer.opt.perturbed():
        trainer.loss(batch(99))


def a_call_is_rejected(trainer: Trainer, draw: random.Random) -> None:
    for call in (trainer.opt.descend, trainer.opt.step):
        with pytest.raises(RuntimeError):
            call()


EVENTS = [
    *(is_copied, is_pickled, is_saved_and_loaded, weights_move),
    *(a_pass_fails, a_step_is_abandoned, the_model_is_evaluated, a_call_is_rejected),
]


def let_happen(trainer: Trainer, draw: random.Random) -> None:
    """Let something happen. The running statistics and gradients of its passes are undone."""
    buffers = {name: b.clone() for name, b in trainer.model.named_buffers()}
    draw.choice(EVENTS)(trainer, draw)
    for name, buffer in trainer.model.named_buffers():
        buffer.copy_(buffers[name])
    trainer.opt.zero_grad()


def change_settings(draw: random.Random, trainers: tuple[Trainer, Trainer]) -> None:
    """Change the learning rate, the radius, or which parameters are trained."""
    lr, rho = draw.choice([0.01, 0.03]), draw.choice(RADII)
    frozen = draw.sample(range(6), draw.choice([0, 1, 2]))
    choices = draw.choices([False, True], [4, 1], k=3)
    for trainer in trainers:
        for group in trainer.opt.param_groups if choices[0] else ():
            group["lr"] = lr
        if choices[1]:
            trainer.opt.rho = copy.deepcopy(rho)
        for i, p in enumerate(trainer.model.parameters()):
            p.requires_grad_(not (choices[2] and i in frozen))


@pytest.mark.parametrize("seed", [*FAST, *(pytest.param(i, marks=pytest.mark.slow) for i in SLOW)])
@pytest.mark.filterwarnings("ignore::wsam.WsamWarning")
def test_a_random_run_equals_a_plain_one(seed: int) -> None:
    plain, other, draw = Trainer(seed), Trainer(seed), random.Random(seed + 1000)
    for t in range(STEPS):
        if draw.random() < 0.6 and not other.is_lean:
            let_happen(other, draw)
        change_settings(draw, (plain, other))
        spoil = draw.random() < 0.1 and plain.options.get("nonfinite") == "skip"
        style = draw.choice(STYLES[:3] if other.is_lean else STYLES)
        for trainer, by in ((plain, "closure"), (other, style)):
            trainer.step(t, by, torch.nan if spoil else 1.0)
        torch.testing.assert_close(other.result(), plain.result(), rtol=1e-9, atol=1e-9)
