"""Warnings on a plan that is allowed but perhaps not meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.config.program import is_program
from orchestrator.config.schema import Config, gpu_count
from orchestrator.plan.batch import BATCH_SCHEDULE, GLOBAL_BATCH, MICRO_BATCH, STEPS, Batch
from orchestrator.plan.order import DataOrder
from orchestrator.plan.parts import Length, Rates
from orchestrator.plan.split import Split
from orchestrator.units import named_ranks, plural


def warnings_of(
    split: Split, batch: Batch, order: DataOrder, length: Length, rates: Rates, *, reduction: str
) -> tuple[str, ...]:
    """Return all warnings that apply, the most important first. `split` is of the first window."""
    return (
        *_idle(split, batch, reduction),
        *_empty_steps(split, batch),
        *(_uneven_leaves(split, batch, order, length) if reduction == "reproducible" else ()),
        *_data(order, length, rates),
        *_branch(order),
        *_unreached_stages(order, length),
        *_warm_up(length, rates),
    )


def idle_gpus(config: Config) -> Iterator[str]:
    """Yield a warning if a run requests more GPUs from a scheduler than it has ranks.

    >>> config = Config(job={"command": ["train.py"]})
    >>> config.cluster.kind, config.cluster.gpus_per_node = "slurm", 8
    >>> [*idle_gpus(config)][0].partition(": ")[2]
    'each node has 6 idle GPUs, unless a rank uses several; try cluster.ranks_per_node=8'
    """
    cluster, gpus = config.cluster, gpu_count(config.cluster.gpus_per_node)
    on_cpus = config.transport in ("gloo", "mccl")
    if cluster.kind == "local" or on_cpus or gpus <= cluster.ranks_per_node:
        return
    unless = ", unless a rank uses several" if is_program(config.job) else ", as each rank uses one"
    idle = gpus - cluster.ranks_per_node
    yield (
        f"cluster.gpus_per_node={cluster.gpus_per_node}, but cluster.ranks_per_node="
        f"{cluster.ranks_per_node}: each node has {plural(idle, 'idle GPU')}{unless}; try "
        f"cluster.ranks_per_node={gpus}"
    )


def _idle(split: Split, batch: Batch, reduction: str) -> Iterator[str]:
    leaf = batch.micro_batch_cap if reduction != "fast" else None
    if idle := split.idle_ranks:
        yield (
            f"{named_ranks(idle)} of {split.ranks} will be idle: there is no work for them in an "
            f"update of {split.samples} samples" + (f" in leaves of {leaf}" if leaf else "")
        )


def _empty_steps(split: Split, batch: Batch) -> Iterator[str]:
    taken = split.micro_steps
    if batch.steps is None or taken >= batch.steps:
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


def _uneven_leaves(split: Split, batch: Batch, order: DataOrder, length: Length) -> Iterator[str]:
    leaf = batch.micro_batch_cap
    if leaf is None:
        return
    counts = [len(sizes) for sizes in split.micro_batches]
    if min(counts) != max(counts):
        even, total = split.ranks * leaf * max(counts), length.dataset_samples
        fits = total is None or even <= total or order.ragged == "carry"
        yield (
            f"{sum(counts)} leaves do not divide evenly: {counts.count(max(counts))} of "
            f"{split.ranks} ranks take {max(counts)} and the others wait for them"
            + (f"; {GLOBAL_BATCH}={even} would fill all ranks at {MICRO_BATCH}={leaf}" * fits)
        )


def _data(order: DataOrder, length: Length, rates: Rates) -> Iterator[str]:
    total = length.dataset_samples
    if total is None:
        return
    sizes = {GLOBAL_BATCH: order.global_batch}
    sizes |= {f"{BATCH_SCHEDULE} from update {u} on: G": size for u, size in order.batch_schedule}
    for key, size in sizes.items():
        yield from _larger_than_data(key, size, total, order, rates)
    remains, updates = total % order.global_batch, length.updates or 0
    if order.ragged != "drop":
        return
    if order.batch_schedule or order.branch:
        (epoch, position), (first, begin) = order.place(updates), order.place(0)
        passed = (epoch - first) * total + position - begin
        if left_out := passed - order.samples_before(updates):
            yield (
                f"accumulation.ragged=drop leaves {left_out} samples out of the ends of "
                f"{plural(epoch - first, 'epoch')} of {total}"
            )
    elif remains and (epochs := updates // max(1, total // order.global_batch)):
        yield (
            f"accumulation.ragged=drop leaves {remains} of {total} samples out of each epoch"
            + " (others each time)" * (epochs > 1)
        )


def _larger_than_data(
    key: str, size: int, total: int, order: DataOrder, rates: Rates
) -> Iterator[str]:
    if size > total and order.ragged == "update":
        schedule = None if rates.source == "learning_rate" else rates.schedule
        is_scaled = schedule is not None and schedule.scaling != "none"
        yield (
            f"{key}={size} is more than the {total} samples of the data set: an update "
            f"holds {total}" + f", while the learning rate is scaled for {size}" * is_scaled
        )
    if size > total and order.ragged == "carry":
        yield (
            f"{key}={size} is more than the {total} samples of the data set: an update "
            "holds some samples more than once"
        )


def _branch(order: DataOrder) -> Iterator[str]:
    if (branch := order.branch) and branch.position and branch.seed != order.seed:
        yield (
            f"train.seed={order.seed} is not that of {branch.run} ({branch.seed}): the rest of "
            f"epoch {branch.epoch} comes in another order, with samples that were used already"
        )


def _unreached_stages(order: DataOrder, length: Length) -> Iterator[str]:
    if length.updates is None:
        return
    unreached = [stage for stage in order.batch_schedule if stage[0] >= length.updates]
    for update, size in unreached[:1]:
        yield (
            f"{BATCH_SCHEDULE}: the run has {plural(length.updates, 'update')}, so it ends before "
            f"the batch of {size} from update {update} on"
        )


def _warm_up(length: Length, rates: Rates) -> Iterator[str]:
    if rates.source == "learning_rate" or rates.schedule is None or length.updates is None:
        return
    if rates.schedule.warmup_updates > length.updates:
        yield (
            f"schedule.warmup_updates={rates.schedule.warmup_updates} is more than the "
            f"{length.updates} updates of the run: the learning rate never reaches its peak"
        )


def balance_text(plan: Mapping[str, Any]) -> str:
    """Describe what forming and dealing work by length gains in a plan's first updates."""
    return (
        f"padded to real tokens {plan['padded_to_real']:.2f}, busiest rank to the mean "
        f"{plan['busiest_to_mean']:.2f}; dealt by number, as they come, the busiest would have "
        f"{plan['even_to_busiest']:.2f} times as much"
    )
