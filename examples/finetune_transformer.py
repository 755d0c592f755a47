"""Fine-tune a transformer with Coupled-WSAM over AdamW: warm-up, clipping, evaluation.

    python examples/finetune_transformer.py [FOLDER]

FOLDER contains a model saved by transformers; by default a small BERT with random weights is used.
The task is a placeholder: does a sequence begin with a small number?
"""

import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from wsam import CoupledWSAM
from wsam.schedule import Warmup

SMALL = BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
)


def sequences(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(0, SMALL.vocab_size, (count, 15))
    return words, (words[:, 0] < SMALL.vocab_size // 2).long()


def main(folder: str | None = None, steps: int = 120) -> None:
    torch.manual_seed(0)
    model = BertForSequenceClassification(SMALL)
    if folder is not None:
        model = BertForSequenceClassification.from_pretrained(folder)
    base = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    optimizer = CoupledWSAM(base, rho=0.05, gamma=Warmup(0.6, steps=steps // 10), max_norm=1.0)
    scheduler = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)

    model.train()
    for step in range(steps):
        words, labels = sequences(32)

        def closure(words=words, labels=labels):  # dropout uses the same masks in both passes
            loss = model(input_ids=words, labels=labels).loss
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        scheduler.step()
        if step % 40 == 39:
            print(f"step {step + 1}: loss {loss:.3f}, sharpness {optimizer.sharpness:.4f}")
    model.eval()
    words, labels = sequences(500)
    with torch.no_grad():
        right = (model(input_ids=words).logits.argmax(1) == labels).float().mean()
    print(f"accuracy {100 * right:.1f}%")


if __name__ == "__main__":
    main(*sys.argv[1:])
