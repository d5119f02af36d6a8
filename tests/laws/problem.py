"""A small training problem with every kind of parameter, and its two solutions.

One is a big batch in plain torch, the other any split of it through the accumulator.
"""

from dataclasses import dataclass

import torch
from torch import nn

from orchestrator import Loss
from orchestrator.engine.torch import Accumulator
from orchestrator.local_ranks.threads import run_in_threads

TOKENS, WIDTH, LONGEST = 7, 4, 5


class Net(nn.Module):
    """Next-token scores, with parameters that are tied, frozen, complex, sparse, rare or unused."""

    def __init__(self, sparse=False, mixed=False, dropout=0.0):
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, TOKENS)
        self.output.weight = self.embedding.weight  # tied
        self.places = nn.Embedding(LONGEST, WIDTH, sparse=sparse)
        self.turn = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.rare = nn.Parameter(torch.randn(WIDTH))  # used by samples that begin with token 0
        self.never = nn.Parameter(torch.randn(3))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64)) if mixed else None
        self.dropout = nn.Dropout(dropout)
        # Weights that begin at 0 consist of gradients alone, whose last bits any order of additions
        # changes; a bound relative to them would be one on float32 itself.
        nn.init.normal_(self.norm.bias)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.places.weight[: tokens.shape[1]] + self.frozen
        if self.places.sparse:
            x = x + self.places(torch.arange(tokens.shape[1]))
        if bool((tokens[:, 0] == 0).any()):
            x = x + torch.where((tokens[:, :1] == 0).unsqueeze(2), self.rare, 0.0 * self.rare)
        x = self.dropout(self.norm(torch.tanh(self.hidden(x))))
        x = (x.to(self.turn.dtype) * self.turn).abs()
        scores = self.output(x)
        return scores if self.scale is None else scores * self.scale.to(scores.dtype)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A problem. `weighting`: "samples", "tokens" or "own" (random weights of samples)."""

    samples: int = 12
    dtype: torch.dtype = torch.float64
    weighting: str = "tokens"
    optimizer: str = "adamw"
    clip_norm: float | None = None
    weight_decay: float = 0.1
    sparse: bool = False
    mixed: bool = False
    rate: float = 0.1
    updates: int = 2
    seed: int = 0

    def model(self):
        torch.manual_seed(self.seed)
        model = Net(sparse=self.sparse, mixed=self.mixed)
        if self.dtype == torch.float64:
            model = model.double()
            model.turn = nn.Parameter(model.turn.data.to(torch.complex128))
        return model

    def build_optimizer(self, model):
        slow = [model.embedding.weight, model.rare]
        rest = [p for p in model.parameters() if p.requires_grad and all(p is not q for q in slow)]
        groups = [{"params": slow, "lr": self.rate / 10, "weight_decay": 0.0}, {"params": rest}]
        if self.optimizer == "sgd":
            return torch.optim.SGD(
                groups, lr=self.rate, momentum=0.9, weight_decay=self.weight_decay
            )
        return torch.optim.AdamW(groups, lr=self.rate, weight_decay=self.weight_decay)

    def data(self, update):
        made = torch.Generator().manual_seed(100 * self.seed + update)
        tokens = torch.randint(0, TOKENS, (self.samples, LONGEST), generator=made)
        lengths = torch.randint(1, LONGEST, (self.samples,), generator=made)
        weights = torch.rand(self.samples, generator=made, dtype=torch.float64) + 0.1
        return tokens, lengths, weights

    def loss(self, model, tokens, lengths, weights):
        """The sum over these samples of what is minimised, and what it is to be divided by."""
        scores = model(tokens[:, :-1])
        each = nn.functional.cross_entropy(scores.transpose(1, 2), tokens[:, 1:], reduction="none")
        mask = torch.arange(LONGEST - 1) < lengths[:, None]
        per_sample = (each * mask).sum(1)
        if self.weighting == "own":
            return Loss((per_sample * weights.to(each.dtype)).sum(), float(weights.sum()))
        if self.weighting == "tokens":
            return Loss(per_sample.sum(), mask.sum())  # a weight may be a tensor
        return Loss(per_sample.sum(), len(tokens))


def numbers(model):
    """All weights by name, as float64 or complex128."""
    return {
        name: p.detach().clone().to(torch.complex128 if p.is_complex() else torch.float64)
        for name, p in model.named_parameters()
    }


def big_batch(problem, *, divide_gradient=False):
    """(weights, losses, gradient norms) after plain training in one process.

    The loss is divided by its weight before the backward, or the gradient after it.
    """
    model = problem.model()
    optimizer = problem.build_optimizer(model)
    losses, norms = [], []
    for update in range(problem.updates):
        optimizer.zero_grad()
        found = problem.loss(model, *problem.data(update))
        mean = found.total / float(found.weight)
        (found.total if divide_gradient else mean).backward()
        for p in model.parameters():
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()
            if p.grad is not None and divide_gradient:
                p.grad /= float(found.weight)
        limit = float("inf") if problem.clip_norm is None else problem.clip_norm
        norms.append(_clip(model, limit))
        optimizer.step()
        losses.append(mean.item())
    return numbers(model), losses, norms


def _clip(model, limit):
    """clip_grad_norm_ for dtypes of all kinds at once, which torch's own does not mix."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = sum(float(torch.linalg.vector_norm(g).double() ** 2) for g in grads) ** 0.5
    for grad in grads:
        grad.mul_(min(1.0, limit / (norm + 1e-6)))
    return norm


def split(problem, cuts, expected_weight=None, **accumulator):
    """The same through accumulators; `cuts[rank]` are the (first, last) of its micro-batches.

    Gives one (weights, losses, norms) for each rank.
    """

    def train(group):
        model = problem.model()
        optimizer = problem.build_optimizer(model)
        ours = Accumulator(model, optimizer, group, clip_norm=problem.clip_norm, **accumulator)
        losses, norms = [], []
        for update in range(problem.updates):
            data = problem.data(update)
            ours.begin_window(expected_weight=expected_weight)
            for number, (first, last) in enumerate(cuts[group.rank]):
                piece = [part[first:last] for part in data]
                is_last = number == len(cuts[group.rank]) - 1
                ours.backward(problem.loss(model, *piece), last=is_last)
            report = ours.boundary()
            optimizer.zero_grad(set_to_none=True)  # what users do; it must not matter
            losses.append(report.loss)
            norms.append(report.gradient_norm)
        ours.close()
        return numbers(model), losses, norms

    return run_in_threads(len(cuts), train)


def difference(found, wanted):
    """Largest over tensors of max |a - b| / max |b|."""
    with torch.no_grad():
        return max(
            float((found[name] - wanted[name]).abs().max() / wanted[name].abs().max().clamp(1e-30))
            for name in wanted
        )
