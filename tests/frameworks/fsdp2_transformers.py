"""Program of test_transformers: two processes that shard the model (FSDP2) save whole weights."""

from pathlib import Path
from typing import Any

import ddp_pair
import torch
from accelerate_helpers import shard_on_cpu
from framework_helpers import reset_accelerate
from torch import Tensor
from transformers_helpers import ADAMW, bert, train

from wsam.integrations.transformers import SharpnessAwareTrainer


class ShardedTrainer(SharpnessAwareTrainer):
    """A Trainer that uses FSDP2 on CPUs, too."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        shard_on_cpu(self.accelerator, **self.args.fsdp_plugin_args)
        self.is_fsdp_enabled = True


def fit(folder: Path, **options: Any) -> Any:
    reset_accelerate()
    trainer = train(
        bert(),
        folder,
        kind=ShardedTrainer,
        fsdp=True,
        # By default Accelerate shards the embeddings of a BERT twice, and fails.
        fsdp_config={"transformer_layer_cls_to_wrap": "BertLayer"},
        per_device_train_batch_size=2,
        ddp_backend="gloo",
        **options,
    )
    assert trainer.accelerator.num_processes == 2
    return trainer


def weights(trainer: Any) -> dict[str, Tensor]:
    return {key: shard.full_tensor() for key, shard in trainer.model.state_dict().items()}


def over_adamw(folder: Path) -> tuple[dict[str, Tensor], bool]:
    """Return the weights, and whether a run continued from a checkpoint ends with the same ones."""
    adam = ADAMW | {"save_strategy": "steps", "save_steps": 5}
    whole = weights(fit(folder, **adam))
    (checkpoint,) = folder.glob("checkpoint-5")
    again = fit(folder / "again", resume_from_checkpoint=str(checkpoint), **adam)
    assert again.optimizer.param_groups[0]["sam_step"] == again.state.global_step == 8
    return whole, all(torch.equal(whole[key], w) for key, w in weights(again).items())


def work(rank: int, folder: str) -> None:
    trainer = fit(
        Path(folder),
        gradient_accumulation_steps=2,
        max_grad_norm=0.3,
        logging_strategy="steps",
        logging_steps=1,
    )
    adamw, resumed = over_adamw(Path(folder) / "adamw")
    found = {
        "sgd": weights(trainer),
        "grad_norms": [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row],
        "adamw": adamw,
        "resumed": resumed,
    }
    if rank == 0:
        torch.save(found, f"{folder}/two.pt")


if __name__ == "__main__":
    ddp_pair.start(work)
