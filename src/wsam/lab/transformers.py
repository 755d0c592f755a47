"""Small transformers, GPT for characters and ViT for images, with optional low-rank adapters."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention


class GPT(nn.Module):
    """A small decoder of characters, 4 layers of width 128 by default.

    Args:
        length: Characters of an input.
        characters: Number of different characters.
        layers: Number of blocks.
        width: Length of the vector of a character.
        heads: Attention heads; they must divide the width.
        dropout: Probability of dropout.
        lora_rank: Rank of the adapters; 0 for none.

    Reference:
        Radford et al., Language models are unsupervised multitask learners, 2019.
    """

    def __init__(
        self,
        length: int,
        characters: int,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        dropout: float = 0.0,
        lora_rank: int = 0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.dropout = nn.Dropout(dropout)
        blocks = (Block(width, heads, dropout, causal=True) for _ in range(layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        normal_init(self)
        if lora_rank:
            add_adapters(self, lora_rank)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, characters, length) logits of the next character at each position."""
        x = self.blocks(self.dropout(self.tokens(x) + self.places[: x.shape[1]]))
        return cast(Tensor, self.head(self.norm(x)).transpose(1, 2))


class ViT(nn.Module):
    """A vision transformer for small images, 8 layers of width 256 by default: 6.3 million parameters.

    Patches have learned positions, and their outputs are averaged before the head.

    Args:
        shape: Channels, rows and columns of an image.
        classes: Number of classes.
        layers: Number of blocks.
        width: Length of the vector of a patch.
        heads: Attention heads; they must divide the width.
        patch: Rows and columns of a patch; they must divide those of an image.
        dropout: Probability of dropout.
        lora_rank: Rank of the adapters; 0 for none.

    Reference:
        Dosovitskiy et al., An image is worth 16x16 words, ICLR 2021.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        layers: int = 8,
        width: int = 256,
        heads: int = 4,
        patch: int = 4,
        dropout: float = 0.0,
        lora_rank: int = 0,
    ) -> None:
        super().__init__()
        channels, rows, columns = shape
        if rows % patch or columns % patch:
            raise ValueError(f"a patch of {patch} does not divide images of {rows} x {columns}")
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.places = nn.Parameter(torch.zeros(rows // patch * (columns // patch), width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        normal_init(self)
        if lora_rank:
            add_adapters(self, lora_rank)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = self.blocks(self.dropout(x + self.places))
        return cast(Tensor, self.head(self.norm(x).mean(1)))


def normal_init(model: nn.Module) -> None:
    """Initialize linear layers and embeddings with deviation 0.02, and biases with zero."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class Block(nn.Module):
    """Self-attention and a perceptron, each after a LayerNorm, with residuals and dropout."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool = False) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{heads} heads do not divide a width of {width}")
        self.heads, self.rate, self.causal = heads, dropout, causal
        self.dropout = nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        batch, length, width = x.shape
        parts = self.attention(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        rate = self.rate if self.training else 0.0
        mixed = scaled_dot_product_attention(
            query, key, value, dropout_p=rate, is_causal=self.causal
        )
        mixed = self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + self.dropout(mixed)
        return x + cast(Tensor, self.dropout(self.mlp(self.norm2(x))))


class LowRankLinear(nn.Linear):
    """A frozen linear layer plus a trained product of two thin matrices: ``W x + b + B A x``.

    Args:
        layer: The layer, whose weights are shared.
        rank: Rows of A and columns of B.

    Reference:
        Hu et al., LoRA: Low-rank adaptation of large language models, ICLR 2022.
    """

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.a = nn.Parameter(torch.randn(rank, self.in_features) / math.sqrt(self.in_features))
        self.b = nn.Parameter(torch.zeros(self.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        return super().forward(x) + linear(linear(x, self.a), self.b)


def add_adapters(model: GPT | ViT, rank: int) -> None:
    """Freeze all weights but the head, and add adapters to the attention of each block."""
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention = LowRankLinear(block.attention, rank)
        block.project = LowRankLinear(block.project, rank)
