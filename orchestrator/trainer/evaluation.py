"""Evaluation of a job's held-out data by all ranks: `validation()` of a job class."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from orchestrator.data import HeldOutData
from orchestrator.engine.api import Engine, EvaluatesHeldOut, HeldOutReport
from orchestrator.engine.common.replicas import folded, minority_ranks
from orchestrator.errors import ConfigError, JobError
from orchestrator.job import Job, is_coupled
from orchestrator.plan.cost import deal, in_rounds
from orchestrator.plan.held_out import HeldOutShare, cut_held_out, piece_size, share_of
from orchestrator.plan.plan import Plan
from orchestrator.plan.window import MicroBatch
from orchestrator.trainer.same_inputs import agreed_samples, same_lengths
from orchestrator.units import named_ranks


def agreed_held_out(engine: Engine, job: Any, *, by_length: bool = False) -> HeldOutData | None:
    """Return the job's held-out data, once all ranks agree on them; None where it has none.
    Collective for a job that defines `validation`.

    Args:
        by_length: note the lengths of samples, if all data sets have an attribute `lengths`.

    Raises:
        ConfigError: the engine cannot evaluate on all ranks.
        JobError: on all ranks alike; data sets that are empty, no data sets, or not the same on all
            ranks, a loss that has no sums over held-out samples, or figures of equal names.
    """
    if getattr(type(job), "validation", Job.validation) is Job.validation:
        return None
    name = type(job).__name__
    held_out = job.validation()
    data_sets: Mapping[Any, Any] = {} if held_out is None else {"": held_out}
    if isinstance(held_out, Mapping):
        data_sets = held_out
        if not data_sets or not all(isinstance(key, str) and key for key in data_sets):
            raise JobError(
                f"{name}.validation() must give a data set, or data sets by name, as in "
                f"return {{'seen': …, 'unseen': …}}, but gives names {list(data_sets)!r:.80}; "
                "None says that there are no held-out data"
            )
    rows = engine.gather([float(folded(list(data_sets)))])
    if odd := minority_ranks(rows):
        raise JobError(
            f"{name}.validation() gives other data sets on {named_ranks(odd)}; every rank needs "
            "the same ones, of which the plan gives it its part"
        )
    if not data_sets:
        return None
    if not isinstance(engine, EvaluatesHeldOut):
        raise ConfigError(
            f"{name} defines validation(), but {type(engine).__name__} cannot evaluate on all "
            "ranks; compute the figures in evaluate(model), which rank 0 calls"
        )
    if is_coupled(job) or getattr(job, "talks_in_window", False):
        why = "defines embed()" if is_coupled(job) else "sets talks_in_window"
        raise JobError(
            f"{name} defines validation(), but also {why}: its loss depends on the samples of "
            "other ranks, so sums over held-out samples would depend on the number of ranks. "
            "Compute the figures in evaluate(model), which rank 0 calls"
        )
    sources = [f"validation()[{key!r}]" if key else "validation()" for key in data_sets]
    for what, data_set in zip(sources, data_sets.values(), strict=True):
        # Random numbers of samples follow from their place, so they may draw some.
        if not agreed_samples(engine, data_set, augments=True, what=what):
            raise JobError(
                f"{name}.{what} has no samples, so it has no loss; leave it out, or give it some"
            )
    data = HeldOutData(data_sets)
    metrics: dict[str, float] = dict.fromkeys(getattr(job, "metric_names", ()), 0.0)
    names = [figure for n in range(len(data_sets)) for figure in data.figures(n, 0.0, metrics)]
    if "loss" in metrics or len(set(names)) < len(names):
        raise JobError(
            f"two figures of {name}.validation() would have one name: rename the metric 'loss', or "
            f"the data sets (names of figures: {', '.join(names)})"
        )
    if by_length and all(hasattr(data_set, "lengths") for data_set in data_sets.values()):
        data.sample_lengths = [
            length
            for what, data_set in zip(sources, data_sets.values(), strict=True)
            for length in same_lengths(
                engine, f"{name}.{what}.lengths", data_set.lengths, len(data_set)
            ).tolist()
        ]
    return data


class HeldOutEvaluation:
    """The evaluation of held-out data by the ranks of one group. `close` it.

    Loader workers live from one evaluation to the next, since their start takes seconds; they
    fetch the first batches of the next one ahead.

    Args:
        before_piece: called before each piece of this rank.
    """

    def __init__(
        self,
        data: HeldOutData,
        engine: Engine,
        plan: Plan,
        *,
        rank: int,
        ranks: int,
        before_piece: Callable[[int], None],
    ) -> None:
        self._data, self._engine, self._before_piece = data, engine, before_piece
        # The size for the plan's ranks, so that figures do not change where some are lost.
        size = piece_size(
            plan.batch,
            plan.ranks,
            reduction=plan.reduction,
            most_samples=plan.work and plan.work.most_samples,
        )
        pieces = cut_held_out(data.lengths, size)
        counts = None
        if plan.work is not None and data.sample_lengths is not None:
            longest = [max(data.sample_lengths[s : s + n]) for _, s, n in pieces]
            costs = [
                plan.work.budget.cost_of(max(length, 1), piece.samples)
                for length, piece in zip(longest, pieces, strict=True)
            ]
            counts = deal(costs, ranks, in_step=bool(engine.shard_ranks))
            if engine.shard_ranks:  # a round takes as long as its most expensive piece
                pieces = tuple(pieces[number] for number in in_rounds(costs, ranks))
        self._share = share_of(
            pieces, rank, ranks, shard_ranks=engine.shard_ranks, pieces_per_rank=counts
        )
        self._batches: Iterator[Any] | None = None

    def __call__(self) -> HeldOutReport:
        """Evaluate. Collective."""
        engine: Any = self._engine
        if self._batches is None:
            self._batches = engine.held_out_batches(self._data, _repeated(self._share))
        return engine.evaluate_held_out(self._data, self._share, self._batches, self._before_piece)

    def close(self) -> None:
        """End the loader workers."""
        if isinstance(self._batches, Generator):
            self._batches.close()
        self._batches = None


def _repeated(share: HeldOutShare) -> Iterator[MicroBatch]:
    while share.pieces:
        yield from share.micro_batches()


def joined_figures(together: Mapping[str, float], own: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of `validation` and of `evaluate`.

    Raises:
        JobError: both have a figure of one name.
    """
    if both := together.keys() & own.keys():
        raise JobError(
            f"evaluate() returns {', '.join(sorted(both))}, which validation() gives as well: "
            "rename it in evaluate(), or leave it out there"
        )
    return {**together, **own}
