"""Helpers of the Trainer tests: a tiny model, and arguments without output."""

import functools
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
import transformers
from framework_helpers import autocast_to
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import wsam
from wsam.integrations.transformers import SharpnessAwareTrainer

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
EPOCHS, LENGTH, WORDS = 2, 6, 20
ADAMW: dict[str, Any] = {"optim": "adamw_torch", "optim_args": None, "learning_rate": 0.01}


def data(count: int = 16) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, WORDS, (count, LENGTH), generator=generator)
    return [{"input_ids": w, "labels": w[0] % 3} for w in words]


def bert(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=3,
    )
    return BertForSequenceClassification(config).to(dtype)


def over(base: torch.optim.Optimizer, **options: Any) -> wsam.SharpnessAware:
    return wsam.WSAM(base, rho=0.1, gamma=0.8, **options)


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    quiet = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.1,
        "max_grad_norm": 0.0,
        "optim": "sgd",
        "optim_args": "momentum=0.9",
    }
    return TrainingArguments(**{**quiet, **options})


def train(
    model: nn.Module, folder: Path, *, wrap: Any = over, kind: Any = None, **options: Any
) -> Any:
    resume = options.pop("resume_from_checkpoint", None)
    count = options.pop("count", 16)
    args = arguments(folder, **options)
    kind = kind or SharpnessAwareTrainer
    trainer = kind(model=model, args=args, train_dataset=data(count), wrap=wrap)
    # Otherwise the loss, which is a mean, is not divided by the number of micro-batches.
    trainer.model_accepts_loss_kwargs = False
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def train_plain(
    model: nn.Module,
    *,
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
    base: Any = None,
    make: Any = over,
    count: int = 16,
) -> tuple[nn.Module, wsam.SharpnessAware, list[float]]:
    """Train in a plain loop, all micro-batches of a step inside the closure."""
    base = base or functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer = make(base(model.parameters()))
    rows = data(count)
    batches = [rows[i : i + 4] for i in range(0, len(rows), 4)]
    steps = [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)] * EPOCHS
    scheduler = transformers.get_scheduler("linear", optimizer, 0, len(steps))
    losses = []
    model.train()
    for step in steps:

        def closure(step: Any = step) -> Tensor:
            total = torch.zeros(())
            for rows in step:
                batch = {k: torch.stack([row[k] for row in rows]) for k in rows[0]}
                with autocast_to(autocast):
                    loss = model(**batch).loss / len(step)
                loss.backward()
                total = total + loss.detach()
            return total

        losses.append(float(optimizer.step(closure)))
        scheduler.step()
    return model, optimizer, losses
