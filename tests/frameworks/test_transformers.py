"""Hugging Face's Trainer equals the plain loop; what it cannot do is refused."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from framework_helpers import difference, new_scaler, pretend_ddp, run_script
from torch import nn
from transformers_helpers import arguments, bert, by_hand, data, over, train

import wsam
from wsam.integrations.transformers import SharpnessAwareMixin, SharpnessAwareTrainer
from wsam.schedule import Every


@pytest.mark.parametrize("name", ["asam", "coupled_wsam", "gsam", "wsam"])
def test_works_training(name: str, tmp_path: Path) -> None:
    """Over the Trainer's own AdamW, made of its arguments."""
    adam = {"optim": "adamw_torch", "optim_args": None, "learning_rate": 0.01}
    model = bert()
    train(model, tmp_path, wrap=functools.partial(wsam.create, name), **adam)
    base = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0)
    expected, _, _ = by_hand(bert(), base=base, make=functools.partial(wsam.create, name))
    assert difference(model, expected) < 1e-10
    assert difference(model, bert()) > 1e-3


def test_works_accumulation(tmp_path: Path) -> None:
    """Three micro-batches a step, and two in the last one of an epoch."""
    model = bert()
    trainer = train(model, tmp_path, gradient_accumulation_steps=3, count=32)
    expected, _, _ = by_hand(bert(), every=3, count=32)
    assert difference(model, expected) < 1e-12
    assert trainer.state.global_step == 6


@pytest.mark.parametrize("every", [1, 2])
def test_works_clipping_by_norm(every: int, tmp_path: Path) -> None:
    """`max_grad_norm` is the optimizer's max_norm: one factor for both terms."""
    model = bert()
    train(model, tmp_path, max_grad_norm=0.3, gradient_accumulation_steps=every)
    clipped = by_hand(bert(), every=every, make=functools.partial(over, max_norm=0.3))[0]
    assert difference(model, clipped) < 1e-12
    assert difference(model, by_hand(bert(), every=every)[0]) > 1e-3


def test_works_own_max_norm_wins(tmp_path: Path) -> None:
    make = functools.partial(over, max_norm=0.3)
    model = bert()
    train(model, tmp_path, wrap=make, max_grad_norm=1.0)
    assert difference(model, by_hand(bert(), make=make)[0]) < 1e-12


def test_works_bf16(tmp_path: Path) -> None:
    model = bert(dtype=torch.float32)
    train(model, tmp_path, bf16=True, gradient_accumulation_steps=2)
    low = by_hand(bert(dtype=torch.float32), every=2, autocast=torch.bfloat16)[0]
    full = by_hand(bert(dtype=torch.float32), every=2)[0]
    assert difference(model, low) < 1e-6
    assert difference(model, full) > 1e-5


class Scaled(SharpnessAwareTrainer):
    """float16 needs a CUDA device in Accelerate; its GradScaler does not."""

    factor = 1.0

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = new_scaler()

    def compute_loss(self, *args: Any, **named: Any) -> Any:
        return self.factor * super().compute_loss(*args, **named)


def test_works_fp16_scaler(tmp_path: Path) -> None:
    model = bert()
    options = {"max_grad_norm": 0.3, "gradient_accumulation_steps": 2}
    trainer = train(model, tmp_path, kind=Scaled, **options)
    expected = by_hand(bert(), every=2, make=functools.partial(over, max_norm=0.3))[0]
    assert difference(model, expected) < 1e-12
    assert trainer.accelerator.scaler.get_scale() == 1024.0


def test_works_fp16_overflow(tmp_path: Path) -> None:
    """A loss that overflows when it is scaled changes nothing; the scale is halved once a step."""
    model = bert(dtype=torch.float32)
    kind = type("Overflowing", (Scaled,), {"factor": 1e38})
    trainer = train(model, tmp_path, kind=kind)
    assert difference(model, bert(dtype=torch.float32)) == 0
    assert trainer.accelerator.scaler.get_scale() == 1024.0 / 2**8
    assert trainer.optimizer.optimizer.skipped == 8


