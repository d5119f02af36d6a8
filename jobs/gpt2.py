"""GPT-2 of the package `transformers`, small and with random weights, learns to sort letters.

The texts (`dacb=abcd`) differ in length, which the data set states (`lengths`): micro-steps are
bounded by padded tokens (`accumulation.micro_tokens`), and the loss is exact per token for any
split.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from orchestrator import Job, JobError, Loss

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ModuleNotFoundError as error:
    raise JobError(
        f"job=gpt2: {error}; pip install 'transformers>=5' (the extra 'peers' has it)"
    ) from error

BYTES = 256
ALPHABET = (ord("a"), ord("p"))
END = 10  # the newline, which begins each sequence, too
PADDING = -100  # a target that counts for nothing


class SortedLetters:
    """Data set of texts of the kind `dacb=abcd`, drawn at random.

    Each is a tensor of bytes, shape (length,), with a newline at its end.

    Args:
        count: how many.
        letters: to sort, at most; each number from 1 on is equally frequent.
        seed: of the generator.

    Attributes:
        lengths: of all texts, in bytes.
    """

    def __init__(self, count: int, letters: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randint(1, letters + 1, (count,), generator=generator).tolist()
        drawn = torch.randint(*ALPHABET, (count, letters), generator=generator).tolist()
        self._texts = [
            [*row[:number], *b"=", *sorted(row[:number]), END]
            for row, number in zip(drawn, numbers, strict=True)
        ]
        self.lengths = [len(text) for text in self._texts]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(self._texts[index])


class GPT2(Job):
    """Predict the next byte of letters and of the same letters sorted.

    Args:
        width, layers, heads: of the transformer.
        dropout: in all of its places.
        letters: of the longest text.
        samples, held_out: numbers of texts.
    """

    metric_names = ("accuracy",)

    def __init__(
        self,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        dropout: float = 0.0,
        letters: int = 12,
        samples: int = 2048,
        held_out: int = 256,
    ) -> None:
        self.width, self.layers, self.heads = width, layers, heads
        self.dropout = dropout
        self.letters, self.samples, self.held_out = letters, samples, held_out

    def model(self) -> nn.Module:
        config = GPT2Config(
            vocab_size=BYTES,
            n_positions=2 * self.letters + 2,  # `=` and END
            n_embd=self.width,
            n_layer=self.layers,
            n_head=self.heads,
            resid_pdrop=self.dropout,
            embd_pdrop=self.dropout,
            attn_pdrop=self.dropout,
            bos_token_id=END,
            eos_token_id=END,
            use_cache=False,
        )
        return GPT2LMHeadModel(config)

    def dataset(self) -> SortedLetters:
        return SortedLetters(self.samples, self.letters, seed=0)

    def validation(self) -> SortedLetters:
        return SortedLetters(self.held_out, self.letters, seed=1)

    def collate(self, samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return inputs, which begin with END, and targets, each of shape (samples, longest)."""
        targets = pad_sequence(samples, batch_first=True, padding_value=PADDING)
        inputs = functional.pad(targets[:, :-1].clamp(min=0), (1, 0), value=END)
        return inputs, targets

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        inputs, targets = batch
        # Padding is at the end, so the causal mask alone hides it from all real tokens. The loss
        # that the model computes itself is a mean over its micro-batch: no sum.
        logits = model(input_ids=inputs).logits.flatten(0, 1)
        total = functional.cross_entropy(
            logits, targets.flatten(), ignore_index=PADDING, reduction="sum"
        )
        correct = (logits.argmax(1) == targets.flatten()).sum()
        tokens = (targets != PADDING).sum()
        return Loss(total, weight=tokens, metrics={"accuracy": correct})
