"""The Hugging Face Trainer with the mixin equals the plain loop; unsupported settings raise."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
import transformers
from accelerate import DistributedType
from framework_helpers import difference, gap, new_scaler, pretend_ddp, run_script
from torch import nn
from transformers_helpers import ADAMW, LENGTH, arguments, bert, data, over, train, train_plain

import wsam
from wsam.integrations.transformers import SharpnessAwareMixin, SharpnessAwareTrainer
from wsam.schedule import Every

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["asam", "coupled_wsam", "gsam", "wsam"])
def test_works_training(name: str, tmp_path: Path) -> None:
    """The base is the AdamW that the Trainer creates from its arguments."""
    adam = {"optim": "adamw_torch", "optim_args": None, "learning_rate": 0.01}
    model = bert()
    train(model, tmp_path, wrap=functools.partial(wsam.create, name), **adam)
    base = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0)
    expected, _, _ = train_plain(bert(), base=base, make=functools.partial(wsam.create, name))
    assert difference(model, expected) < 1e-10
    assert difference(model, bert()) > 1e-3


def test_works_accumulation(tmp_path: Path) -> None:
    """Three micro-batches a step, and two in the last one of an epoch."""
    model = bert()
    trainer = train(model, tmp_path, gradient_accumulation_steps=3, count=32)
    expected, _, _ = train_plain(bert(), accumulate=3, count=32)
    assert difference(model, expected) < 1e-12
    assert trainer.state.global_step == 6


@pytest.mark.parametrize("accumulate", [1, 2])
def test_works_clipping_by_norm(accumulate: int, tmp_path: Path) -> None:
    """`max_grad_norm` becomes the optimizer's max_norm: one factor for both terms."""
    model = bert()
    train(model, tmp_path, max_grad_norm=0.3, gradient_accumulation_steps=accumulate)
    clipped = train_plain(
        bert(), accumulate=accumulate, make=functools.partial(over, max_norm=0.3)
    )[0]
    assert difference(model, clipped) < 1e-12
    assert difference(model, train_plain(bert(), accumulate=accumulate)[0]) > 1e-3


def test_works_max_norm_of_the_optimizer(tmp_path: Path) -> None:
    make = functools.partial(over, max_norm=0.3)
    model = bert()
    train(model, tmp_path, wrap=make, max_grad_norm=1.0)
    assert difference(model, train_plain(bert(), make=make)[0]) < 1e-12


def test_works_bf16(tmp_path: Path) -> None:
    model = bert(dtype=torch.float32)
    train(model, tmp_path, bf16=True, gradient_accumulation_steps=2)
    low = train_plain(bert(dtype=torch.float32), accumulate=2, autocast=torch.bfloat16)[0]
    full = train_plain(bert(dtype=torch.float32), accumulate=2)[0]
    assert difference(model, low) < 1e-6
    assert difference(model, full) > 1e-5


class Scaled(SharpnessAwareTrainer):
    """Has a GradScaler, which Accelerate creates only for float16 on CUDA."""

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
    expected = train_plain(bert(), accumulate=2, make=functools.partial(over, max_norm=0.3))[0]
    assert difference(model, expected) < 1e-12
    assert trainer.accelerator.scaler.get_scale() == 1024.0


def test_works_fp16_overflow(tmp_path: Path) -> None:
    """An overflow leaves the weights unchanged, and the scale is halved once per step."""
    model = bert(dtype=torch.float32)
    kind = type("Overflowing", (Scaled,), {"factor": 1e38})
    trainer = train(model, tmp_path, kind=kind)
    assert difference(model, bert(dtype=torch.float32)) == 0
    assert trainer.accelerator.scaler.get_scale() == 1024.0 / 2**8
    assert trainer.optimizer.optimizer.skipped == 8


def test_works_one_step_per_step(tmp_path: Path) -> None:
    """Counters, schedulers, callbacks and logs see one step per step, and the loss at w."""
    seen = []

    class Count(transformers.TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            seen.append(state.global_step)

    class Counting(SharpnessAwareTrainer):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options, callbacks=[Count()])

    logging = {"logging_strategy": "steps", "logging_steps": 1}
    trainer = train(bert(), tmp_path, kind=Counting, gradient_accumulation_steps=2, **logging)
    _, _, losses = train_plain(bert(), accumulate=2)
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert seen == [0, 1, 2, 3]
    assert [row["step"] for row in logs] == [1, 2, 3, 4]
    assert [row["loss"] for row in logs] == pytest.approx(losses, rel=1e-6)
    assert [row["learning_rate"] for row in logs] == pytest.approx([0.1, 0.075, 0.05, 0.025])
    assert all(row["grad_norm"] > 0 for row in logs)
    assert trainer.optimizer.param_groups[0]["sam_step"] == trainer.state.global_step == 4


