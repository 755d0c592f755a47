"""Train a GPT on the characters of a text with SAM over AdamW, and let it write.

    python examples/nanogpt.py TEXT [--checkpoint gpt.pt] [--compile]

The defaults (6 layers, 384 wide, block 256) are for a GPU and a text of a million characters. On a CPU
try `--layers 2 --heads 4 --width 64 --block 64 --batch 16 --steps 1000`. `--rho 0` is plain AdamW. An
existing checkpoint is continued: pass the same options again.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import wsam

SIZES = {"layers": 6, "heads": 6, "width": 384, "block": 256, "batch": 64, "micro-batches": 1}
STEPS = {"steps": 2500, "warmup": 100, "evaluate-every": 250, "write": 500}
RATES = {"lr": 1e-3, "weight-decay": 0.1, "dropout": 0.2, "rho": 0.05, "max-norm": 1.0}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("--checkpoint", type=Path, help="written at each evaluation")
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND")
    cuda = torch.cuda.is_available()
    parser.add_argument("--bfloat16", action=argparse.BooleanOptionalAction, default=cuda)
    for name, default in {**SIZES, **STEPS, **RATES}.items():
        parser.add_argument(
            f"--{name}", type=type(default), default=default, help="default: %(default)s"
        )
    return parser.parse_args()


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.wide = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.narrow(gelu(self.wide(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, characters: int, args: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, args.width)
        self.positions = nn.Embedding(args.block, args.width)
        self.drop = nn.Dropout(args.dropout)
        blocks = (Block(args.width, args.heads, args.dropout) for _ in range(args.layers))
        self.blocks = nn.Sequential(*blocks, nn.LayerNorm(args.width))
        self.head = nn.Linear(args.width, characters, bias=False)
        self.head.weight = self.tokens.weight
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, x):
        positions = self.positions.weight[: x.shape[1]]
        return self.head(self.blocks(self.drop(self.tokens(x) + positions)))


def draw(data, args: argparse.Namespace, generator=None):
    """Return random sequences, and the characters that follow each character."""
    start = torch.randint(len(data) - args.block, (args.batch, 1), generator=generator)
    index = (start + torch.arange(args.block + 1)).to(data.device)
    return data[index[:, :-1]], data[index[:, 1:]]


@torch.no_grad()
def write(model: GPT, x, count: int, block: int, temperature: float = 0.8):
    for _ in range(count):
        logits = model(x[:, -block:])[:, -1] / temperature
        x = torch.cat([x, torch.multinomial(logits.softmax(1), 1)], 1)
    return x


def main(args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    text = args.text.read_text(encoding="utf-8")
    characters = sorted(set(text))
    codes = {character: code for code, character in enumerate(characters)}
    data = torch.tensor([codes[character] for character in text], device=device)
    train, validation = data.tensor_split([len(data) * 9 // 10])

    model = GPT(len(characters), args).to(device)
    forward = torch.compile(model, backend=args.compile) if args.compile else model
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    base = torch.optim.AdamW(groups, args.lr, betas=(0.9, 0.99), weight_decay=args.weight_decay)
    optimizer = wsam.SAM(base, rho=args.rho, max_norm=args.max_norm, model=model)

    def rate(step: int) -> float:  # linear warm-up, then a cosine to a tenth
        progress = min(1.0, max(0, step - args.warmup) / max(1, args.steps - args.warmup))
        return min(1.0, (step + 1) / args.warmup) * (0.55 + 0.45 * math.cos(math.pi * progress))

    def loss_fn(x, y):
        return cross_entropy(forward(x).flatten(0, 1), y.flatten())

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    autocast = torch.bfloat16 if args.bfloat16 else None
    train_step = wsam.train_step(
        optimizer, loss_fn, autocast=autocast, micro_batches=args.micro_batches
    )
    saved = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if args.checkpoint is not None and args.checkpoint.exists():
        state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        for name, each in saved.items():
            each.load_state_dict(state[name])
        torch.set_rng_state(state["random"])
        torch.cuda.set_rng_state_all(state["cuda_random"])

    for step in range(scheduler.last_epoch + 1, args.steps + 1):
        loss, _ = train_step(*draw(train, args))
        scheduler.step()
        if step % args.evaluate_every == 0 or step == args.steps:
            if args.checkpoint is not None:
                state = {name: each.state_dict() for name, each in saved.items()}
                state["random"] = torch.get_rng_state()
                state["cuda_random"] = torch.cuda.get_rng_state_all()
                torch.save(state, args.checkpoint)
            generator = torch.Generator().manual_seed(0)  # the same sequences each time
            model.eval()
            with torch.no_grad():
                losses = [loss_fn(*draw(validation, args, generator)) for _ in range(20)]
            model.train()
            print(f"step {step}: loss {loss:.3f}, validation loss {sum(losses) / 20:.3f}")

    start = data[:1].view(1, 1)  # the first character of the text
    written = write(model.eval(), start, args.write, args.block)
    print("".join(characters[code] for code in written[0]))


if __name__ == "__main__":
    main(options())
