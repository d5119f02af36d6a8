"""One rank's work in one update: its samples, its micro-batches, the learning rate.

The loop asks once an update. The division is a value (`Split`) that may be passed in, so that
survivors, newcomers or a balance by measured speed can use another table for the same update.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from orchestrator.errors import PlanError
from orchestrator.plan.batch import Batch, later_batch
from orchestrator.plan.order import DataOrder
from orchestrator.plan.plan import Plan
from orchestrator.plan.schedule import Schedule
from orchestrator.plan.split import Split, split_for

# A stage of the batch has two sizes of window, full and ragged, and a loader reads ahead.
_split_for = lru_cache(maxsize=4)(split_for)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Work of a micro-step: samples `indices` of the data set, from position `start` of its update.

    `(update, start)` seeds the random numbers of the micro-step, so they do not depend on the rank.
    """

    update: int
    start: int
    indices: tuple[int, ...]


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
        samples_per_rank: of this update; blocks are contiguous, in the order of ranks.
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
    padding: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowPlanner:
    """Every update of a run, for every rank: a pure function of these five values. `batch` has the
    numbers of the first stage of a batch schedule.
    """

    order: DataOrder
    schedule: Schedule
    batch: Batch
    ranks: int
    reduction: str = "fast"

    def assignment(self, update: int) -> Split:
        """Return the even division of this update (whole leaves in reproducible mode)."""
        samples = self.order.samples_of(update)
        batch = later_batch(self.batch, self.order.batch_of(update), self.ranks)
        return _split_for(samples, self.ranks, batch=batch, reduction=self.reduction)

    def window(self, update: int, rank: int, assignment: Split | None = None) -> Window:
        """Return the work of `rank` in `update`, by `assignment` or else by the even division.

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
        if assignment is not None and self.reduction == "reproducible":
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
        indices = self.order.indices(update, first, last - first).tolist() if pieces else []
        return Window(
            update=update,
            epoch=self.order.epoch_of(update),
            samples=samples,
            micro_batches=tuple(
                MicroBatch(
                    update=update,
                    start=start,
                    indices=tuple(indices[start - first : start - first + count]),
                )
                for start, count in pieces
            ),
            learning_rate=self.schedule.learning_rate(update),
            steps=split.micro_steps,
            samples_per_rank=split.samples_per_rank,
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
    )
