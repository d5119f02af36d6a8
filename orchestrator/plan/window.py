"""A window as planned: one rank's samples, micro-batches and learning rate in one update.

The loop asks once an update. The division is a value (`Split`) that may be passed in, so that
survivors, newcomers or a balance by measured speed can use another table for the same update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from orchestrator.errors import PlanError
from orchestrator.plan.batch import Batch, later_batch
from orchestrator.plan.cost import WorkByCost, deal, split_by_speed
from orchestrator.plan.order import DataOrder
from orchestrator.plan.plan import Plan
from orchestrator.plan.schedule import Schedule
from orchestrator.plan.split import Split, assign_leaves, split_for

# A stage of the batch has two sizes of window, full and ragged, and a loader reads ahead.
_split_for = lru_cache(maxsize=4)(split_for)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Work of a micro-step: samples of the data set, and where they stand in their update.

    Attributes:
        update: its number.
        number: of the micro-step among those of the update over all ranks, from 0; in reproducible
            mode that of the leaf.
        positions: of the samples in the update, ascending, shape (n,).
        indices: of the samples in the data set, in the same order, shape (n,).
    """

    update: int
    number: int = 0
    positions: Sequence[int]
    indices: tuple[int, ...]

    @property
    def start(self) -> int:
        """Return the smallest position. `(update, start)` seeds the random numbers of the
        micro-step, so they depend neither on the rank nor on the number of ranks.
        """
        return self.positions[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """One rank's share of one update. A value, never derived from `rank` inside an engine.

    Attributes:
        update: the update's number, from 0.
        epoch: in which the update's first sample lies.
        samples: samples of this update over all ranks.
        micro_batches: this rank's, in order, none of them empty; () when the rank has no samples.
        steps: micro-steps of the busiest rank, the same on all ranks. What synchronises after every
            micro-step does so this many times, also on ranks that have fewer.
        learning_rate: for this update.
        samples_per_rank: of this update.
        micro_step_count: of the update over all ranks; in reproducible mode the number of leaves.
        order: the update's positions, micro-step after micro-step, rank after rank; None: as they
            are.
        speeds: of ranks, by which this update is the first to be dealt; None: as the one before.
        padding: how many of the last micro-batches count nothing: they only keep ranks in step that
            hold one copy of a model together.
    """

    update: int
    epoch: int = 0
    samples: int
    micro_batches: tuple[MicroBatch, ...]
    steps: int
    learning_rate: float
    samples_per_rank: tuple[int, ...] = ()
    micro_step_count: int = 0
    order: tuple[int, ...] | None = None
    speeds: tuple[float, ...] | None = None
    padding: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowPlanner:
    """Every update of a run, for every rank: a pure function of these values.

    Attributes:
        batch: the numbers of the first stage of a batch schedule.
        work: how micro-steps are formed by lengths; None: by numbers of samples.
    """

    order: DataOrder
    schedule: Schedule
    batch: Batch
    ranks: int
    reduction: str = "fast"
    work: WorkByCost | None = None

    def assignment(self, update: int, speeds: tuple[float, ...] | None = None) -> Split:
        """Return the division of this update: by cost where lengths are known, else by number (of
        whole leaves in reproducible mode).

        Args:
            speeds: of ranks, above 0 in any unit; None: equal.
        """
        if self.work is not None:
            return self.work.split(self.order.indices(update), self.ranks, speeds)
        samples = self.order.samples_of(update)
        batch = later_batch(self.batch, self.order.batch_of(update), self.ranks)
        if speeds is not None:
            cap = batch.micro_batch_cap
            if self.reduction == "reproducible" and cap is not None:
                leaves = deal([1.0] * -(-samples // cap), self.ranks, speeds)
                return assign_leaves(leaves, samples=samples, leaf_size=cap)
            # No larger than the micro-batches at equal speeds, which fit into memory.
            steps = batch.steps or 1
            cap = cap or -(-batch.global_batch // (self.ranks * steps))
            return split_by_speed(samples, speeds, cap)
        return _split_for(samples, self.ranks, batch=batch, reduction=self.reduction)

    def cost(self, window: Window) -> float:
        """Return the cost of a rank's window, padding included."""
        micro_batches = [micro_batch.indices for micro_batch in window.micro_batches]
        if self.work is not None:
            return self.work.cost(micro_batches)
        return float(sum(map(len, micro_batches)))

    def window(self, update: int, rank: int, assignment: Split | None = None) -> Window:
        """Return the work of `rank` in `update`, by `assignment` or else by the usual division.

        Raises:
            PlanError: there is no such rank, `assignment` is not of as many samples as
                the update has, or in reproducible mode does not consist of whole leaves.
        """
        split = self.assignment(update) if assignment is None else assignment
        samples = self.order.samples_of(update)
        if split.samples != samples:
            raise PlanError(
                f"update {update} has {samples} samples, but the assignment is of {split.samples}"
            )
        pieces = split.pieces(rank)
        # Leaves of work by cost follow from the lengths alone, not from the ranks.
        moves_leaves = self.reduction == "reproducible" and self.work is None
        if assignment is not None and moves_leaves:
            leaf = self.batch.micro_batch_cap or self.batch.global_batch
            for start, count in pieces:
                if start % leaf or count != min(leaf, samples - start):
                    raise PlanError(
                        f"samples {start} to {start + count - 1} of the update are not a leaf of "
                        f"{leaf} samples; accumulation.reduction=reproducible moves whole leaves "
                        "only"
                    )
        # A rank's own samples only, in one call: an update may have ten million, and each rank
        # thousands of micro-steps.
        first = min((start for start, _ in pieces), default=0)
        last = max((start + count for start, count in pieces), default=0)
        if not pieces:
            indices = []
        elif split.order is None:
            indices = self.order.indices(update, first, last - first).tolist()
        else:
            indices = self.order.indices(update)[list(split.order[first:last])].tolist()
        return Window(
            update=update,
            epoch=self.order.epoch_of(update),
            samples=samples,
            micro_batches=tuple(
                MicroBatch(
                    update=update,
                    number=number,
                    positions=(
                        range(start, start + count)
                        if split.order is None
                        else split.order[start : start + count]
                    ),
                    indices=tuple(indices[start - first : start - first + count]),
                )
                for number, (start, count) in enumerate(pieces, split.first_numbers[rank])
            ),
            learning_rate=self.schedule.learning_rate(update),
            steps=split.micro_steps,
            samples_per_rank=split.samples_per_rank,
            micro_step_count=split.micro_step_count,
            order=split.order,
        )


def planner_of(plan: Plan) -> WindowPlanner:
    """Return the planner of a run whose data set is known.

    Raises:
        PlanError: the plan was made without the data set's size.
    """
    schedule = plan.rates.schedule
    if plan.length.dataset_samples is None or schedule is None:
        raise PlanError("windows need the size of the data set, and this plan was made without it")
    return WindowPlanner(
        order=plan.order,
        schedule=schedule,
        batch=plan.batch,
        ranks=plan.ranks,
        reduction=plan.reduction,
        work=plan.work,
    )
