"""The division of one update's samples: blocks of ranks, cut into micro-batches.

Everything is in *positions*: position p is the p-th sample of the update in the update's order.
`orchestrator.plan.order` maps positions to the data set's samples. Micro-steps are numbered over
all ranks, and each rank has a contiguous run of them, in rank order. Here they are also contiguous
in positions; `orchestrator.plan.cost` forms them by length. The table is a value: another table for
the same update gives the same gradient (in reproducible mode, when it assigns whole leaves, the
same bits).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from orchestrator.errors import PlanError
from orchestrator.plan.batch import MICRO_BATCH, Batch, steps_for


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """One update's samples, divided. Ranks with equal work share one tuple, so it stays small.

    Attributes:
        samples_per_rank: R sizes, in samples; 0 for an idle rank.
        starts: R places in `order`, the first of each rank's block.
        micro_batches: each rank's micro-batches' sizes in order, none of them 0; () if idle.
        first_numbers: R numbers, of each rank's first micro-step among all of the update.
        order: the update's positions, micro-step after micro-step; None: as they are.
    """

    samples_per_rank: tuple[int, ...]
    starts: tuple[int, ...]
    micro_batches: tuple[tuple[int, ...], ...]
    first_numbers: tuple[int, ...]
    order: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls, micro_batches: Sequence[tuple[int, ...]], order: tuple[int, ...] | None = None
    ) -> Split:
        """Build the table of each rank's micro-batches' sizes.

        Raises:
            PlanError: no rank.
        """
        if not micro_batches:
            raise PlanError(
                "a table of samples per rank needs one entry for each rank; it has none"
            )
        # Ranks often share a tuple; a window may have millions of micro-steps.
        totals = {id(sizes): sum(sizes) for sizes in micro_batches}
        per_rank = tuple(totals[id(sizes)] for sizes in micro_batches)
        return cls(
            samples_per_rank=per_rank,
            starts=tuple(accumulate(per_rank[:-1], initial=0)),
            micro_batches=tuple(micro_batches),
            first_numbers=tuple(accumulate(map(len, micro_batches[:-1]), initial=0)),
            order=order,
        )

    @property
    def ranks(self) -> int:
        """Return how many ranks the table has, idle ones included."""
        return len(self.samples_per_rank)

    @property
    def samples(self) -> int:
        """Return the samples of the update over all ranks."""
        return self.starts[-1] + self.samples_per_rank[-1]

    @property
    def micro_steps(self) -> int:
        """Return the micro-steps of the busiest rank."""
        return max(map(len, self.micro_batches))

    @property
    def micro_step_count(self) -> int:
        """Return the micro-steps of the update over all ranks."""
        return self.first_numbers[-1] + len(self.micro_batches[-1])

    @property
    def idle_ranks(self) -> tuple[int, ...]:
        """Return the ranks without samples. They take part in the boundary, too."""
        return tuple(rank for rank, size in enumerate(self.samples_per_rank) if size == 0)

    def pieces(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the `(start, count)` of each micro-batch of `rank`, in places of `order`.

        >>> split_window(3072, 240, cap=10).pieces(1)
        ((13, 7), (20, 6))

        Raises:
            PlanError: there is no such rank.
        """
        if not 0 <= rank < self.ranks:
            raise PlanError(f"there is no rank {rank} among {self.ranks}: they count from 0")
        sizes = self.micro_batches[rank]
        # Not strict: of an idle rank `sizes` is empty, but `accumulate` yields its initial value.
        return tuple(zip(accumulate(sizes[:-1], initial=self.starts[rank]), sizes, strict=False))


def even_parts(total: int, parts: int) -> tuple[int, ...]:
    """Cut `total` into `parts` sizes that differ by at most one, the larger first; 0s allowed.

    >>> even_parts(13, 2), even_parts(2, 3)
    ((7, 6), (1, 1, 0))
    """
    size, larger = divmod(total, parts)
    return (size + 1,) * larger + (size,) * (parts - larger)


def split_window(
    samples: int, ranks: int, *, steps: int | None = None, cap: int | None = None
) -> Split:
    """Divide an update evenly: blocks of floor or ceil(samples / ranks), the larger ones first.

    See `assign` for `steps` and `cap`, of which exactly one is given.

    >>> split_window(5, 2, steps=2).micro_batches
    ((2, 1), (1, 1))
    """
    return assign(even_parts(samples, ranks), steps=steps, cap=cap)