@pytest.mark.parametrize("accumulate", [1, 2])
def test_works_metrics(accumulate: int, tmp_path: Path) -> None:
    """Metrics, tokens and logs are those of a plain optimizer: each sample counts once."""

    class Metered(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **named)
            self.accuracy.update(outputs.logits, inputs["labels"])
            model.samples.update(len(inputs["labels"]))
            self.log({"own": float(loss.detach())})
            return loss

    logging = {"logging_strategy": "steps", "logging_steps": 1, "learning_rate": 0.0}
    seen = {"include_num_input_tokens_seen": "all", "gradient_accumulation_steps": accumulate}
    found = []
    for mixin in ((), (SharpnessAwareMixin,)):
        model = bert()
        model.samples = torchmetrics.SumMetric()
        wrap = {"wrap": wsam.SAM} if mixin else {}
        trainer = type("Own", (*mixin, Metered), {})(
            model=model, args=arguments(tmp_path, **logging, **seen), train_dataset=data(), **wrap
        )
        trainer.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        trainer.train()
        logs = [
            {key: row.get(key) for key in ("loss", "own", "step", "num_input_tokens_seen")}
            for row in trainer.state.log_history
        ]
        counts = (float(model.samples.compute()), trainer.state.num_input_tokens_seen)
        found.append((logs, counts, float(trainer.accuracy.compute())))
    assert found[0] == found[1]
    assert counts == (32, 32 * LENGTH)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_works_sharpness_readout(accumulate: int, tmp_path: Path) -> None:
    trainer = train(bert(), tmp_path, gradient_accumulation_steps=accumulate)
    optimizer = train_plain(bert(), accumulate=accumulate)[1]
    found = trainer.optimizer.optimizer.sharpness
    assert float(found) == pytest.approx(float(optimizer.sharpness), rel=1e-6)


class Masks(SharpnessAwareTrainer):
    """Records the logits of both passes, which agree for a tiny rho if the masks do."""

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