def test_works_one_step_per_step(tmp_path: Path) -> None:
    """Counts, schedulers, callbacks and logs see one step a step, and the loss at w."""
    seen = []

    class Count(transformers.TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            seen.append(state.global_step)

    class Counting(SharpnessAwareTrainer):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options, callbacks=[Count()])

    logging = {"logging_strategy": "steps", "logging_steps": 1}
    trainer = train(bert(), tmp_path, kind=Counting, gradient_accumulation_steps=2, **logging)
    _, _, losses = by_hand(bert(), every=2)
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert seen == [0, 1, 2, 3]
    assert [row["step"] for row in logs] == [1, 2, 3, 4]
    assert [row["loss"] for row in logs] == pytest.approx(losses, rel=1e-6)
    assert [row["learning_rate"] for row in logs] == pytest.approx([0.1, 0.075, 0.05, 0.025])
    assert all(row["grad_norm"] > 0 for row in logs)
    assert trainer.optimizer.param_groups[0]["sam_step"] == trainer.state.global_step == 4


@pytest.mark.parametrize("every", [1, 2])
def test_works_sharpness_readout(every: int, tmp_path: Path) -> None:
    trainer = train(bert(), tmp_path, gradient_accumulation_steps=every)
    optimizer = by_hand(bert(), every=every)[1]
    found = trainer.optimizer.optimizer.sharpness
    assert float(found) == pytest.approx(float(optimizer.sharpness), rel=1e-6)


class Masks(SharpnessAwareTrainer):
    """Keeps the logits of both passes; with rho tiny they agree if the masks do."""

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        kept = self.__dict__.setdefault("second" if self.in_second_pass else "first", [])
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **named)
        kept.append(outputs.logits.detach())
        return loss


def test_works_same_dropout_masks(tmp_path: Path) -> None:
    tiny = functools.partial(wsam.SAM, rho=1e-9)
    options = {"wrap": tiny, "gradient_accumulation_steps": 2}
    trainer = train(bert(dropout=0.5), tmp_path, kind=Masks, **options)
    assert len(trainer.first) == len(trainer.second) == 8
    pairs = list(zip(trainer.first, trainer.second, strict=True))
    assert all(torch.allclose(u, v, atol=1e-6) for u, v in pairs)
    assert not torch.allclose(pairs[0][0], pairs[1][0], atol=1e-3)


@pytest.mark.parametrize(("every", "at"), [(1, 5), (2, 3)])
def test_works_resume(every: int, at: int, tmp_path: Path) -> None:
    """With dropout and shuffling, resumed in the middle of an epoch: the same bits."""
    common = {
        "wrap": functools.partial(wsam.CoupledWSAM, rho=0.1),
        "gradient_accumulation_steps": every,
        "max_grad_norm": 0.5,
        "train_sampling_strategy": "random",
        "optim": "adamw_torch",
        "optim_args": None,
        "learning_rate": 0.01,
    }
    whole, resumed = bert(dropout=0.2), bert(dropout=0.2)
    train(whole, tmp_path, save_strategy="steps", save_steps=at, **common)
    path = str(tmp_path / f"checkpoint-{at}")
    trainer = train(resumed, tmp_path / "again", resume_from_checkpoint=path, **common)
    assert trainer.state.global_step == 8 // every
    assert trainer.optimizer.param_groups[0]["sam_step"] == 8 // every
    assert difference(resumed, whole) == 0


def test_works_interval(tmp_path: Path) -> None:
    """Steps that `when` leaves to the base have no second pass."""
    make = functools.partial(over, when=Every(3))
    model = bert()
    trainer = train(model, tmp_path, wrap=make, kind=Masks)
    assert (len(trainer.first), len(trainer.second)) == (8, 3)
    assert difference(model, by_hand(bert(), make=make)[0]) < 1e-12


