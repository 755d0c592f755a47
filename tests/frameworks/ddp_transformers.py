"""Program of test_transformers: train in two processes, check that replicas agree, save the weights."""

from pathlib import Path

import ddp_pair
import torch
from transformers_helpers import bert, train


def work(rank: int, folder: str) -> None:
    model = bert()
    trainer = train(
        model,
        Path(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.3,
        ddp_backend="gloo",
    )
    assert trainer.accelerator.num_processes == 2
    for p in model.parameters():
        both = trainer.accelerator.gather(p.detach()[None])
        assert torch.equal(both[0], both[1]), "replicas differ"
    if rank == 0:
        torch.save((trainer.state.global_step, model.state_dict()), f"{folder}/two.pt")


if __name__ == "__main__":
    ddp_pair.start(work)
