"""Loops of everyday kinds, each with the verdict that it should get.

A rank runs each of them observed.
"""

import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from orchestrator.audit import observe

RIGHT, WRONG, UNJUDGED = "right", "wrong", "not judged"
UPDATES = 4


def network(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def sgd(*modules):
    return torch.optim.SGD([p for module in modules for p in module.parameters()], 0.05)


def real_or_not(scores, real):
    target = torch.full_like(scores, float(real))
    return functional.binary_cross_entropy_with_logits(scores, target)


def adversarial(steps=1, divide=True, clear=True, apart=True):
    """Train a generator and a discriminator, whose gradients the generator's loss reaches too."""
    generator, critic = network(3, 5), network(5, 1)
    optimizers = sgd(generator), sgd(critic)
    by = steps if divide else 1
    for _ in range(UPDATES):
        if clear:
            optimizers[1].zero_grad()
        for _ in range(steps):
            made = generator(torch.randn(4, 3))
            real, false = critic(torch.randn(4, 5)), critic(made.detach())
            if apart:
                (real_or_not(real, True) / by).backward()
                (real_or_not(false, False) / by).backward()
            else:
                ((real_or_not(real, True) + real_or_not(false, False)) / by).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        for _ in range(steps):
            (real_or_not(critic(generator(torch.randn(4, 3))), True) / by).backward()
        optimizers[0].step()


def polluted():
    """Apply the generator's loss to the discriminator, too."""
    generator, critic = network(3, 5), network(5, 1)
    optimizers = sgd(generator), sgd(critic)
    for _ in range(UPDATES):
        for optimizer in optimizers:
            optimizer.zero_grad()
        made = generator(torch.randn(4, 3))
        real_or_not(critic(torch.randn(4, 5)), True).backward()
        real_or_not(critic(made.detach()), False).backward()
        real_or_not(critic(made), True).backward()
        for optimizer in optimizers:
            optimizer.step()


def stepping_within():
    """Step one optimizer within the window of another one, whose losses depend on its weights."""
    body, head = network(5, 4), network(4, 2)
    optimizers = sgd(body), sgd(head)
    for i in range(2 * UPDATES):
        (head(body(torch.randn(4, 5))).square().mean() / 2).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        if i % 2:
            optimizers[0].step()
            optimizers[0].zero_grad()


def two_heads():
    """Send two losses back through one forward pass, at two lines."""
    body, heads = network(5, 4), network(4, 2)
    optimizer = sgd(body, heads)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        scores = heads(body(torch.randn(4, 5)))
        scores[:, 0].square().mean().backward(retain_graph=True)
        (scores[:, 1] - 1).square().mean().backward()
        optimizer.step()


def two_models(steps):
    """Divide sums by the number of samples, which two models see."""
    one, other = network(5, 3), network(5, 3)
    optimizer = sgd(one, other)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        for _ in range(steps):
            x = torch.randn(4, 5)
            sums = (one(x) - 1).square().sum() + other(x).abs().sum()
            (sums / len(x) / steps).backward()
        optimizer.step()


def unrolled(steps_apart):
    """Accumulate two micro-batches at two lines, undivided."""
    model = network(5, 2)
    optimizer = sgd(model)
    for _ in range(UPDATES):
        model(torch.randn(4, 5)).square().mean().backward()
        if steps_apart:
            optimizer.step()
            optimizer.zero_grad()
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sharpness_aware(steps, passes):
    model = network(5, 2)
    optimizer = sgd(model)
    for _ in range(UPDATES):
        batches = torch.randn(steps, 4, 5)
        for x in batches:
            (model(x).square().mean() / steps).backward()
        with torch.no_grad():
            before = [p.clone() for p in model.parameters()]
            for p in model.parameters():
                p.add_(0.1 * p.grad)
        optimizer.zero_grad()
        for x in batches[:passes]:
            (model(x).square().mean() / passes).backward()
        with torch.no_grad():
            for p, old in zip(model.parameters(), before, strict=True):
                p.copy_(old)
        optimizer.step()
        optimizer.zero_grad()


def closures(steps, divide):
    model = network(5, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
    batches = torch.randn(steps, 4, 5)

    def closure():
        optimizer.zero_grad()
        total = 0.0
        for x in batches:
            loss = (model(x) - 1).square().mean() / (steps if divide else 1)
            loss.backward()
            total += loss.detach()
        return total

    for _ in range(UPDATES):
        optimizer.step(closure)


def accumulated(loss, steps=2, batch=4):
    """Accumulate micro-steps of a loss of scores, targets and the number of steps."""
    model = network(5, 3)
    optimizer = sgd(model)
    for _ in range(UPDATES):
        for _ in range(steps):
            loss(model(torch.randn(batch, 5)), torch.randint(3, (batch,)), steps).backward()
        optimizer.step()
        optimizer.zero_grad()


def distilled(scores, y, by):
    wise = torch.zeros_like(scores).softmax(1)
    kept = functional.kl_div(scores.log_softmax(1), wise, reduction="batchmean")
    return (0.7 * kept * 16 + 0.3 * functional.cross_entropy(scores, y)) / by


def two_views(scores, y, by):
    del y
    views = functional.normalize(torch.cat([scores, scores + 0.1]), dim=1)
    return functional.cross_entropy(views @ views.T, torch.arange(len(views))) / by


def dice(scores, y, by):
    of, p = functional.one_hot(y, 3), scores.softmax(1)
    return (1 - 2 * (p * of).sum() / (p.sum() + of.sum())) / by


def halved(scores, y, by):
    del y
    return 0.5 * scores.square().mean() / by


def share(scores, y, by):
    return 0.3 * functional.cross_entropy(scores, y) / by


def of_own_sum(scores, y, by, times=1.0):
    """Weights of samples, divided by their sum in the micro-batch."""
    weights = y + 1.0
    each = functional.cross_entropy(scores, y, reduction="none")
    normalised = (each * (weights / weights.sum())).sum() / by
    return normalised * (weights.sum() if times is None else times)


def of_largest(scores, y, by):
    weights = y + 1.0
    each = functional.cross_entropy(scores, y, reduction="none")
    return (each * (weights / weights.max())).mean() / by


class InParts(torch.optim.Optimizer):
    """Steps optimizers of parts of its parameters, as a sharded optimizer does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})
        parameters = self.param_groups[0]["params"]
        self.parts = [torch.optim.SGD(part, 0.05) for part in (parameters[:1], parameters[1:])]

    def step(self, closure=None):
        for part in self.parts:
            part.step()


def stepped_in_parts(divide):
    model = network(3, 5)
    optimizer = InParts(model.parameters())
    for _ in range(UPDATES):
        optimizer.zero_grad()
        for _ in range(2):
            loss = functional.mse_loss(model(torch.randn(4, 3)), torch.randn(4, 5))
            (loss / (2 if divide else 1)).backward()
        optimizer.step()


LOOPS = {
    "an optimizer of parts": (lambda: stepped_in_parts(divide=True), RIGHT),
    "an optimizer of parts, undivided": (lambda: stepped_in_parts(divide=False), WRONG),
    "two optimizers": (lambda: adversarial(apart=False), RIGHT),
    "two losses": (adversarial, RIGHT),
    "two losses, accumulated": (lambda: adversarial(3), RIGHT),
    "two losses, undivided": (lambda: adversarial(3, divide=False), WRONG),
    "one loss, undivided": (lambda: adversarial(3, divide=False, apart=False), WRONG),
    "not cleared": (lambda: adversarial(clear=False), WRONG),
    "polluted": (polluted, UNJUDGED),
    "stepping within": (stepping_within, UNJUDGED),
    "two heads": (two_heads, RIGHT),
    "two models": (lambda: two_models(2), RIGHT),
    "unrolled": (lambda: unrolled(steps_apart=False), UNJUDGED),
    "two steps": (lambda: unrolled(steps_apart=True), RIGHT),
    "sharpness-aware": (lambda: sharpness_aware(1, 1), RIGHT),
    "sharpness-aware, accumulated": (lambda: sharpness_aware(2, 2), UNJUDGED),
    "sharpness-aware by one micro-step": (lambda: sharpness_aware(2, 1), UNJUDGED),
    "closures": (lambda: closures(1, divide=False), RIGHT),
    "closures, accumulated": (lambda: closures(3, divide=True), RIGHT),
    "closures, undivided": (lambda: closures(3, divide=False), WRONG),
    "distilled": (lambda: accumulated(distilled), RIGHT),
    "distilled, undivided": (lambda: accumulated(lambda z, y, _: distilled(z, y, 1)), UNJUDGED),
    "halved": (lambda: accumulated(halved, 3), RIGHT),
    "halved, or divided once": (lambda: accumulated(lambda z, y, _: halved(z, y, 1)), RIGHT),
    "halved, or divided twice": (lambda: accumulated(halved), UNJUDGED),
    "a share": (lambda: accumulated(share), RIGHT),
    "divided by another number": (lambda: accumulated(lambda z, y, _: z.mean() / 8), UNJUDGED),
    "two views": (lambda: accumulated(two_views), UNJUDGED),
    "weights of an own sum": (lambda: accumulated(of_own_sum, 3), WRONG),
    "weights of an own sum, times it": (
        lambda: accumulated(lambda z, y, by: of_own_sum(z, y, by, None) / 8, 3),
        UNJUDGED,
    ),
    "weights by the largest": (lambda: accumulated(of_largest, 3), UNJUDGED),
    "dice": (lambda: accumulated(dice), UNJUDGED),
}


def main(folder):
    torch.set_num_threads(1)
    observer = observe.Observer(folder, None, int(os.environ["RANK"]))
    observer.ends_process = False
    observe.install(observer)
    for name, (loop, _) in LOOPS.items():
        part = folder / name
        part.mkdir()
        observer.begin(part, None)
        torch.manual_seed(0)
        loop()
        observer.finish("the loop ended")


if __name__ == "__main__":
    main(Path.cwd())
