"""The plan of a run: one value with each rank's work, printed by `plan`, kept as plan.json.

It is made of a configuration before anything is started, with or without knowing the data set and
the model; unknown values are None. The workers make it again with both known, and
`orchestrator.plan.window` derives every update from it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.config.frameworks import facts_of
from orchestrator.config.rules import steps_whole_parameters
from orchestrator.config.schema import (
    DEFAULT_BASE_LR,
    Config,
    TrainConfig,
    batch_stages,
    node_range,
)
from orchestrator.errors import PlanError
from orchestrator.plan.batch import (
    GLOBAL_BATCH,
    MICRO_BATCH,
    STEPS,
    Batch,
    later_batch,
    resolve_batch,
)
from orchestrator.plan.cost import MICRO_TOKENS, TokenBudget, WorkByCost, lengths_in
from orchestrator.plan.order import Branch, DataOrder
from orchestrator.plan.parts import JobFacts, Length, Rates, Traffic
from orchestrator.plan.plan_warnings import idle_gpus, warnings_of
from orchestrator.plan.schedule import Schedule
from orchestrator.plan.split import Split, split_for
from orchestrator.plan.wire import Wire
from orchestrator.units import plural

DEFAULT_EPOCHS = 1.0
ITEMSIZE = {"float64": 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Work of a run.

    Attributes:
        nodes, ranks_per_node: R = nodes * ranks_per_node.
        batch: the batch numbers, stated or not.
        order: of the samples; without the data set, for one that is just large enough.
        split: of a full window, the first one.
        reduction: of gradients, as configured.
        length, rates, traffic, branch: see each.
        work: how micro-steps are formed by lengths; None: by numbers of samples.
        lengths_digest: of the lengths, perhaps known from an earlier plan alone.
        of_cluster: warnings about the cluster's resources.
    """

    nodes: int
    ranks_per_node: int
    batch: Batch
    order: DataOrder
    split: Split
    reduction: str
    length: Length
    rates: Rates
    traffic: Traffic
    branch: Branch | None = None
    of_cluster: tuple[str, ...] = ()
    work: WorkByCost | None = None
    lengths_digest: str | None = None

    @classmethod
    def of(cls, config: Config, known: JobFacts | None = None) -> Plan:
        """Make a plan: with all facts on the ranks, with those of `facts` on the submitting side.

        Raises:
            PlanError: a batch, a schedule or a data set that cannot be planned.
        """
        known = known or JobFacts()
        per_node = config.cluster.ranks_per_node
        if known.nodes is None:
            nodes, batch = _largest(config)
        else:
            nodes, batch = known.nodes, _batch(config, known.nodes)
        samples = known.dataset_samples
        if samples is None:
            samples = config.facts.dataset_samples
        stages = batch_stages(config.accumulation.batch_schedule)
        for _, later in stages:
            later_batch(batch, later, nodes * per_node)  # refuses windows that are too large
        largest = max(size for _, size in ((0, batch.global_batch), *stages))
        order = DataOrder(
            # Without the data set the same checks run for one that is just large enough.
            dataset_samples=largest if samples is None else samples,
            global_batch=batch.global_batch,
            ragged=config.accumulation.ragged,
            seed=config.train.seed,
            shards=known.shards,
            batch_schedule=stages,
            # Without the data set it is checked by the ranks.
            branch=None if samples is None else known.branch,
        )
        reduction = config.accumulation.reduction
        work = _work(config, known, samples)
        if work is None:
            size, ranks = order.samples_of(0), nodes * per_node
            split = split_for(size, ranks, batch=batch, reduction=reduction)
        else:
            split = work.split(order.indices(0), nodes * per_node)
        if config.accumulation.balance == "measured" and split.idle_ranks and samples is not None:
            raise PlanError(
                f"accumulation.balance=measured needs work for every rank, but an update has "
                f"{plural(split.micro_step_count, 'micro-step')} for {split.ranks} ranks; try "
                f"{_enough_work(order, split, work)}, or accumulation.balance=even"
            )
        length = _length(order, config.train, samples)
        return cls(
            nodes=nodes,
            ranks_per_node=per_node,
            batch=batch,
            order=order,
            split=split,
            reduction=reduction,
            length=length,
            rates=_rates(config, known, order, length),
            traffic=_traffic(config, known, split),
            branch=known.branch,
            of_cluster=tuple(idle_gpus(config)),
            work=work,
            lengths_digest=known.lengths_digest if work is None else work.digest,
        )

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def updates(self) -> int | None:
        """Return the updates of the whole run; None when not known."""
        return self.length.updates

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return warnings for the user, as sentences."""
        of_batch = warnings_of(
            self.split, self.batch, self.order, self.length, self.rates, reduction=self.reduction
        )
        of_lengths = () if self.work is None else self.work.warnings(self.order, self.ranks)
        return (*self.of_cluster, *of_batch, *of_lengths)

    def figures(self) -> dict[str, Any]:
        """Return all values by their names in plan.json.

        `steps` is the number by the batch numbers, `micro_steps` the busiest rank's: as many, or
        less when samples are fewer. `micro_batch` is the stated cap, in reproducible mode the
        leaf's size. `micro_batches` are R lists of sizes, none 0; an idle rank's is empty.
        """
        batch, split, length, rates = self.batch, self.split, self.length, self.rates
        balance = {} if self.work is None else self.work.balance(self.order, self.ranks)
        unknown = batch.micro_tokens is not None and self.work is None  # until there are lengths
        rate_known = rates.source != "optimizer" or rates.first is not None
        shards = self.order.shards
        schedule = asdict(rates.schedule) if rates.schedule and rate_known else None
        if schedule and not schedule["batch_schedule"]:
            del schedule["batch_schedule"]
        return {
            "ranks": self.ranks,
            "nodes": self.nodes,
            "ranks_per_node": self.ranks_per_node,
            "global_batch": batch.global_batch,
            "steps": batch.steps,
            "micro_batch": batch.micro_batch_cap,
            "micro_tokens": batch.micro_tokens,
            "lengths_digest": self.lengths_digest,
            **balance,
            "micro_steps": None if unknown else split.micro_steps,
            "samples_per_rank": None if unknown else split.samples_per_rank,
            "micro_batches": None if unknown else split.micro_batches,
            "idle_ranks": split.idle_ranks,
            "updates": length.updates,
            "epochs": length.epochs,
            "updates_per_epoch": length.updates_per_epoch,
            "dataset_samples": length.dataset_samples,
            "parameters": self.traffic.parameters,
            "learning_rate_from": rates.source,
            "learning_rate_first": rates.first,
            "learning_rate_peak": rates.peak,
            "learning_rate_last": rates.last,
            "schedule": schedule,
            "collectives_per_update": self.traffic.collectives,
            "bytes_on_wire_per_update": self.traffic.bytes_on_wire,
            "ragged": self.order.ragged,
            "reduction": self.reduction,
            "seed": self.order.seed,
            "shards": shards and {"lengths": shards.lengths, "lanes": shards.lanes},
            "gathers_per_update": self.traffic.gathers,
            **({"samples": length.samples} if length.samples is not None else {}),
            **({"batch_schedule": self.stages()} if self.order.batch_schedule else {}),
            **({"branch": self.branch.to_json()} if self.branch else {}),
            "warnings": self.warnings,
        }

    def stages(self) -> list[dict[str, Any]]:
        """Return the later stages of a batch schedule: the first `update` of each, its batch, the
        micro-steps of the busiest rank (None where lengths decide), and the peak of the learning
        rate, None if not known.
        """
        schedule = None if self.rates.peak is None else self.rates.schedule
        stages: list[dict[str, Any]] = []
        for update, global_batch in self.order.batch_schedule:
            steps = later_batch(self.batch, global_batch, self.ranks).steps
            stages.append(
                {
                    "update": update,
                    "global_batch": global_batch,
                    "micro_steps": steps and min(steps, -(-global_batch // self.ranks)),
                    "learning_rate_peak": schedule and schedule.peak_at(update),
                }
            )
        return stages

    def to_json(self) -> dict[str, Any]:
        """Return `figures` as JSON types: dicts, lists, numbers, strings, None."""
        return _listed(self.figures())


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, (tuple, list)) else value


def _work(config: Config, known: JobFacts, samples: int | None) -> WorkByCost | None:
    """Return how work is formed by lengths; None if it is not, or if they are not known."""
    accumulation, lengths = config.accumulation, known.lengths
    if accumulation.micro_tokens is None:
        return None
    if known.shards is not None:
        raise PlanError(
            f"{MICRO_TOKENS}={accumulation.micro_tokens} puts samples of like length together, "
            "wherever they are in an update, but a rank reads its own shards only; use "
            f"{MICRO_BATCH}, or a data set without `shards`"
        )
    if lengths is None and config.facts.lengths is not None and samples is not None:
        lengths = lengths_in(Path(config.facts.lengths), samples)
    if lengths is None:
        return None
    budget = TokenBudget(
        micro_tokens=accumulation.micro_tokens, pad_to=accumulation.pad_to, cost=known.cost
    )
    if (shortest := int(budget.padded(lengths).min())) > accumulation.micro_tokens:
        raise PlanError(
            f"{MICRO_TOKENS}={accumulation.micro_tokens} is less than the shortest sample, which "
            f"has {shortest} tokens; {MICRO_TOKENS}={int(budget.padded(lengths).max())} holds one "
            "of the longest"
        )
    return WorkByCost(
        lengths,
        budget,
        reproducible=accumulation.reduction == "reproducible",
        in_step=config.engine.shard_model != "none",
    )


def _enough_work(order: DataOrder, split: Split, work: WorkByCost | None) -> str:
    """Return the nearest setting by which an update has a micro-step for every rank."""
    samples, ranks = order.samples_of(0), split.ranks
    if order.dataset_samples < ranks:
        return f"at most {plural(order.dataset_samples, 'rank')}"
    if samples < ranks:
        return f"{GLOBAL_BATCH}={ranks}"
    if work is None:  # in reproducible mode, where whole leaves are dealt
        return f"{MICRO_BATCH}={-(-samples // (ranks - 1)) - 1}"

    def is_enough(tokens: int) -> bool:
        smaller = replace(work, budget=replace(work.budget, micro_tokens=tokens))
        return not smaller.split(order.indices(0), ranks).idle_ranks

    enough, too_many = int(work.budget.padded(work.lengths).min()), work.budget.micro_tokens
    if not is_enough(enough):
        return f"a larger {GLOBAL_BATCH}"
    while too_many - enough > 1:
        tokens = (enough + too_many) // 2
        if is_enough(tokens):
            enough = tokens
        else:
            too_many = tokens
    return f"{MICRO_TOKENS}={enough}"


def _batch(config: Config, nodes: int) -> Batch:
    return resolve_batch(
        global_batch=config.accumulation.global_batch,
        steps=config.accumulation.steps,
        micro_batch=config.accumulation.micro_batch,
        micro_tokens=config.accumulation.micro_tokens,
        ranks=nodes * config.cluster.ranks_per_node,
    )


def _largest(config: Config) -> tuple[int, Batch]:
    """Return the most nodes and their batch, after a check of every number in the range.

    Raises:
        PlanError: the batch numbers disagree on some number of nodes, or depend on it.
    """
    least, most = node_range(config.cluster.nodes)
    batch = _batch(config, most)
    for nodes in range(least, most):
        setting = f"cluster.nodes={{min: {least}, max: {most}}}"
        try:
            other = _batch(config, nodes)
        except PlanError as error:
            raise PlanError(f"{setting} may give {plural(nodes, 'node')}: {error}") from error
        if other.global_batch != batch.global_batch:
            raise PlanError(
                f"{setting}, but {STEPS}={batch.steps} and {MICRO_BATCH}={batch.micro_batch_cap} "
                f"make a global batch of {other.global_batch} samples on {plural(nodes, 'node')} "
                f"and of {batch.global_batch} on {most}; state {GLOBAL_BATCH}="
                f"{batch.global_batch} in the place of {STEPS}"
            )
    return most, batch


def _length(order: DataOrder, train: TrainConfig, samples: int | None) -> Length:
    """Return the run's length: `train.updates` or `.samples`, else `.epochs`, else one epoch."""
    known = samples is not None
    updates, epochs = train.updates, train.epochs
    if updates is None and train.samples is not None:
        updates = order.updates_for_samples(train.samples) if known else None
        epochs = order.epochs_of(updates) if updates is not None else None
    elif updates is None:
        epochs = DEFAULT_EPOCHS if epochs is None else epochs
        total = order.updates_for(epochs)
        updates = total if known else None
    else:
        epochs = order.epochs_of(updates) if known else None
    return Length(
        updates=updates,
        epochs=epochs,
        updates_per_epoch=order.updates_per_epoch if known else None,
        dataset_samples=samples,
        samples=train.samples,
    )