def assign(
    samples_per_rank: Sequence[int], *, steps: int | None = None, cap: int | None = None
) -> Split:
    """Cut given blocks, even or not (balanced by measured speed, say), into micro-batches.

    All ranks share one K: `steps`, or with `cap` the least K for which no micro-batch of any rank
    holds more than `cap` samples. Each block is cut into K sizes that differ by at most one; those
    that would be 0 are left out.

    >>> assign([6, 0, 3], cap=2).micro_batches
    ((2, 2, 2), (), (1, 1, 1))

    Raises:
        PlanError: no rank, or not exactly one of `steps` and `cap`.
    """
    if not samples_per_rank:
        raise PlanError("a table of samples per rank needs one entry for each rank; it has none")
    if cap is not None and steps is None:
        steps = max(1, -(-max(samples_per_rank) // cap))
    elif steps is None or cap is not None:
        raise PlanError("blocks are cut by either `steps` or `cap`; exactly one must be given")
    cuts = {
        size: even_parts(size, min(steps, size)) if size else () for size in set(samples_per_rank)
    }
    return Split.of([cuts[size] for size in samples_per_rank])


def split_leaves(samples: int, ranks: int, leaf_size: int) -> Split:
    """Divide an update by whole leaves, as evenly as leaves allow, the larger blocks first.

    The leaves of an update do not depend on `ranks`: leaf i holds positions i * leaf_size up to
    (i + 1) * leaf_size, the last one perhaps fewer. One leaf is one micro-step.

    >>> split_leaves(10, 3, leaf_size=2).micro_batches
    ((2, 2), (2, 2), (2,))
    """
    leaves = -(-samples // leaf_size)
    return assign_leaves(even_parts(leaves, ranks), samples=samples, leaf_size=leaf_size)


def assign_leaves(leaves_per_rank: Sequence[int], *, samples: int, leaf_size: int) -> Split:
    """Give each rank a stated number of whole leaves, contiguous, in rank order.

    >>> assign_leaves([0, 1, 4], samples=9, leaf_size=2).samples_per_rank
    (0, 2, 7)

    Raises:
        PlanError: no rank, or not as many leaves as the update has.
    """
    leaves = -(-samples // leaf_size)
    if not leaves_per_rank or sum(leaves_per_rank) != leaves:
        raise PlanError(
            f"{len(leaves_per_rank)} ranks are given {sum(leaves_per_rank)} leaves, but "
            f"{samples} samples in leaves of {leaf_size} make {leaves}"
        )
    cuts = {count: (leaf_size,) * count for count in set(leaves_per_rank)}
    micro_batches = [cuts[count] for count in leaves_per_rank]
    missing = leaves * leaf_size - samples
    if missing:  # the last leaf is short
        last = max(rank for rank, count in enumerate(leaves_per_rank) if count)
        micro_batches[last] = (*micro_batches[last][:-1], leaf_size - missing)
    return Split.of(micro_batches)


def split_for(samples: int, ranks: int, *, batch: Batch, reduction: str = "fast") -> Split:
    """Divide an update of `samples` samples evenly under a run's batch numbers.

    It also divides ragged windows. A stated cap decides, so that a smaller window takes fewer
    micro-steps; else blocks are cut into `batch.steps`.

    Raises:
        PlanError: `reproducible` without a stated micro-batch.
    """
    cap = batch.micro_batch_cap
    if batch.steps is None:  # micro-steps are formed by lengths, which are not known yet
        return split_window(samples, ranks, steps=1)
    if reduction == "fast":
        return split_window(samples, ranks, steps=batch.steps if cap is None else None, cap=cap)
    if cap is None:
        size = -(-batch.global_batch // (ranks * batch.steps))
        raise PlanError(
            f"accumulation.reduction=reproducible needs {MICRO_BATCH}, the size of a leaf: it must "
            f"not depend on the number of ranks. Here {MICRO_BATCH}={size} would take "
            f"{steps_for(batch.global_batch, size, ranks)} micro-steps"
        )
    return split_leaves(samples, ranks, cap)
