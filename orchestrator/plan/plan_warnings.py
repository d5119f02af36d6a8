"""What a person should know of a plan that is allowed but perhaps not meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.plan.batch import GLOBAL_BATCH, MICRO_BATCH, STEPS, Batch
from orchestrator.plan.split import Split


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the warnings are read from: the first window's split, and the values beside it.

    `own_rate`: the job gives the learning rates, so nothing is true of the schedule.
    """

    split: Split
    batch: Batch
    reduction: str
    ragged: str
    dataset_samples: int | None
    warmup_updates: int
    updates: int | None
    scaling: str = "none"
    own_rate: bool = False


def warnings_of(facts: Facts) -> tuple[str, ...]:
    """All sentences that hold, the most important first."""
    return (
        *_idle(facts),
        *_empty_steps(facts),
        *_uneven_leaves(facts),
        *_data(facts),
        *_warm_up(facts),
    )


def named_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words.

    >>> named_ranks([3]), named_ranks([1, 3, 4, 5])
    ('rank 3', 'ranks 1, 3-5')
    """
    return named_numbers("rank", ranks)


def named_numbers(noun: str, numbers: Sequence[int]) -> str:
    """Numbered things in words, runs of them shortened: never longer than a line.

    >>> named_numbers("point", [0, 1, 2])
    'points 0-2'
    """
    runs: list[list[int]] = []
    for rank in numbers:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    beyond = len(words) - 8
    more = f" and {beyond} more group{'s' * (beyond > 1)}" if beyond > 0 else ""
    return f"{noun}{'s' * (len(numbers) > 1)} {', '.join(words[:8])}{more}"


def _idle(facts: Facts) -> Iterator[str]:
    split, idle = facts.split, facts.split.idle_ranks
    if idle:
        yield (
            f"{named_ranks(idle)} of {split.ranks} will be idle: there is no work for them in an "
            f"update of {split.samples} samples"
            + (f" in leaves of {facts.batch.micro_batch_cap}" * (facts.reduction != "fast"))
        )


def _empty_steps(facts: Facts) -> Iterator[str]:
    split, batch = facts.split, facts.batch
    taken = split.micro_steps
    if taken >= batch.steps:
        return
    takes = f"it takes {taken} micro-step{'s' * (taken > 1)}"
    if batch.micro_batch_cap is None:
        yield (
            f"{STEPS}={batch.steps} is more than the samples of a rank, which are {taken} at "
            f"most: {takes}"
        )
    else:
        yield (
            f"an update holds {split.samples} samples, fewer than {GLOBAL_BATCH}="
            f"{batch.global_batch}: {takes} of at most {batch.micro_batch_cap}, not {batch.steps}"
        )


def _uneven_leaves(facts: Facts) -> Iterator[str]:
    leaf = facts.batch.micro_batch_cap
    if facts.reduction != "reproducible" or leaf is None:
        return
    counts = [len(sizes) for sizes in facts.split.micro_batches]
    if min(counts) != max(counts):
        even, total = facts.split.ranks * leaf * max(counts), facts.dataset_samples
        fits = total is None or even <= total or facts.ragged == "carry"
        yield (
            f"{sum(counts)} leaves do not divide evenly: {counts.count(max(counts))} of "
            f"{facts.split.ranks} ranks take {max(counts)} and the others wait for them"
            + (f"; {GLOBAL_BATCH}={even} would fill all ranks at {MICRO_BATCH}={leaf}" * fits)
        )


def _data(facts: Facts) -> Iterator[str]:
    total, size = facts.dataset_samples, facts.batch.global_batch
    if total is None:
        return
    scaled = facts.scaling != "none" and not facts.own_rate
    if size > total and facts.ragged == "update":
        yield (
            f"{GLOBAL_BATCH}={size} is more than the {total} samples of the data set: an update "
            f"holds {total}" + f", while the learning rate is scaled for {size}" * scaled
        )
    if size > total and facts.ragged == "carry":
        yield (
            f"{GLOBAL_BATCH}={size} is more than the {total} samples of the data set: an update "
            "holds some samples more than once"
        )
    epochs = (facts.updates or 0) // max(1, total // size)
    if facts.ragged == "drop" and total % size and epochs:
        yield (
            f"accumulation.ragged=drop leaves {total % size} of {total} samples out of each epoch"
            + " (others each time)" * (epochs > 1)
        )


def _warm_up(facts: Facts) -> Iterator[str]:
    if facts.own_rate or facts.updates is None:
        return
    if facts.warmup_updates > facts.updates:
        yield (
            f"schedule.warmup_updates={facts.warmup_updates} is more than the {facts.updates} "
            "updates of the run: the learning rate never reaches its peak"
        )