def _rates(config: Config, known: JobFacts, order: DataOrder, length: Length) -> Rates:
    settings, total = config.schedule, length.updates
    base = known.base_rate if settings.base_lr is None else settings.base_lr
    of_optimizer = not config.optimizer and settings.base_lr is None
    source = "learning_rate" if known.own_rate else "optimizer" if of_optimizer else "schedule"
    own = known.own_rate or (of_optimizer and base is None)
    # The workers will know the run's end, so a plan without the data must not fail here: its first
    # value and peak are those of a rate that does not fall.
    unknown = total is None and settings.decay in ("cosine", "linear")
    schedule = Schedule(
        base_lr=DEFAULT_BASE_LR if base is None else base,
        global_batch=order.global_batch,
        batch_schedule=order.batch_schedule,
        base_batch=settings.base_batch,
        scaling=settings.scaling,
        warmup_updates=settings.warmup_updates,
        decay="none" if unknown else settings.decay,
        total_updates=total,
    )
    return Rates(
        source=source,
        first=None if own else schedule.learning_rate(0),
        peak=None if own else schedule.peak,
        last=None if own or total is None else schedule.learning_rate(total - 1),
        schedule=None if unknown else schedule,
    )


def _traffic(config: Config, known: JobFacts, split: Split) -> Traffic:
    accumulation, engine = config.accumulation, config.engine
    parameters = config.facts.parameters if known.parameters is None else known.parameters
    wire = Wire(
        ranks=split.ranks,
        itemsize=ITEMSIZE.get(config.train.precision, 4),
        metric_count=known.metric_count,
        bucket_bytes=engine.bucket_bytes,
        sharded=engine.shard_optimizer,
        early=facts_of(known.framework).sends_early,
    )
    known_ahead = (
        accumulation.reduction == "fast"
        and engine.shard_model == "none"
        and not steps_whole_parameters(config)  # buckets depend on the parameters' sizes
    )
    summed = parameters if known_ahead else None
    collectives, sent = wire.collectives(summed), wire.bytes_sent(summed)
    extra = known.extra_collectives
    extra = int(known.coupled and split.ranks > 1) if extra is None else extra
    if collectives is not None and extra:
        collectives, sent = collectives + extra, None  # only the job knows its embeddings' size
    return Traffic(
        parameters=parameters,
        collectives=collectives,
        bytes_on_wire=sent,
        wire=wire,
        gathers=wire.gathers(summed),
    )
