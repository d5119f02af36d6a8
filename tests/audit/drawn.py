"""Training loops drawn at random, right and wrong, with autograd on the whole batch as their judge.

A rank trains each of them observed, and writes the largest relative error of an update beside the
audit's records.
"""

import copy
import os
import random
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from orchestrator.audit import observe

SAMPLES, LENGTH, WIDTH, CLASSES = 48, 5, 6, 4


class HandNorm(nn.Module):
    """Statistics over the micro-batch, in plain operations."""

    def forward(self, x):
        return (x - x.mean((0, 1))) / (x.var((0, 1)) + 1e-5).sqrt()


class Transformer(nn.Module):
    def __init__(self, over_samples):
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=not over_samples)

    def forward(self, x):
        return x + self.attend(x, x, x, need_weights=False)[0]


class Centred(nn.Module):
    """A centre that moves with each micro-batch, as teachers' outputs have."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x):
        self.centre = 0.5 * self.centre + 0.5 * x.detach().mean((0, 1))
        return x - self.centre


LAYERS = {
    "none": nn.Identity,
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "transformer": lambda: Transformer(over_samples=False),
    "attention over samples": lambda: Transformer(over_samples=True),
    "statistics by hand": HandNorm,
    "batch norm": lambda: nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(WIDTH), Unflatten()),
    "frozen batch norm": lambda: nn.Sequential(
        nn.Flatten(0, 1), nn.BatchNorm1d(WIDTH).eval(), Unflatten()
    ),
    "moving centre": Centred,
}
EVERYDAY = ("none", "layer norm", "transformer")


class Unflatten(nn.Module):
    def forward(self, x):
        return x.unflatten(0, (-1, LENGTH))


def each(model, x, y):
    return functional.cross_entropy(model(x).transpose(1, 2), y, reduction="none")


def token_mean(model, teacher, x, y, mask, weight, total):
    return (each(model, x, y) * mask).sum() / total


def micro_mean(model, teacher, x, y, mask, weight, total):
    return (each(model, x, y) * mask).sum() / mask.sum()


def plain_mean(model, teacher, x, y, mask, weight, total):
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def normalised(model, teacher, x, y, mask, weight, total):
    return (each(model, x, y) * (mask / mask.sum())).sum()


def normalised_by_number(model, teacher, x, y, mask, weight, total):
    return (each(model, x, y) * (mask / float(mask.sum()))).sum()


def weighted(model, teacher, x, y, mask, weight, total):
    return (each(model, x, y) * weight[:, None]).mean()


def advantages(model, teacher, x, y, mask, weight, total):
    return (each(model, x, y).mean(1) * (weight - weight.mean()) / weight.std()).mean()


def other_keys(model, teacher, x, y, mask, weight, total):
    with torch.no_grad():
        keys = teacher(x)[:, 0]
    return functional.cross_entropy(model(x)[:, 0] @ keys.T, torch.arange(len(x)))


def distilled(model, teacher, x, y, mask, weight, total):
    return functional.smooth_l1_loss(model(x), teacher(x).detach())


def two_terms(model, teacher, x, y, mask, weight, total):
    scores = model(x)
    return functional.cross_entropy(scores.flatten(0, 1), y.flatten()) + scores.square().mean() / 7


def mean_and_sum(model, teacher, x, y, mask, weight, total):
    scores = model(x)
    return functional.cross_entropy(scores.flatten(0, 1), y.flatten()) + scores.abs().sum() / 99


def decayed(model, teacher, x, y, mask, weight, total):
    norms = sum(p.square().sum() for p in model.parameters() if p.requires_grad)
    return plain_mean(model, teacher, x, y, mask, weight, total) - 0.1 * norms


def decayed_mean(model, teacher, x, y, mask, weight, total):
    norm = model[0].weight.abs().mean()
    return plain_mean(model, teacher, x, y, mask, weight, total) + 0.1 * norm


def decayed_sum(model, teacher, x, y, mask, weight, total):
    return token_mean(model, teacher, x, y, mask, weight, total) + model[0].weight.abs().sum()


def root(model, teacher, x, y, mask, weight, total):
    return plain_mean(model, teacher, x, y, mask, weight, total).sqrt()


LOSSES = {
    f.__name__: f
    for f in (
        token_mean,
        micro_mean,
        plain_mean,
        normalised,
        normalised_by_number,
        weighted,
        advantages,
        other_keys,
        distilled,
        two_terms,
        mean_and_sum,
        decayed,
        decayed_mean,
        decayed_sum,
        root,
    )
}
RIGHT_LOSSES = ("plain_mean", "weighted", "distilled", "two_terms", "decayed_mean")


def draw(seed):
    """Return the parts of a loop. The first draws have everyday layers and losses."""
    dice = random.Random(seed)
    everyday = seed % 3 == 0
    return {
        "layer": dice.choice(EVERYDAY if everyday else list(LAYERS)),
        "loss": dice.choice(RIGHT_LOSSES if everyday else list(LOSSES)),
        "steps": dice.choice([1, 2, 3, 4]),
        "divide": everyday or dice.random() < 0.8,
        "hook": dice.random() < 0.2,
        "everyday": everyday,
    }


def train(parts, seed, observer):
    """Train one loop; return the largest relative error of an update."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), LAYERS[parts["layer"]](), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
    )
    model[1].requires_grad_(parts["layer"] != "frozen batch norm")
    teacher = copy.deepcopy(model)
    nn.init.normal_(teacher[0].weight)  # as it is, a distilled model would have no gradient
    loss, steps = LOSSES[parts["loss"]], parts["steps"]
    if parts["hook"] and parts["divide"]:
        for p in model.parameters():
            if p.requires_grad:
                p.register_hook(lambda gradient: gradient / steps)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.05)
    x = torch.randn(SAMPLES, LENGTH, WIDTH)
    y = torch.randint(CLASSES, (SAMPLES, LENGTH))
    mask = (torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (SAMPLES, 1))).float()
    weight = torch.rand(SAMPLES) + 0.5
    errors = []
    for window in torch.arange(SAMPLES).split(4 * steps):
        count = len(window.split(4))
        total = mask[window].sum()
        sums = parts["loss"] in (
            "token_mean",
            "decayed_sum",
        )  # divided by what the window has, not by its steps
        observer.ended = True
        with observer.recorder.paused():
            whole, wise = copy.deepcopy((model, teacher))
            true = torch.autograd.grad(
                loss(whole, wise, x[window], y[window], mask[window], weight[window], total),
                [p for p in whole.parameters() if p.requires_grad],
            )
        observer.ended = False
        optimizer.zero_grad()
        for rows in window.split(4):
            value = loss(model, teacher, x[rows], y[rows], mask[rows], weight[rows], total)
            if parts["hook"] and parts["divide"]:
                value = value * (steps if sums else steps / count)
            elif parts["divide"] and not sums:
                value = value / count
            value.backward()
        off = sum((p.grad - g).square().sum() for p, g in zip(trained, true, strict=True))
        errors.append(float((off / sum(g.square().sum() for g in true)).sqrt()))
        optimizer.step()
    return max(errors)


def main(folder, seeds):
    torch.set_num_threads(1)
    observer = observe.Observer(folder, None, int(os.environ["RANK"]))
    observer.ends_process = False
    observe.install(observer)
    for seed in seeds:
        part = folder / str(seed)
        part.mkdir()
        observer.begin(part, None)
        error = train(draw(seed), seed, observer)
        observer.finish("the loop ended")
        (part / "error").write_text(str(error))


if __name__ == "__main__":
    main(Path.cwd(), range(48))
