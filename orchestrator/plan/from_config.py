"""The plan of a configuration: where its keys meet the planner's arguments."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.config.schema import Config, node_range
from orchestrator.plan.plan import Plan, make_plan

ITEMSIZE = {"float64": 8}
WIRE_ITEMSIZE = {"own": None, "bfloat16": 2}


def plan_of(
    config: Config,
    *,
    nodes: int | None = None,
    dataset_samples: int | None = None,
    parameters: int | None = None,
    metric_count: int = 0,
    framework: str | None = None,
    coupled: bool = False,
    collectives_beside: int | None = None,
    own_rate: bool = False,
) -> Plan:
    """Plan with what is known: the workers know all of it, the submitting side what `facts` says.

    Args:
        nodes: how many there really are; None for the most that the configuration asks for.
        framework: that the job is written for, if that is known.
        coupled: the job's loss is one of all embeddings, which are gathered once an update.
        collectives_beside: of each update, besides the gradient's reduction, as the engine counts
            them; None when there is none yet.
        own_rate: the job gives the learning rates itself.

    Raises:
        PlanError: a batch, a schedule or a data set that cannot be planned.
    """
    planned = make_plan(
        nodes=nodes or node_range(config.cluster.nodes)[1],
        ranks_per_node=config.cluster.ranks_per_node,
        global_batch=config.accumulation.global_batch,
        steps=config.accumulation.steps,
        micro_batch=config.accumulation.micro_batch,
        ragged=config.accumulation.ragged,
        reduction=config.accumulation.reduction,
        sync=config.accumulation.sync,
        updates=config.train.updates,
        epochs=config.train.epochs,
        seed=config.train.seed,
        base_lr=config.schedule.base_lr,
        base_batch=config.schedule.base_batch,
        scaling=config.schedule.scaling,
        warmup_updates=config.schedule.warmup_updates,
        decay=config.schedule.decay,
        dataset_samples=config.facts.dataset_samples
        if dataset_samples is None
        else dataset_samples,
        parameters=config.facts.parameters if parameters is None else parameters,
        itemsize=ITEMSIZE.get(config.train.precision, 4),
        metric_count=metric_count,
        bucket_bytes=config.engine.bucket_bytes,
        wire_itemsize=WIRE_ITEMSIZE[config.engine.wire],
        shard_optimizer=config.engine.shard_optimizer,
        early=framework != "mindspore",
        own_rate=own_rate,
    )
    beside = int(coupled and planned.ranks > 1)
    if collectives_beside is not None:
        beside = collectives_beside
    # How many batch norms there are, and how large embeddings are, is the job's secret.
    unknown = config.engine.norm == "exact" and collectives_beside is None
    if planned.collectives_per_update is None or not (beside or unknown):
        return planned
    return replace(
        planned,
        collectives_per_update=None if unknown else planned.collectives_per_update + beside,
        bytes_on_wire_per_update=None,
    )
