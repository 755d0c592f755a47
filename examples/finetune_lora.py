"""Fine-tune a pretrained transformer with low-rank adapters (LoRA) by SAM over AdamW.

    python examples/finetune_lora.py [--pretrained vit.pt] [--checkpoint adapters.pt] [--bfloat16]

A small vision transformer is trained on the digits 0 to 4 by AdamW, and its weights are written to the
file `--pretrained`; an existing one is loaded instead. The weights are frozen. Adapters and a new head
learn the digits 5 to 9 by SAM, which perturbs only what is trained. An existing checkpoint of the
adapters is continued.
"""

import argparse
import math
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

import wsam


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.narrow(gelu(self.wide(self.norm2(x))))


class ViT(nn.Module):
    """A transformer over the 16 patches of 2 x 2 pixels of a digit."""

    def __init__(self, layers: int = 2, width: int = 64, classes: int = 5) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        patches = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(patches + self.positions).mean(1))


class LoRA(nn.Module):
    """A frozen linear layer W with a trained update of low rank: W x + (scale / rank) B A x."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float = 8.0) -> None:
        super().__init__()
        self.linear, self.scale = linear, scale / rank
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / math.sqrt(linear.in_features))
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))  # no update at first

    def forward(self, x):
        return self.linear(x) + self.scale * (x @ self.a.T @ self.b.T)


def add_adapters(model: ViT, rank: int) -> None:
    """Freeze the model, give each linear layer of its blocks an adapter, and replace the head."""
    model.requires_grad_(False)
    for name, module in list(model.blocks.named_modules()):
        if isinstance(module, nn.Linear):
            model.blocks.set_submodule(name, LoRA(module, rank))
    model.head = nn.Linear(model.head.in_features, model.head.out_features)


def digits(low: int, high: int) -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set of some digits."""
    pixels, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    chosen = (labels >= low) & (labels <= high)
    x, y = pixels[chosen].view(-1, 1, 8, 8).float() / 16, labels[chosen] - low
    return TensorDataset(x[:600], y[:600]), TensorDataset(x[600:], y[600:])


@torch.no_grad()
def accuracy(model: ViT, data: TensorDataset, device: str) -> float:
    x, y = (tensor.to(device) for tensor in data.tensors)
    return 100 * float((model.eval()(x).argmax(1) == y).float().mean())


def fit(model: ViT, data, args, epochs: int, lr: float, rho: float, checkpoint=None) -> None:
    """Train what is not frozen; with a radius of 0 by AdamW alone."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    base = torch.optim.AdamW(trained.values(), lr=lr, weight_decay=0.01)
    optimizer = wsam.SAM(base, rho=rho, max_norm=1.0, model=model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)

    def loss_fn(x, y):
        return cross_entropy(model(x), y)

    autocast = torch.bfloat16 if args.bfloat16 else None
    train_step = wsam.train_step(optimizer, loss_fn, autocast=autocast)
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(state["adapters"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"])

    for epoch in range(scheduler.last_epoch + 1, epochs + 1):
        model.train()
        for batch in DataLoader(data[0], batch_size=50, shuffle=True):
            loss, _ = train_step(*(tensor.to(args.device) for tensor in batch))
        scheduler.step()
        if checkpoint is not None:
            state = {
                "adapters": {name: p.detach() for name, p in trained.items()},
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "random": torch.get_rng_state(),
            }
            torch.save(state, checkpoint)
        if epoch % 5 == 0 or epoch == epochs:
            found = accuracy(model, data[1], args.device)
            print(f"epoch {epoch}: loss {loss:.3f}, test accuracy {found:.1f}%")


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = ViT().to(args.device)
    if args.pretrained is not None and args.pretrained.exists():
        model.load_state_dict(torch.load(args.pretrained, weights_only=True))
    else:
        fit(model, digits(0, 4), args, args.pretrain_epochs, lr=4e-3, rho=0.0)
        if args.pretrained is not None:
            torch.save(model.state_dict(), args.pretrained)

    torch.manual_seed(1)  # as if the weights had been loaded
    add_adapters(model, args.rank)
    model.to(args.device)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    share = 100 * trained / sum(p.numel() for p in model.parameters())
    print(f"adapters: {trained} parameters are trained, {share:.1f}% of all")
    fit(model, digits(5, 9), args, args.epochs, args.lr, args.rho, args.checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pretrained", type=Path)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    numbers = {"pretrain-epochs": 20, "epochs": 20, "rank": 4, "lr": 5e-3, "rho": 0.05}
    for name, default in numbers.items():
        parser.add_argument(
            f"--{name}", type=type(default), default=default, help="default: %(default)s"
        )
    main(parser.parse_args())
