"""A small training loop with a fault (or none), which knows nothing of the audit.

    python loop.py FAULT [--epochs N]

It trains on 22 sentences of unequal length, in micro-batches of two, so that the last window of an
epoch is ragged. A loop without a fault divides sums by what the window of all ranks has.
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

STEPS, MICRO_BATCH, IGNORED = 3, 2, -100
FAULTS = (
    "none",
    "not-cleared",
    "cleared-each-micro-step",
    "undivided",
    "divided-twice",
    "ragged-last-window",
    "padded-tokens",
    "mean-of-means-over-ranks",
    "not-reduced",
    "reduced-each-micro-step",
    "last-micro-step-only",
    "same-data",
    "clipped-before-reduction",
    "clipped-each-micro-step",
    "fewer-micro-steps",
    "cleared-early",
)
RIGHT = (
    "sum",
    "weighted-mean",
    "no-sync",
    "scaler",
    "autocast",
    "frozen",
    "shared",
    "two-optimizers",
    "clip",
    "schedule",
    "by-hand",
    "closure",
    "drop-last",
    "warm-up",
    "norm-only",
    "clip-parts",
    "schedule-each-micro-step",
    "discarded-forward",
    "evaluates",
    "positions-first",
    "reentrant",
)
ALSO = {"cleared-early": "cleared-each-micro-step"}
"""Faults that the audit gives the name of another."""
NOT_WRONG = (
    "lbfgs",
    "two-losses",
    "other-divisor",
    "bare-dropout",
    "sharpness-aware",
)


class Model(nn.Module):
    def __init__(self, shared=False, reentrant=False, bare=False):
        super().__init__()
        self.reentrant, self.bare = reentrant, bare
        self.dropout = nn.Dropout(0.5)
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        if shared:
            self.head.weight = self.embed.weight

    def forward(self, *inputs):
        x = self.embed(inputs[-1])
        if self.reentrant:
            x = checkpoint(self.body, x, use_reentrant=True)
        return self.head(torch.tanh(self.body(x)))

    def __call__(self, *inputs):
        if not self.bare:
            return super().__call__(*inputs)
        x = torch.tanh(self.embed.weight[inputs[-1]] @ self.body.weight + self.body.bias)
        return self.dropout(x) @ self.head.weight.T


def sentences(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(11, (count, 7), generator=generator)
    y = torch.randint(11, (count, 7), generator=generator)
    lengths = torch.randint(2, 8, (count,), generator=generator)
    y[torch.arange(7)[None] >= lengths[:, None]] = IGNORED
    return x, y


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("fault")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo")
    train(args.fault, args.epochs, int(os.environ.get("RANK", "0")), size)
    if size > 1:
        dist.destroy_process_group()


def train(fault, epochs, rank, size):
    torch.manual_seed(0)
    model = inner = Model(
        shared=fault == "shared", reentrant=fault == "reentrant", bare=fault == "bare-dropout"
    )
    if fault == "frozen":
        inner.embed.weight.requires_grad_(False)
    by_hand = fault in (
        "by-hand",
        "clipped-before-reduction",
        "fewer-micro-steps",
        "reentrant",
        "two-losses",
        "bare-dropout",
        "sharpness-aware",
    )
    if size > 1 and fault != "not-reduced" and not by_hand:
        model = DistributedDataParallel(model)
    parameters = [p for p in inner.parameters() if p.requires_grad]
    optimizers = [torch.optim.AdamW(parameters, lr=1e-2)]
    if fault == "two-optimizers":
        optimizers = [
            torch.optim.SGD(inner.head.parameters(), lr=0.1),
            torch.optim.AdamW([*inner.body.parameters(), *inner.embed.parameters()], lr=1e-2),
        ]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.97) for o in optimizers]
    if fault == "lbfgs":
        optimizers = [torch.optim.LBFGS(parameters, max_iter=2)]
        schedulers = []
    scaler = torch.amp.GradScaler("cpu", enabled=fault == "scaler", init_scale=1024.0)
    x, y = sentences(24 * size - 2, 0)
    if fault in (
        "ragged-last-window",
        "undivided",
        "divided-twice",
        "weighted-mean",
        "fewer-micro-steps",
    ):
        y = y.where(y != IGNORED, 0)  # equal lengths: a mean of means would be right
    mine = list(range(rank, len(x), size))
    if fault == "same-data":
        mine = list(range(len(x)))
    mine = mine[:22]  # as many on each rank
    micro_batches = [mine[i : i + MICRO_BATCH] for i in range(0, len(mine), MICRO_BATCH)]
    means = fault in ("undivided", "divided-twice", "ragged-last-window", "padded-tokens")
    if fault == "warm-up":
        model(x[mine[:3]]).square().mean().backward()
    torch.manual_seed(100 + rank)
    for _ in range(epochs):
        for begin in range(0, len(micro_batches), STEPS):
            window = micro_batches[begin : begin + STEPS]
            if fault in ("padded-tokens", "undivided", "divided-twice") and len(window) < STEPS:
                continue
            if fault == "fewer-micro-steps" and rank == size - 1 and size > 1:
                window = window[:-1] or window
            train_window(
                fault, model, inner, optimizers, schedulers, scaler, x, y, window, size, means
            )


def train_window(fault, model, inner, optimizers, schedulers, scaler, x, y, window, size, means):
    parameters = [p for p in inner.parameters() if p.requires_grad]
    tokens = torch.tensor(float(sum(int((y[rows] != IGNORED).sum()) for rows in window)))
    own = float(tokens)
    if size > 1:
        dist.all_reduce(tokens)
    if fault != "not-cleared":
        for optimizer in optimizers:
            optimizer.zero_grad()

    def backward(k, rows):
        last = k == len(window) - 1
        early = fault == "cleared-early" and k == 1 and len(window) == STEPS
        if fault == "cleared-each-micro-step" or early:
            optimizers[0].zero_grad()
        quiet = size > 1 and isinstance(model, DistributedDataParallel) and not last
        quiet = quiet and fault != "reduced-each-micro-step"
        with model.no_sync() if quiet else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=fault == "autocast"):
                if fault == "discarded-forward":
                    inner((x[rows] + 1) % 11).square().mean()
                first = [torch.arange(7)] if fault == "positions-first" else []
                logits = model(*first, x[rows]).flatten(0, 1).float()
            target = y[rows].flatten()
            if means:
                loss = functional.cross_entropy(logits, target, ignore_index=IGNORED)
                if fault in ("divided-twice", "ragged-last-window", "padded-tokens"):
                    loss = loss / STEPS
                if fault == "divided-twice":
                    loss = loss / STEPS
            elif fault == "fewer-micro-steps":
                loss = functional.cross_entropy(logits, target) / STEPS
            elif fault == "mean-of-means-over-ranks":
                loss = functional.cross_entropy(logits, target, reduction="sum") / own
            elif fault == "weighted-mean":
                weight = (target % 3 + 1).float()
                each = functional.cross_entropy(logits, target, reduction="none")
                total = torch.tensor(float(sum(((y[r] % 3) + 1).sum() for r in window)))
                if size > 1:
                    dist.all_reduce(total)
                loss = (each * weight).sum() / total * size
            elif fault == "by-hand":
                loss = functional.cross_entropy(logits, target, reduction="sum")
            else:
                loss = functional.cross_entropy(logits, target, reduction="sum") * size / tokens
            if fault == "other-divisor":
                loss = loss / tokens
            if fault == "last-micro-step-only" and not last:
                return
            if fault == "two-losses":
                (logits.square().mean() / len(window)).backward(retain_graph=True)
            scaler.scale(loss).backward()
        if fault == "norm-only":
            nn.utils.clip_grad_norm_(parameters, float("inf"))
        if fault == "clipped-each-micro-step":
            nn.utils.clip_grad_norm_(parameters, 0.1)
        if fault == "schedule-each-micro-step":
            schedulers[0].step()

    if fault == "lbfgs":

        def closure():
            optimizers[0].zero_grad()
            for k, rows in enumerate(window):
                backward(k, rows)
            return torch.zeros(())

        optimizers[0].step(closure)
        return
    if fault == "closure":
        for k, rows in enumerate(window[:-1]):
            backward(k, rows)
        optimizers[0].step(lambda: backward(len(window) - 1, window[-1]))
        return
    if fault == "sharpness-aware":  # the gradient where it is steeper
        before = [p.detach().clone() for p in parameters]
        for k, rows in enumerate(window):
            backward(k, rows)
        with torch.no_grad():
            for p in parameters:
                p.add_(0.01 * p.grad)
                p.grad = None
    for k, rows in enumerate(window):
        backward(k, rows)
    if fault == "sharpness-aware":
        with torch.no_grad():
            for p, old in zip(parameters, before, strict=True):
                p.copy_(old)
    if fault == "drop-last" and len(window) < STEPS:
        return
    if fault == "clipped-before-reduction":
        nn.utils.clip_grad_norm_(parameters, 0.1)
    if size > 1 and not isinstance(model, DistributedDataParallel) and fault != "not-reduced":
        for p in parameters:
            dist.all_reduce(p.grad)
            if fault != "by-hand":
                p.grad /= size
    if fault == "by-hand":
        for p in parameters:
            p.grad /= tokens
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
        if fault == "clip":
            nn.utils.clip_grad_norm_(parameters, 0.1)
        if fault == "clip-parts":
            nn.utils.clip_grad_norm_(inner.body.parameters(), 0.1)
            nn.utils.clip_grad_norm_(inner.head.parameters(), 0.1)
        scaler.step(optimizer)
    scaler.update()
    if fault == "evaluates":
        inner(x[:5])
    if fault == "schedule":
        for scheduler in schedulers:
            scheduler.step()


if __name__ == "__main__":
    main()