@pytest.mark.parametrize(("accumulate", "at"), [(1, 5), (2, 3)])
def test_works_resume(accumulate: int, at: int, tmp_path: Path) -> None:
    """Resuming in the middle of an epoch, with dropout and shuffling, is bit for bit the same."""
    common = {
        "wrap": functools.partial(wsam.CoupledWSAM, rho=0.1),
        "gradient_accumulation_steps": accumulate,
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
    assert trainer.state.global_step == 8 // accumulate
    assert trainer.optimizer.param_groups[0]["sam_step"] == 8 // accumulate
    assert difference(resumed, whole) == 0


def test_works_interval(tmp_path: Path) -> None:
    """Steps that are not sharpness-aware have no second pass."""
    make = functools.partial(over, when=Every(3))
    model = bert()
    trainer = train(model, tmp_path, wrap=make, kind=Masks)
    assert (len(trainer.first), len(trainer.second)) == (8, 3)
    assert difference(model, train_plain(bert(), make=make)[0]) < 1e-12


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
    """`compute_loss` may remove the labels from the inputs, as many do."""

    class Own(SharpnessAwareTrainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            labels = inputs.pop("labels")
            return nn.functional.cross_entropy(model(**inputs).logits, labels)

    model = bert()
    train(model, tmp_path, kind=Own)
    assert difference(model, train_plain(bert())[0]) < 1e-12


def test_works_optimizers_argument(tmp_path: Path) -> None:
    model = bert()
    optimizer = over(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    trainer = SharpnessAwareTrainer(
        model=model, args=arguments(tmp_path), train_dataset=data(), optimizers=(optimizer, None)
    )
    trainer.train()
    assert difference(model, train_plain(bert())[0]) < 1e-12


def test_works_ddp_with_accumulation_and_clipping(tmp_path: Path) -> None:
    """Two processes with half of each batch equal one process, up to rounding."""
    run_script("ddp_transformers.py", str(tmp_path))
    model = bert()
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3}
    train(model, tmp_path, **options)
    steps, weights = torch.load(tmp_path / "two.pt")
    assert steps == 4
    assert gap(weights, model) < 1e-6  # the model computes its loss in float32


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two processes with FSDP2 found; see fsdp2_transformers.py."""
    folder = tmp_path_factory.mktemp("fsdp2")
    run_script("fsdp2_transformers.py", str(folder))
    return torch.load(folder / "two.pt")


def test_works_fsdp2_with_accumulation_and_clipping(sharded: Any, tmp_path: Path) -> None:
    """Two processes with half of each batch and of the model equal one process, up to rounding."""
    model = bert()
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3}
    trainer = train(model, tmp_path, logging_strategy="steps", logging_steps=1, **options)
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    assert sharded["grad_norms"] == pytest.approx(norms)
    assert gap(sharded["sgd"], model) < 1e-6  # the model computes its loss in float32


def test_works_fsdp2_over_adamw(sharded: Any, tmp_path: Path) -> None:
    """WSAM is preconditioned."""
    model = bert()
    train(model, tmp_path, **ADAMW)
    assert gap(sharded["adamw"], model) < 1e-6


def test_works_fsdp2_resume(sharded: Any) -> None:
    """Over AdamW."""
    assert sharded["resumed"]


# Refused settings -------------------------------------------------------------------------------


def test_refuses_plain_trainer(tmp_path: Path) -> None:
    """A Trainer without the mixin omits the second pass, which the optimizer detects."""
    model = bert()
    optimizer = over(torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = transformers.Trainer(
        model=model, args=arguments(tmp_path), train_dataset=data(), optimizers=(optimizer, None)
    )
    with pytest.raises(RuntimeError, match="SharpnessAwareTrainer"):
        trainer.train()
    assert difference(model, bert()) == 0


def test_refuses_no_optimizer(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="wrap="):
        train(bert(), tmp_path, wrap=None)


@pytest.mark.parametrize("wrap", [lambda base: base, over(torch.optim.SGD([torch.ones(1)], 0.1))])
def test_refuses_wrap_that_returns_no_sharpness_aware_optimizer(wrap: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"pass a function, such as .*got wrap="):
        train(bert(), tmp_path, wrap=wrap)


def test_refuses_clipping_with_lean(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_grad_norm"):
        train(bert(), tmp_path, wrap=functools.partial(over, lean=True), max_grad_norm=1.0)


def error_with(kind: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the error that a distributed type raises."""
    trainer = SharpnessAwareTrainer(
        model=bert(), args=arguments(folder), train_dataset=data(), wrap=over
    )
    monkeypatch.setattr(type(trainer.accelerator), "distributed_type", kind)
    with pytest.raises(ValueError, match="is not supported") as raised:
        trainer.create_optimizer()
    return str(raised.value)


@pytest.mark.parametrize("kind", ["MEGATRON_LM", "XLA"])
def test_refuses_sharding(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind in error_with(kind, tmp_path, monkeypatch)


def test_refuses_fsdp1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = error_with(DistributedType.FSDP, tmp_path, monkeypatch)
    assert "flat shards" in message
    assert "fsdp=True" in message


def test_refuses_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = error_with(DistributedType.DEEPSPEED, tmp_path, monkeypatch)
    assert "its engine calls the optimizer itself" in message
    assert "fsdp=True" in message


def test_refuses_fp16_on_a_cpu(tmp_path: Path) -> None:
    """The Trainer would train in float32 without a warning."""
    with pytest.raises(ValueError, match="'fp16' on cpu"):
        train(bert(), tmp_path, fp16=True)


def test_refuses_update_during_backward(tmp_path: Path) -> None:
    trainer = SharpnessAwareTrainer(
        model=bert(), args=arguments(tmp_path, optim="lomo"), train_dataset=data(), wrap=over
    )
    with pytest.raises(ValueError, match="lomo"):
        trainer.create_optimizer()


def test_refuses_local_perturbation(tmp_path: Path) -> None:
    model = pretend_ddp(bert())
    with pytest.raises(ValueError, match="local=True"):
        train(model, tmp_path, wrap=functools.partial(over, local=True, model=model))


def test_trainer_is_built_from_the_mixin() -> None:
    assert SharpnessAwareTrainer.__mro__[1:3] == (SharpnessAwareMixin, transformers.Trainer)
