"""Training loops drawn at random, each with a fault or none, beside plain autograd's answer.

For every seed a model, a loss and a fault are drawn. The loop trains observed for a few updates and
writes how far each applied gradient is from that of the whole batch: one backward pass over all
ranks' samples in float64.
"""

import contextlib
import copy
import json
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as fn
from torch.nn.parallel import DistributedDataParallel

UPDATES, IGNORED = 3, -100
WRONG_GRADIENTS = (
    "not-cleared", "cleared-each-micro-step", "last-only", "undivided", "divided-twice",
    "ragged-window", "ragged-micro-batch", "means", "own-means", "random-weights", "not-reduced",
    "summed-over-ranks", "doubled", "fewer", "factor", "noise", "layer-scaled", "layer-unreduced",
    "two-terms", "contrastive", "normalised", "clip-each", "clip-before",
)  # fmt: skip
WRONG_OTHERWISE = ("reduced-each", "schedule-each", "same-data", "batch-norm")
RIGHT = (
    "none", "sum", "by-hand", "clip", "schedule", "frozen", "shared", "double", "autocast",
    "scaler", "two-optimizers", "single-step", "uneven", "closure",
)  # fmt: skip


class Model(nn.Module):
    def __init__(self, kind, shared):
        super().__init__()
        self.kind = kind
        if kind == "tokens":
            self.embed = nn.Embedding(9, 5)
            self.norm = nn.LayerNorm(5)
            self.head = nn.Linear(5, 9, bias=not shared)
            if shared:
                self.head.weight = self.embed.weight
        else:
            self.embed = nn.Linear(6, 8)
            self.norm = nn.BatchNorm1d(8) if kind == "normed" else nn.Identity()
            self.head = nn.Linear(8, 9)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.embed(x))))


def draw(seed, size):
    rng = random.Random(seed)
    pool = rng.choice((RIGHT, WRONG_GRADIENTS, WRONG_GRADIENTS, WRONG_OTHERWISE))
    fault = rng.choice(pool)
    kind = "normed" if fault == "batch-norm" else rng.choice(("tokens", "rows"))
    if fault == "shared":
        kind = "tokens"
    return {
        "fault": fault, "kind": kind, "steps": 1 if fault == "single-step" else rng.randint(2, 4),
        "rows": rng.randint(2, 4),
        "by_hand": size > 1 and fault != "reduced-each" and rng.random() < 0.4,
        "loss": rng.choice(("ce", "ce", "smooth", "mse", "per-sample", "masked", "focal")),
        "optimizer": rng.choice((torch.optim.SGD, torch.optim.AdamW)), "seed": seed,
    }  # fmt: skip


def data_of(spec, update, rank, size):
    """Return the micro-batches of one rank in one update."""
    fault = spec["fault"]
    generator = torch.Generator().manual_seed(
        spec["seed"] * 1000 + update * 10 + (0 if fault == "same-data" else rank)
    )
    steps = spec["steps"]
    if fault == "ragged-window" and update == UPDATES - 1:
        steps -= 1
    if fault == "fewer" and rank == size - 1 and size > 1:
        steps -= 1
    batches = []
    for k in range(steps):
        rows = spec["rows"]
        if fault in ("ragged-micro-batch", "uneven") and k == steps - 1:
            rows -= 1
        shape = (rows, 5) if spec["kind"] == "tokens" else (rows,)
        y = torch.randint(9, shape, generator=generator)
        if spec["kind"] == "tokens":
            x = torch.randint(9, shape, generator=generator)
            if fault in ("means", "own-means", "uneven", "none", "sum", "by-hand"):
                lengths = torch.randint(1, 6, (rows,), generator=generator)
                y[torch.arange(5)[None] >= lengths[:, None]] = IGNORED
        else:
            x = torch.randn((rows, 6), generator=generator, dtype=torch.float64)
        batches.append((x, y))
    return batches


