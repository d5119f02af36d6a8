"""The three batch numbers: any two give the third, all three must agree.

For G samples an update, R ranks, K micro-steps and at most m samples a micro-batch,

    K = ceil(ceil(G / R) / m) = ceil(G / (R m)).

Stated values always win: a default fills in only what they leave open.

| stated | meaning |
|---|---|
| nothing | G = 256, K = 4 |
| G | K = 4 |
| K | G = 256 |
| m | G = 256, K from the rule |
| G, K | each rank's block is cut into K micro-batches whose sizes differ by at most one |
| G, m | m is a cap, K from the rule: no micro-batch is larger, and no smaller K would do |
| K, m | G = R K m |
| G, K, m | must satisfy the rule |

K may exceed the samples of a rank (K = 5 for 3 samples): the micro-batches that would be empty are
left out, so such a rank takes 3 micro-steps. It is allowed, and the plan warns of it.

A batch schedule replaces G from given updates on. The numbers above are those of its first stage;
in later stages no micro-batch is larger than in the first one, so memory stays and K grows with G.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TypeAlias

from orchestrator.errors import PlanError

DEFAULT_GLOBAL_BATCH = 256
DEFAULT_STEPS = 4

MOST_MICRO_BATCHES = 2**22  # of one window, over all ranks: its table is kept in memory

GLOBAL_BATCH = "accumulation.global_batch"
STEPS = "accumulation.steps"
MICRO_BATCH = "accumulation.micro_batch"
BATCH_SCHEDULE = "accumulation.batch_schedule"

BatchSchedule: TypeAlias = tuple[tuple[int, int], ...]
"""(update, G) pairs, increasing in updates, none of them 0: G samples from that update on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The batch numbers of a run, all consistent.

    Attributes:
        global_batch: samples of one full update over all ranks.
        steps: micro-steps of a full update, on the rank that has the most samples; None where
            micro-steps are formed by `accumulation.micro_tokens` (`plan/cost.py`).
        micro_batch_cap: most samples of one micro-batch, when it was stated (the leaf's size in
            reproducible mode); None when `steps` alone decides how blocks are cut.
        micro_tokens: most padded tokens of a micro-step, when that was stated instead.
    """

    global_batch: int
    steps: int | None
    micro_batch_cap: int | None
    micro_tokens: int | None = field(default=None, repr=False)


def steps_for(global_batch: int, micro_batch: int, ranks: int) -> int:
    """Return the least number of micro-steps in which no micro-batch exceeds `micro_batch` samples.

    >>> steps_for(3072, 10, 240)
    2
    """
    return -(-global_batch // (ranks * micro_batch))


def resolve_batch(
    *,
    global_batch: int | None,
    steps: int | None,
    micro_batch: int | None,
    ranks: int,
    micro_tokens: int | None = None,
) -> Batch:
    """Complete the batch numbers that were stated (None: not stated), as the module's table says.

    >>> resolve_batch(global_batch=3072, steps=None, micro_batch=10, ranks=240)
    Batch(global_batch=3072, steps=2, micro_batch_cap=10)
    >>> resolve_batch(global_batch=None, steps=4, micro_batch=16, ranks=2)
    Batch(global_batch=128, steps=4, micro_batch_cap=16)

    Raises:
        PlanError: three were stated that do not agree (the message says which single change would
            make them agree), or a window has too many micro-batches.
    """
    if global_batch is None:
        global_batch = DEFAULT_GLOBAL_BATCH
        if steps is not None and micro_batch is not None:
            global_batch = ranks * steps * micro_batch
    if micro_tokens is not None:
        return Batch(
            global_batch=global_batch, steps=None, micro_batch_cap=None, micro_tokens=micro_tokens
        )
    if micro_batch is None:
        steps = DEFAULT_STEPS if steps is None else steps
    else:
        needed = steps_for(global_batch, micro_batch, ranks)
        if steps is not None and steps != needed:
            raise PlanError(_disagreement(global_batch, steps, micro_batch, ranks, needed))
        steps = needed
    return _bounded(
        Batch(global_batch=global_batch, steps=steps, micro_batch_cap=micro_batch), ranks
    )


def later_batch(batch: Batch, global_batch: int, ranks: int) -> Batch:
    """Return the batch numbers of a later stage of a batch schedule.

    No micro-batch is larger than the largest of the first stage, which is known to fit into memory.

    Args:
        batch: of the first stage.
        global_batch: of the later one.

    >>> first = resolve_batch(global_batch=256, steps=4, micro_batch=None, ranks=2)
    >>> later_batch(first, 1000, ranks=2)
    Batch(global_batch=1000, steps=16, micro_batch_cap=None)

    Raises:
        PlanError: a window has too many micro-batches.
    """
    if global_batch == batch.global_batch:
        return batch
    if batch.steps is None:
        return replace(batch, global_batch=global_batch)
    if (cap := batch.micro_batch_cap) is not None:
        steps = steps_for(global_batch, cap, ranks)
    else:
        largest = -(-batch.global_batch // (ranks * batch.steps))
        steps = max(batch.steps, steps_for(global_batch, largest, ranks))
    return _bounded(replace(batch, global_batch=global_batch, steps=steps), ranks)


def batch_at(update: int, global_batch: int, batch_schedule: BatchSchedule) -> int:
    """Return the samples of a full update, from 0, under a batch schedule.

    >>> [batch_at(update, 256, ((1000, 512),)) for update in (0, 999, 1000, 10**6)]
    [256, 256, 512, 512]
    """
    stage = bisect_right(batch_schedule, update, key=itemgetter(0))
    return batch_schedule[stage - 1][1] if stage else global_batch


def _bounded(batch: Batch, ranks: int) -> Batch:
    block = -(-batch.global_batch // ranks)
    pieces = ranks * (block if batch.steps is None else min(batch.steps, block))
    if pieces > MOST_MICRO_BATCHES:
        raise PlanError(
            f"{GLOBAL_BATCH}={batch.global_batch} in {batch.steps} micro-steps on {ranks} ranks is "
            f"a window of {pieces} micro-batches; at most {MOST_MICRO_BATCHES} can be planned: "
            f"fewer {STEPS} or a larger {MICRO_BATCH} would do"
        )
    return batch


def _disagreement(global_batch: int, steps: int, micro_batch: int, ranks: int, needed: int) -> str:
    agreeing = [f"{STEPS}={needed}"]
    block = -(-global_batch // ranks)
    smallest_cap = -(-block // steps)  # of those that cut the block into `steps`, if any does
    largest_cap = max(block, micro_batch) if steps == 1 else (block - 1) // (steps - 1)
    if smallest_cap <= largest_cap:
        nearest = min(max(micro_batch, smallest_cap), largest_cap)
        agreeing.append(f"{MICRO_BATCH}={nearest}")
    fewest = ranks * micro_batch * (steps - 1) + 1
    most = ranks * micro_batch * steps
    agreeing.append(f"{GLOBAL_BATCH}={min(max(global_batch, fewest), most)}")
    return (
        f"{GLOBAL_BATCH}={global_batch}, {STEPS}={steps} and {MICRO_BATCH}={micro_batch} disagree: "
        f"on {ranks} rank{'s' * (ranks > 1)}, {global_batch} samples in micro-batches of at most "
        f"{micro_batch} take {needed} micro-step{'s' * (needed > 1)}, not {steps}. State two of "
        f"the three, or change one: {', '.join(agreeing[:-1])} or {agreeing[-1]}"
    )
