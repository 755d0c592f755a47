"""Train with Lightning: bfloat16, accumulation and clipping are options of its Trainer.

    python examples/lightning_trainer.py [CHECKPOINT]

The mixin adds the second pass. A CHECKPOINT written by the Trainer is continued.
"""

import sys

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from wsam import WSAM
from wsam.integrations.lightning import SharpnessAwareMixin


class Classifier(SharpnessAwareMixin, lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = cross_entropy(self.model(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        base = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return WSAM(base, rho=0.05, gamma=0.8, model=self)


def main(checkpoint: str | None = None, epochs: int = 4) -> None:
    torch.manual_seed(0)
    x = torch.randn(2048, 20)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    trainer = lightning.Trainer(
        max_epochs=epochs,
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        gradient_clip_val=5.0,  # with gamma 0.8, 5 times the value without WSAM
        logger=False,
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=32, shuffle=True), ckpt_path=checkpoint)
    print(f"steps {trainer.global_step}, loss {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