def elements(spec, logits, y):
    """Return the losses of samples or tokens, and their weights."""
    flat, target = logits.flatten(0, -2), y.flatten()
    counted = (target != IGNORED).to(logits.dtype)
    safe = target.clamp(min=0)
    kind = spec["loss"]
    if kind == "mse":
        each = ((flat - fn.one_hot(safe, 9).to(logits.dtype)) ** 2).mean(1)
    elif kind == "focal":
        p = fn.cross_entropy(flat, safe, reduction="none")
        each = (1 - torch.exp(-p)) ** 2 * p
    elif kind == "smooth":
        each = fn.cross_entropy(flat, safe, reduction="none", label_smoothing=0.1)
    else:
        each = fn.cross_entropy(flat, safe, reduction="none")
    return each, counted


def mean_loss(spec, logits, y):
    """Return a mean over what counts, as scripts compute it."""
    kind = spec["loss"]
    if kind in ("ce", "smooth"):
        smooth = 0.1 if kind == "smooth" else 0.0
        return fn.cross_entropy(logits.flatten(0, -2), y.flatten(), label_smoothing=smooth)
    each, counted = elements(spec, logits, y)
    return (each * counted).sum() / counted.sum()


def units(batches):
    return float(sum(int((y != IGNORED).sum()) for _, y in batches))


def whole_gradient(spec, inner, everything, denominator):
    """Return the gradient of one big batch, by plain autograd in float64."""
    model = copy.deepcopy(inner).double()
    model.zero_grad()
    total = 0.0
    if spec["kind"] == "tokens":
        x = torch.cat([b[0] for b in everything])
        y = torch.cat([b[1] for b in everything])
    else:
        x = torch.cat([b[0] for b in everything]).double()
        y = torch.cat([b[1] for b in everything])
    each, counted = elements(spec, model(x), y)
    total = (each * counted).sum() / (denominator or counted.sum())
    total.backward()
    return flat(model)


def flat(model):
    return torch.cat([
        (torch.zeros_like(p) if p.grad is None else p.grad).detach().double().flatten()
        for p in model.parameters()
    ])  # fmt: skip


def train(spec, observer, rank, size):
    fault = spec["fault"]
    torch.manual_seed(spec["seed"])
    dtype = torch.float64 if fault == "double" else torch.float32
    inner = Model(spec["kind"], fault == "shared").to(dtype)
    if fault == "frozen":
        inner.embed.requires_grad_(False)
    by_hand = spec["by_hand"] or fault in (
        "by-hand", "summed-over-ranks", "doubled", "clip-before", "layer-unreduced", "fewer",
    )  # fmt: skip
    model = inner
    if size > 1 and not by_hand and fault != "not-reduced":
        model = DistributedDataParallel(inner)
    parameters = [p for p in inner.parameters() if p.requires_grad]
    if fault == "two-optimizers":
        head = list(inner.head.parameters())
        rest = [p for p in parameters if not any(p is h for h in head)]
        optimizers = [spec["optimizer"](ps, lr=0.05) for ps in (head, rest)]
    else:
        optimizers = [spec["optimizer"](parameters, lr=0.05)]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=fault == "scaler", init_scale=256.0)
    errors = []
    for update in range(UPDATES):
        everything = [b for r in range(size) for b in data_of(spec, update, r, size)]
        observer.ended = True
        true = whole_gradient(
            spec, inner, everything, 1.0 if fault == "sum" and size == 1 else None
        )
        observer.ended = False
        applied = step(spec, update, rank, size, model, inner, optimizers, scheduler, scaler)
        norm = max(float(true.norm()), 1e-12)
        errors.append(float((applied - true).norm()) / norm)
    return errors


