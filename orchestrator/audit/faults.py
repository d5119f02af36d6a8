"""The known faults of gradient accumulation: the meaning, the effect and the fix of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownFault:
    """One known fault.

    Attributes:
        about: a short title.
        effect: what it does to training.
        fix: lines that would fix it, in torch.
    """

    about: str
    effect: str
    fix: tuple[str, ...]


GLOBAL_SUM = (
    "n = torch.tensor(float(samples_or_tokens_of_the_window))  # of all micro-steps of this rank",
    "dist.all_reduce(n)  # of all ranks",
    "(loss_sum * world_size / n).backward()  # a sum, not a mean; DDP divides by world_size",
)
FAULTS = {
    "not-cleared": KnownFault(
        "gradients are not cleared after the update",
        "Every update also applies the gradients of all updates before it: steps grow with time.",
        ("optimizer.step()", "optimizer.zero_grad()"),
    ),
    "cleared-each-micro-step": KnownFault(
        "gradients are cleared in each micro-step",
        "Only the last micro-step counts: the batch is smaller than stated, the rest is wasted.",
        ("if (micro_step + 1) % steps == 0:", "    optimizer.step()", "    optimizer.zero_grad()"),
    ),
    "last-micro-step-only": KnownFault(
        "only some micro-steps have a backward pass, or count",
        "The batch is smaller than stated; the other micro-steps are computed for nothing.",
        ("for micro_batch in window:", "    (loss(micro_batch) / len(window)).backward()"),
    ),
    "undivided": KnownFault(
        "the loss is not divided by the number of micro-steps",
        "Updates are as many times too long as there are micro-steps: a larger learning rate, "
        "which changes with the accumulation setting.",
        ("(loss / steps).backward()",),
    ),
    "divided-twice": KnownFault(
        "the loss is divided twice by the number of micro-steps",
        "Updates are as many times too short: a smaller learning rate, which changes with the "
        "accumulation setting.",
        ("(loss / steps).backward()  # once, here or in the library",),
    ),
    "ragged-last-window": KnownFault(
        "a ragged last window: it has fewer micro-steps, but is divided by the usual number",
        "The last update of each epoch is too short, so its samples count less than the others.",
        (
            "steps = len(window)  # of this window, the last one included",
            "(loss / steps).backward()",
        ),
    ),
    "ragged-micro-batch": KnownFault(
        "a ragged micro-batch: smaller than the others, but with the same weight",
        "Its samples count more than the others.",
        GLOBAL_SUM,
    ),
    "padded-tokens": KnownFault(
        "a mean over tokens in each micro-step, with different numbers of tokens (padding)",
        "Tokens of short micro-batches count more than those of long ones.",
        GLOBAL_SUM,
    ),
    "mean-of-means": KnownFault(
        "a mean of means: micro-steps of different sizes have the same weight",
        "Samples or tokens of small micro-batches count more than those of large ones.",
        GLOBAL_SUM,
    ),
    "mean-of-means-over-ranks": KnownFault(
        "a mean of means over ranks: each rank divides by its own count, then ranks are averaged",
        "Samples or tokens of a rank that has fewer of them count more.",
        GLOBAL_SUM,
    ),
    "fewer-micro-steps": KnownFault(
        "ranks have different numbers of micro-steps, but are averaged alike",
        "Samples of a rank with fewer micro-steps have another weight than those of the others.",
        GLOBAL_SUM,
    ),
    "sum-over-ranks": KnownFault(
        "ranks are summed, and not divided by their number",
        "Updates are as many times too long as there are ranks.",
        ("dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)",),
    ),
    "averaged-twice": KnownFault(
        "the gradient is divided once too often by the number of ranks",
        "Updates are as many times too short as there are ranks.",
        ("loss = loss * world_size  # where the loss is a sum: DDP divides by world_size",),
    ),
    "varying-divisor": KnownFault(
        "the loss is divided by a count that is not that of its samples or tokens",
        "Updates have different lengths, so samples of some updates count more than of others.",
        ("count = (labels[:, 1:] != -100).sum()  # only targets that have a loss",),
    ),
    "unequal-weights": KnownFault(
        "micro-steps have different weights",
        "Some samples count more than others.",
        ("(loss / steps).backward()  # the same divisor in all micro-steps of a window",),
    ),
    "not-reduced": KnownFault(
        "gradients are not reduced: the model is not wrapped in DDP",
        "Each rank trains a model of its own on a part of the data; one of them is saved.",
        ("model = torch.nn.parallel.DistributedDataParallel(model)",),
    ),
    "ddp-not-reducing": KnownFault(
        "gradients are not reduced, although the model is wrapped in DDP",
        "Each rank trains a model of its own on a part of the data; one of them is saved.",
        (
            "model(batch)  # the wrapped model, not model.module",
            "loss.backward()  # the last one of a window outside of no_sync()",
        ),
    ),
    "not-in-step": KnownFault(
        "ranks apply different gradients, or hold different weights",
        "The ranks' models drift apart; one of them is saved.",
        (
            "# equal weights on all ranks at the start: DDP sends those of rank 0",
            "# the same number of updates on all ranks; reduced gradients are not changed",
        ),
    ),
    "reduced-each-micro-step": KnownFault(
        "gradients are reduced in each micro-step",
        "Each update sends as many times more than it needs as there are micro-steps.",
        (
            "last = micro_step == steps - 1",
            "with contextlib.nullcontext() if last else model.no_sync():",
            "    (loss / steps).backward()",
        ),
    ),
    "clipped-before-reduction": KnownFault(
        "the gradient is clipped before it is reduced",
        "Each rank scales its own part differently, and the norm that is limited is not that of "
        "the update.",
        ("# reduce first", "torch.nn.utils.clip_grad_norm_(parameters, limit)", "optimizer.step()"),
    ),
    "clipped-each-micro-step": KnownFault(
        "the gradient is clipped in each micro-step",
        "What was accumulated first is scaled again and again; the limit depends on the setting.",
        (
            "if last:",
            "    torch.nn.utils.clip_grad_norm_(parameters, limit)",
            "    optimizer.step()",
        ),
    ),
    "clipped-while-scaled": KnownFault(
        "the gradient is clipped while it has the loss scaler's scale",
        "The limit acts on a number thousands of times too large: every update is cut to it.",
        ("scaler.unscale_(optimizer)", "torch.nn.utils.clip_grad_norm_(parameters, limit)"),
    ),
    "same-data": KnownFault(
        "all ranks compute the same samples",
        "More ranks do not make a larger batch: the work of all but one is wasted.",
        ("sampler = DistributedSampler(data)", "loader = DataLoader(data, sampler=sampler, …)"),
    ),
    "batch-norm": KnownFault(
        "batch norm normalises each micro-batch by itself",
        "The update is not that of one big batch: statistics are those of fewer samples.",
        (
            "model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)  # over ranks",
            "# over micro-steps: group norm, or frozen statistics",
        ),
    ),
}
