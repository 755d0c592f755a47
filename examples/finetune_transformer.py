"""Fine-tune a compiled transformer with SAM over AdamW: warm-up, clipping, evaluation.

    python examples/finetune_transformer.py [FOLDER] [BACKEND]

FOLDER contains a model saved by transformers; by default a small BERT with random weights is used.
BACKEND is that of torch.compile. The task: does a sequence begin with a small number?
"""

import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import wsam

SMALL = BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
)


def sequences(count: int) -> dict[str, torch.Tensor]:
    words = torch.randint(0, SMALL.vocab_size, (count, 15))
    return {"input_ids": words, "labels": (words[:, 0] < SMALL.vocab_size // 2).long()}


def main(folder: str | None = None, backend: str = "inductor", steps: int = 120) -> None:
    torch.manual_seed(0)
    model = BertForSequenceClassification(SMALL)
    if folder is not None:
        model = BertForSequenceClassification.from_pretrained(folder)
    model.train()
    base = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    rho = wsam.schedule.Warmup(0.05, steps=steps // 10)
    optimizer = wsam.SAM(base, rho=rho, max_norm=1.0, model=model)
    scheduler = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    train_step = wsam.train_step(optimizer, torch.compile(model, backend=backend))

    for step in range(steps):
        loss, _ = train_step(**sequences(32))
        scheduler.step()
        if step % 40 == 39:
            print(f"step {step + 1}: loss {loss:.3f}, sharpness {optimizer.sharpness:.4f}")
    batch = sequences(500)
    with torch.no_grad():
        right = (model.eval()(**batch).logits.argmax(1) == batch["labels"]).float().mean()
    print(f"accuracy {100 * right:.1f}%")


if __name__ == "__main__":
    main(*sys.argv[1:])
