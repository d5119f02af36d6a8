"""A small transformer that predicts the next byte of Python's standard library, exact per token.

Sequences differ in length, so micro-batches differ in tokens. The loss is a sum over tokens whose
weight is their number: dividing each micro-batch by its own number, as many trainers do, would give
another gradient (transformers issue 34191).
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from orchestrator import Job, Loss
from orchestrator.jobs.python_source import Paragraphs

BYTES = 256
BEGIN = 0  # the byte NUL, which no source file holds, begins every sequence
PADDING = -100  # a target that counts for nothing


class Block(nn.Module):
    """Attention to what came before, then a net of two layers; both behind a norm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, places, width) to the same."""
        samples, places, width = x.shape
        split = self.inward(self.norm1(x)).view(samples, places, 3, self.heads, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        # Padding is at the end, so a causal mask hides it from all real tokens.
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.outward(seen.transpose(1, 2).reshape(samples, places, width)))
        return x + self.dropout(self.back(functional.gelu(self.hidden(self.norm2(x)))))


class Transformer(nn.Module):
    """Scores of the next byte; the embedding of bytes is their output layer too (tied)."""

    def __init__(self, width: int, layers: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.output = nn.Linear(width, BYTES, bias=False)
        for embedding in (self.embedding, self.places):
            nn.init.normal_(embedding.weight, std=width**-0.5)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (samples, places) of bytes to (samples, places, 256)."""
        x = self.embedding(tokens) + self.places.weight[: tokens.shape[1]]
        return self.output(self.norm(self.blocks(self.dropout(x))))


class LanguageModel(Job):
    """Predict the next byte.

    Args:
        width, layers, heads: of the transformer.
        context: longest sequence, in bytes.
        dropout: after each part of a block.
        sequences, held_out: how many sequences to train with, and to evaluate with.
    """

    metric_names = ("accuracy",)

    def __init__(
        self,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        context: int = 128,
        dropout: float = 0.1,
        sequences: int = 2048,
        held_out: int = 256,
    ) -> None:
        self.shape = (width, layers, heads, context, dropout)
        self.context, self.sequences, self.held_out = context, sequences, held_out

    def model(self) -> nn.Module:
        return Transformer(*self.shape)

    def dataset(self) -> Paragraphs:
        return Paragraphs(self.sequences, self.context)

    def collate(self, samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return (samples, longest) of inputs, which begin with BEGIN, and of targets."""
        targets = pad_sequence([s.long() for s in samples], batch_first=True, padding_value=PADDING)
        inputs = functional.pad(targets[:, :-1].clamp(min=BEGIN), (1, 0), value=BEGIN)
        return inputs, targets

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        inputs, targets = batch
        scores = model(inputs).flatten(0, 1)
        total = functional.cross_entropy(
            scores, targets.flatten(), ignore_index=PADDING, reduction="sum"
        )
        right = (scores.argmax(1) == targets.flatten()).sum()
        tokens = (targets != PADDING).sum()
        return Loss(total, weight=tokens, metrics={"accuracy": right})

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        held_out = Paragraphs(self.held_out, self.context, held_out=True)
        nats, tokens = 0.0, 0
        for first in range(0, self.held_out, 32):
            last = min(first + 32, self.held_out)
            batch = self.collate([held_out[place] for place in range(first, last)])
            found = self.loss(model, tuple(part.to(device) for part in batch))
            nats, tokens = nats + found.total.item(), tokens + int(found.weight)
        return {"bits_per_byte": nats / tokens / math.log(2)}