class Failing(SharpnessAwareTrainer):
    def compute_loss(self, *args: Any, **named: Any) -> Any:
        if self.in_second_pass:
            raise KeyError("second pass")
        return super().compute_loss(*args, **named)


def test_works_error_in_second_pass(tmp_path: Path) -> None:
    model = bert()
    with pytest.raises(KeyError, match="second pass"):
        train(model, tmp_path, kind=Failing)
    assert difference(model, bert()) == 0


def test_works_popped_labels(tmp_path: Path) -> None:
    """A loss of one's own that takes the labels out of the inputs, as many do."""

    class Own(SharpnessAwareTrainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            labels = inputs.pop("labels")
            return nn.functional.cross_entropy(model(**inputs).logits, labels)

    model = bert()
    train(model, tmp_path, kind=Own)
    assert difference(model, by_hand(bert())[0]) < 1e-12


def test_works_given_optimizer(tmp_path: Path) -> None:
    model = bert()
    optimizer = over(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    trainer = SharpnessAwareTrainer(
        model=model, args=arguments(tmp_path), train_dataset=data(), optimizers=(optimizer, None)
    )
    trainer.train()
    assert difference(model, by_hand(bert())[0]) < 1e-12


@pytest.mark.slow
def test_works_ddp_with_accumulation_and_clipping(tmp_path: Path) -> None:
    """Two processes with half of each batch equal one process, to rounding."""
    run_script("ddp_transformers.py", str(tmp_path))
    model = bert()
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3}
    train(model, tmp_path, **options)
    steps, weights = torch.load(tmp_path / "two.pt")
    assert steps == 4
    gaps = [float((weights[k] - v).abs().max()) for k, v in model.state_dict().items()]
    assert max(gaps) < 1e-6  # the model computes its loss in float32


# --- refused -----------------------------------------------------------------------------------


def test_refuses_plain_trainer(tmp_path: Path) -> None:
    """A Trainer without the mixin would leave out the second pass: the optimizer says so."""
    model = bert()
    optimizer = over(torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = transformers.Trainer(
        model=model, args=arguments(tmp_path), train_dataset=data(), optimizers=(optimizer, None)
    )
    with pytest.raises(RuntimeError, match="closure"):
        trainer.train()
    assert difference(model, bert()) == 0


def test_refuses_no_optimizer(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="wrap="):
        train(bert(), tmp_path, wrap=None)


def test_refuses_clipping_with_lean(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_grad_norm"):
        train(bert(), tmp_path, wrap=functools.partial(over, lean=True), max_grad_norm=1.0)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_refuses_sharding(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = SharpnessAwareTrainer(
        model=bert(), args=arguments(tmp_path), train_dataset=data(), wrap=over
    )
    monkeypatch.setattr(type(trainer.accelerator), "distributed_type", kind)
    with pytest.raises(ValueError, match=kind):
        trainer.create_optimizer()


def test_refuses_fp16_on_a_cpu(tmp_path: Path) -> None:
    """The Trainer would train in float32 and not say so."""
    with pytest.raises(ValueError, match="fp16 on cpu"):
        train(bert(), tmp_path, fp16=True)


def test_refuses_update_during_backward(tmp_path: Path) -> None:
    trainer = SharpnessAwareTrainer(
        model=bert(), args=arguments(tmp_path, optim="lomo"), train_dataset=data(), wrap=over
    )
    with pytest.raises(ValueError, match="lomo"):
        trainer.create_optimizer()


def test_refuses_local_perturbation(tmp_path: Path) -> None:
    model = pretend_ddp(bert())
    with pytest.raises(ValueError, match="this framework does not make"):
        train(model, tmp_path, wrap=functools.partial(over, local=True, model=model))


def test_the_mixin_makes_the_trainer() -> None:
    assert SharpnessAwareTrainer.__mro__[1:3] == (SharpnessAwareMixin, transformers.Trainer)
