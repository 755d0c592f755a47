"""Train with the Trainer of Hugging Face: clipping and accumulation are its own arguments.

    python examples/hugging_face_trainer.py [FOLDER]

`wrap` receives the optimizer that the Trainer creates. The Trainer writes to FOLDER. The task: does a
sequence begin with a small number?
"""

import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from wsam import SAM
from wsam.integrations.transformers import SharpnessAwareTrainer


def main(folder: str = "out") -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4}
    words = torch.randint(0, 100, (2048, 15))
    trainer = SharpnessAwareTrainer(
        model=BertForSequenceClassification(BertConfig(vocab_size=100, **sizes, **layers)),
        args=TrainingArguments(
            output_dir=folder,
            num_train_epochs=3,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            learning_rate=2e-3,
            max_grad_norm=1.0,
            report_to=[],
        ),
        train_dataset=[{"input_ids": row, "labels": row[0] // 50} for row in words],
        wrap=lambda base: SAM(base, rho=0.05),
    )
    result = trainer.train()
    sharpness = trainer.optimizer.optimizer.sharpness
    print(f"steps {result.global_step}, loss {result.training_loss:.3f}, sharpness {sharpness:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