def step(spec, update, rank, size, model, inner, optimizers, scheduler, scaler):
    fault, steps = spec["fault"], spec["steps"]
    parameters = [p for p in inner.parameters() if p.requires_grad]
    batches = data_of(spec, update, rank, size)
    own = units(batches)
    total = sum(units(data_of(spec, update, r, size)) for r in range(size))
    distributed = isinstance(model, DistributedDataParallel)
    reduces = size > 1 and not distributed and fault != "not-reduced"
    rng = random.Random(spec["seed"] * 7 + update * 3 + rank)
    if fault != "not-cleared":
        for optimizer in optimizers:
            optimizer.zero_grad()

    def backward(k, x, y):
        if fault == "cleared-each-micro-step":
            optimizers[0].zero_grad()
        quiet = distributed and k < len(batches) - 1 and fault != "reduced-each"
        with model.no_sync() if quiet else contextlib.nullcontext():
            if x.is_floating_point():
                x = x.to(next(inner.parameters()).dtype)
            with torch.autocast("cpu", torch.bfloat16, enabled=fault == "autocast"):
                logits = model(x)
            logits = logits.to(next(inner.parameters()).dtype)
            each, counted = elements(spec, logits, y)
            if fault in ("undivided", "divided-twice", "ragged-window", "ragged-micro-batch",
                         "means", "fewer", "reduced-each", "random-weights"):  # fmt: skip
                loss = mean_loss(spec, logits, y)
                loss = loss if fault == "undivided" else loss / steps
                loss = loss / steps if fault == "divided-twice" else loss
                if fault == "random-weights":
                    loss = loss * rng.uniform(0.5, 1.5)
            elif fault == "own-means":
                loss = (each * counted).sum() / own
            elif fault == "sum" and size == 1:
                loss = (each * counted).sum()
            else:
                loss = (each * counted).sum() * size / total
            if fault == "factor":
                loss = loss * (0.37 if spec["seed"] % 2 else 1 / steps)
            if fault == "two-terms":
                loss = loss + 0.1 * logits.square().mean()
            if fault == "contrastive":
                z = logits.flatten(1)
                loss = fn.cross_entropy(z @ z.T, torch.arange(len(z))) / steps
            if fault == "normalised":
                loss = loss / loss.detach()
            if fault == "last-only" and k < len(batches) - 1:
                return
            scaler.scale(loss).backward()
        if fault == "doubled" and size > 1:
            for p in parameters:
                dist.all_reduce(p.grad)
        if fault == "clip-each":
            nn.utils.clip_grad_norm_(parameters, 0.01)
        if fault == "schedule-each":
            scheduler.step()

    if fault == "closure":
        for k, batch in enumerate(batches[:-1]):
            backward(k, *batch)
        found = []

        def closure():
            backward(len(batches) - 1, *batches[-1])
            if reduces:
                for p in parameters:
                    dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
                    p.grad /= size
            found.append(flat(inner))

        optimizers[0].step(closure)
        return found[0]
    for k, batch in enumerate(batches):
        backward(k, *batch)
    whole = flat(inner)  # on one rank, before it is clipped
    if fault == "clip-before":
        nn.utils.clip_grad_norm_(parameters, 0.01)
    if reduces and fault != "doubled":
        for i, p in enumerate(parameters):
            if fault == "layer-unreduced" and i == 0:
                continue
            dist.all_reduce(p.grad)
            if fault != "summed-over-ranks":
                p.grad /= size
    if fault == "noise":
        torch.manual_seed(update)
        for p in parameters:
            p.grad += torch.randn_like(p.grad) * p.grad.std() * 0.1
    if fault == "layer-scaled":
        parameters[0].grad *= 0.5
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    applied = whole if fault == "clip-before" and size == 1 else flat(inner)
    if fault == "clip":
        nn.utils.clip_grad_norm_(parameters, 0.05)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    if fault == "schedule":
        scheduler.step()
    return applied


def observe_runs(folder, observer, rank, size, begin, end):
    """Train with each seed from `begin` to `end`, observed in a folder of its own."""
    for seed in range(begin, end):
        spec = draw(seed, size)
        place = folder / str(seed)
        place.mkdir(exist_ok=True)
        observer.begin(place, UPDATES)
        errors = train(spec, observer, rank, size)
        observer.finish("the loop ended")
        if rank == 0:
            spec = {**spec, "optimizer": spec["optimizer"].__name__, "errors": errors}
            (place / "spec.json").write_text(json.dumps(spec))
