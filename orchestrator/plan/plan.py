"""The plan of a run: one value that says who computes what, printed by `plan`, kept as plan.json.

It is made from plain values before anything is started, with or without knowing the data set and
the model; what is not known is None. The workers make it again with both known, and
`orchestrator.plan.window` derives every update from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from orchestrator.errors import PlanError
from orchestrator.plan.batch import resolve_batch
from orchestrator.plan.bounds import at_least, one_of
from orchestrator.plan.order import DataOrder
from orchestrator.plan.plan_warnings import Facts, warnings_of
from orchestrator.plan.schedule import Schedule
from orchestrator.plan.split import split_for
from orchestrator.plan.wire import bytes_on_wire_per_update, collectives_per_update

SYNCS = ("boundary", "every_step")
DEFAULT_EPOCHS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run will do. The table of ranks is that of the first window.

    Attributes:
        ranks, nodes, ranks_per_node: R = nodes * ranks_per_node.
        global_batch: samples of a full update.
        steps: micro-steps that the batch numbers call for (`accumulation.steps`, stated or not).
        micro_batch: the stated cap, in reproducible mode the leaf's size; None when not stated.
        micro_steps: micro-steps of the busiest rank: `steps`, or less when samples are fewer.
        samples_per_rank: R numbers.
        micro_batches: R lists of sizes, none 0; an idle rank's is empty.
        idle_ranks: ranks without samples in a full window.
        updates: of the whole run; None when only epochs are stated and the data set is not known.
        epochs: stated, or what `updates` amount to; None when not known.
        updates_per_epoch: see `DataOrder`; None when the data set is not known.
        dataset_samples, parameters: of the data set and the model; None when not known.
        learning_rate_first, _peak, _last: of update 0, at the top, of the last update; None when
            not known beforehand, as where the job gives its own.
        schedule: the whole schedule; None when it needs the number of updates and that is unknown.
        collectives_per_update: 0 on one rank; None when not known beforehand, which is so without
            `parameters` and in reproducible mode.
        bytes_on_wire_per_update: per rank; None likewise.
        ragged, reduction, sync, seed: as configured.
        gathers_per_update: of the collectives, those that bring weights back from the ranks that
            step them, where the optimizer is sharded; an update that is skipped needs none.
        warnings: sentences for the person.
    """

    ranks: int
    nodes: int
    ranks_per_node: int
    global_batch: int
    steps: int
    micro_batch: int | None
    micro_steps: int
    samples_per_rank: tuple[int, ...]
    micro_batches: tuple[tuple[int, ...], ...]
    idle_ranks: tuple[int, ...]
    updates: int | None
    epochs: float | None
    updates_per_epoch: int | None
    dataset_samples: int | None
    parameters: int | None
    learning_rate_first: float | None
    learning_rate_peak: float | None
    learning_rate_last: float | None
    schedule: Schedule | None
    collectives_per_update: int | None
    bytes_on_wire_per_update: int | None
    ragged: str
    reduction: str
    sync: str
    seed: int
    gathers_per_update: int = 0
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The plan as what JSON can hold: dicts, lists, numbers, strings, None."""
        return _listed(asdict(self))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """The inverse of `to_json`. Keys that it does not know are left alone.

        Raises:
            PlanError: a key is missing; the message names it.
        """
        known = {f.name: f.default for f in fields(cls)}
        missing = [n for n, default in known.items() if n not in data and default is MISSING]
        if missing:
            raise PlanError(f"the plan lacks {', '.join(missing)}; is it another version's?")
        values = {name: data[name] for name in known if name in data}
        if values["schedule"] is not None:
            values["schedule"] = Schedule(**values["schedule"])
        for name in ("samples_per_rank", "idle_ranks", "warnings"):
            values[name] = tuple(values.get(name, ()))
        values["micro_batches"] = tuple(map(tuple, values["micro_batches"]))
        return cls(**values)


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, (tuple, list)) else value


def make_plan(
    *,
    nodes: int,
    ranks_per_node: int,
    global_batch: int | None = None,
    steps: int | None = None,
    micro_batch: int | None = None,
    ragged: str = "update",
    reduction: str = "fast",
    sync: str = "boundary",
    updates: int | None = None,
    epochs: float | None = None,
    seed: int = 0,
    base_lr: float = 1e-3,
    base_batch: int | None = None,
    scaling: str = "none",
    warmup_updates: int = 0,
    decay: str = "none",
    final_fraction: float = 0.0,
    dataset_samples: int | None = None,
    parameters: int | None = None,
    itemsize: int = 4,
    metric_count: int = 0,
    bucket_bytes: int | None = None,
    wire_itemsize: int | None = None,
    shard_optimizer: bool = False,
    early: bool = True,
    own_rate: bool = False,
) -> Plan:
    """Make the plan of a run from values as stated (None: not stated, or not known).

    `updates` wins over `epochs`; with neither it is one epoch. `itemsize` is the bytes of one
    gradient number, `metric_count` the job's metrics, `bucket_bytes` the size of a
    bucket (see `wire.bucket_count`), `wire_itemsize` the bytes of a gradient number while it
    travels, where those are fewer. `shard_optimizer`: each rank steps 1/R of the weights.
    `early`: buckets leave during the backward. `own_rate`: the job gives the learning rates.

    Raises:
        PlanError: values that are out of range or do not agree.
    """
    at_least(1, "cluster.nodes", nodes)
    ranks = nodes * at_least(1, "cluster.ranks_per_node", ranks_per_node)
    if one_of(SYNCS, "accumulation.sync", sync) == "every_step" and reduction == "reproducible":
        raise PlanError(
            "accumulation.sync=every_step adds micro-steps up in an order that depends on the "
            "ranks, which accumulation.reduction=reproducible forbids; use "
            "accumulation.sync=boundary or accumulation.reduction=fast"
        )
    batch = resolve_batch(
        global_batch=global_batch, steps=steps, micro_batch=micro_batch, ranks=ranks
    )
    # Without the data set the same checks run against one that is just large enough.
    order = DataOrder(
        dataset_samples=batch.global_batch if dataset_samples is None else dataset_samples,
        global_batch=batch.global_batch,
        ragged=ragged,
        seed=seed,
    )
    split = split_for(order.samples_of(0), ranks, batch=batch, reduction=reduction)
    total, passes = _length(order, updates, epochs, known=dataset_samples is not None)
    rates = Schedule(
        base_lr=base_lr,
        global_batch=batch.global_batch,
        base_batch=base_batch,
        scaling=scaling,
        warmup_updates=warmup_updates,
        # An end that the workers will know must not stop a plan that is made without the data.
        decay="none" if total is None and decay in ("cosine", "linear") else decay,
        total_updates=total,
        final_fraction=final_fraction,
    )
    full_micro_steps = split.micro_steps
    wire_parameters = None if reduction == "reproducible" else parameters
    sync_steps = full_micro_steps if sync == "every_step" else 1
    collectives = collectives_per_update(
        wire_parameters,
        itemsize=itemsize,
        metric_count=metric_count,
        bucket_bytes=bucket_bytes,
        ranks=ranks,
        sync_steps=sync_steps,
        wire_itemsize=wire_itemsize,
        sharded=shard_optimizer,
        early=early,
    )
    return Plan(
        ranks=ranks,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        global_batch=batch.global_batch,
        steps=batch.steps,
        micro_batch=batch.micro_batch_cap,
        micro_steps=full_micro_steps,
        samples_per_rank=split.samples_per_rank,
        micro_batches=split.micro_batches,
        idle_ranks=split.idle_ranks,
        updates=total,
        epochs=passes,
        updates_per_epoch=None if dataset_samples is None else order.updates_per_epoch,
        dataset_samples=dataset_samples,
        parameters=parameters,
        learning_rate_first=None if own_rate else rates.learning_rate(0),
        learning_rate_peak=None if own_rate else rates.peak,
        learning_rate_last=None if own_rate or total is None else rates.learning_rate(total - 1),
        schedule=rates if rates.decay == decay else None,
        collectives_per_update=collectives,
        bytes_on_wire_per_update=bytes_on_wire_per_update(
            wire_parameters,
            itemsize=itemsize,
            metric_count=metric_count,
            ranks=ranks,
            sync_steps=sync_steps,
            wire_itemsize=wire_itemsize,
            sharded=shard_optimizer,
        ),
        gathers_per_update=(collectives or 0) // 2 if shard_optimizer else 0,
        ragged=ragged,
        reduction=reduction,
        sync=sync,
        seed=seed,
        warnings=warnings_of(
            Facts(
                split=split,
                batch=batch,
                reduction=reduction,
                ragged=ragged,
                dataset_samples=dataset_samples,
                warmup_updates=warmup_updates,
                updates=total,
                scaling=scaling,
                own_rate=own_rate,
            )
        ),
    )


def _length(
    order: DataOrder, updates: int | None, epochs: float | None, *, known: bool
) -> tuple[int | None, float | None]:
    """Updates and epochs of the run, each None when it is not known."""
    if updates is not None:
        at_least(1, "train.updates", updates)
        if not known:
            return updates, None
        if order.ragged == "carry":
            return updates, updates * order.global_batch / order.dataset_samples
        return updates, updates / order.updates_per_epoch
    epochs = DEFAULT_EPOCHS if epochs is None else epochs
    total = order.updates_for(epochs)
    return (total if known else None), epochs
