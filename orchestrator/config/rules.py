"""Rules about combinations of configuration values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from orchestrator.config.frameworks import RESTARTS, SURVIVE, FrameworkFacts, Limit, facts_of
from orchestrator.config.job_source import TargetFacts, check_target
from orchestrator.config.optimizer import optimizer_problems
from orchestrator.config.program import is_program, program_problems
from orchestrator.config.schema import (
    SLURM_ONLY,
    AccumulationConfig,
    Config,
    ScheduleConfig,
    SweepConfig,
    TrainConfig,
    batch_stages,
    gpu_count,
    node_range,
    non_default_values,
    out_of_bounds,
    plain,
    unrepresentable_values,
)
from orchestrator.errors import ConfigError, JobError
from orchestrator.plugins import CALLBACKS, CLUSTERS, FRAMEWORKS
from orchestrator.rundir.metrics import HELD_OUT

SEARCH_ONLY = ("objective", "trials", "seed", "direction", "prune")
SMALL_IS_GOOD = ("auto", "loss", "held_out.loss", "seconds")


def search_problems(sweep: SweepConfig) -> Iterator[str]:
    """Yield a sentence for each error about a search."""
    if sweep.search == "none":
        for name in non_default_values(sweep, SEARCH_ONLY):
            yield (
                f"sweep.{name} has no effect without a search; add sweep.search=tpe, or "
                f"leave it out"
            )
        return
    if sweep.trials is None and sweep.search != "grid":
        yield f"sweep.search={sweep.search} needs how many trials it is to make: sweep.trials=20"
    if sweep.direction == "auto" and sweep.objective not in SMALL_IS_GOOD:
        yield (
            f"sweep.objective={sweep.objective}: whether it is wanted small or large is not known; "
            f"add sweep.direction=minimize, or maximize"
        )
    if sweep.prune != "none" and sweep.objective == "seconds":
        yield (
            "sweep.prune judges trials by their objective while they run, but seconds are known at "
            "the end alone; leave sweep.prune out"
        )


class ClusterFacts:
    """Facts about a kind of cluster that rules need; its class (`clusters.api.Cluster`) has them.

    Attributes:
        supports_survival: the loss of a rank or a node ends no other node's processes there, so
            `run.survive` is available.
    """

    supports_survival: ClassVar[bool] = False


ON = "a lost rank or node does not end the run (run.survive)"
OFF = "a lost rank ends the run: "


class PlannedSurvival(NamedTuple):
    """The resolved `run.survive`, and a line about it, perhaps ""."""

    on: bool
    line: str


def planned_survival(config: Config) -> PlannedSurvival:
    """Return the resolved `run.survive`, with a line about it.

    By default it is on wherever it is available on more than one node. The job's source is read for
    that. Raises `JobError` as `check_target` does.
    """
    survive = config.run.survive
    if survive is not None:
        return PlannedSurvival(survive, ON if survive else "")
    if is_program(config.job) or node_range(config.cluster.nodes)[1] == 1:
        return PlannedSurvival(on=False, line="")
    facts = check_target(config.job["_target_"])
    refusal = next(_survive_refusals(config, facts), None)
    return PlannedSurvival(refusal is None, ON if refusal is None else OFF + refusal)


def with_survival(config: Config, *, on: bool) -> Config:
    """Return the configuration with `run.survive` resolved."""
    return replace(config, run=replace(config.run, survive=on))


def _survive_refusals(config: Config, facts: TargetFacts | None = None) -> Iterator[str]:
    """Yield why ranks cannot survive. Args: facts: of the job, if they count, too."""
    if is_program(config.job):
        yield (
            "run.survive=true means nothing to a program, whose updates other ranks cannot redo; "
            f"try {RESTARTS}"
        )
    elif node_range(config.cluster.nodes)[1] * config.cluster.ranks_per_node == 1:
        yield (
            "run.survive=true needs a second rank, which goes on without the first; try "
            f"cluster.ranks_per_node=2, or {RESTARTS}"
        )
    if not CLUSTERS.load(config.cluster.kind, ClusterFacts).supports_survival:
        yield (
            f"run.survive=true is not available on a {config.cluster.kind} cluster yet; try "
            f"{RESTARTS}"
        )
    if config.cluster.allocation == "current":
        yield (
            f"{SURVIVE} cluster.allocation=current: SLURM ends all of a step when a node of it "
            f"fails, unless the allocation was made otherwise; leave one of them out, or try "
            f"{RESTARTS}"
        )
    if facts is None:
        return
    if facts.framework is None:
        yield "the job's source does not say which framework it is for; try run.survive=true"
    else:
        framework = facts_of(facts.framework)
        yield from framework.survival_problems(config, talks=facts.talks_in_window)


def interrupt_refusals(transport: str, *, talks: bool, explicit: bool) -> Iterator[str]:
    """Yield why collectives of torch that wait for a lost rank cannot be interrupted.

    Args:
        transport: "auto" if it is not known yet.
        talks: the job's loss calls collectives.
        explicit: run.survive=true is set.
    """
    if transport == "nccl" and not explicit:
        yield (
            "over NCCL a loss is survived only if run.survive=true is stated, since that has run "
            f"on a single GPU only; or use {RESTARTS}"
        )
    elif transport not in ("auto", "gloo", "nccl", "threads"):
        yield (
            f"{SURVIVE} transport={transport}, whose collectives cannot be left when a peer is "
            f"gone; try transport=gloo, or {RESTARTS} in its place"
        )
    if talks:
        yield f"{SURVIVE} talks_in_window: those collectives cannot be interrupted"


MOST_RANKS = 2**20

SHARDABLE = (
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
)
"""Optimizers of torch.optim that treat each number by itself, so that their state can be in pieces.

Adagrad has state from the beginning."""

WHOLE = ("Muon", "Adafactor")
"""Optimizers of torch.optim that step a parameter by all of that parameter."""


def steps_whole_parameters(config: Config) -> bool:
    """Return whether each rank steps whole parameters, where that is known from the settings."""
    module, _, name = str(config.optimizer.get("_target_", "")).rpartition(".")
    by_class = module == "torch.optim" and name in WHOLE
    return config.engine.shard_optimizer and (by_class or config.engine.shard_by == "parameters")


def check(config: Config) -> None:
    """Refuse what no plan and no cluster can use. Raises one `ConfigError` for all of it."""
    # First, before anything is computed from such numbers.
    _refuse([*unrepresentable_values(plain(config)), *out_of_bounds(config)])
    _refuse([*_any_job(config), *optimizer_problems(config.optimizer)])


def max_concurrent_points(parallel: Any) -> int | None:
    """Return how many points `sweep.parallel` asks for; None: `auto`. Raises `ConfigError`."""
    if parallel == "auto":
        return None
    if isinstance(parallel, int) and not isinstance(parallel, bool) and 1 <= parallel <= 10_000:
        return parallel
    raise ConfigError(
        f"sweep.parallel must be auto or a number from 1 to 10000, but is {parallel!r}"
    )


def refuse_unsupported(config: Config, framework: str | None, *, coupled: bool = False) -> None:
    """Raise for what the job's engine does not have. One message for all of it.

    Args:
        framework: what the job's class says; None when its source does not tell.
        coupled: the job's loss is one of all embeddings (`embed`, `loss_of_embeddings`).

    Raises:
        ConfigError: a key that the engine cannot honour, with the nearest value that it can.
        JobError: the job is written for a framework that is not installed.
    """
    if framework is None:
        return
    if refusal := FRAMEWORKS.refusal(framework):
        raise JobError(f"{config.job['_target_']}: {refusal}")
    _refuse([*facts_of(framework).problems(config, coupled=coupled)])


def refuse_schedule(job: str, schedule: ScheduleConfig) -> None:
    """Raise `ConfigError` for a schedule of a job that has its own rates."""
    if keys := [f"schedule.{name}={value}" for name, value in non_default_values(schedule).items()]:
        raise ConfigError(
            f"{job}.learning_rate(update) gives the rate of each update, so {', '.join(keys)} "
            f"would have no effect; leave {'it' if len(keys) == 1 else 'them'} out"
        )


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise ConfigError("\n".join(wrong))


def _best_figure(train: TrainConfig) -> Iterator[str]:
    """Yield what is wrong with the figure by which the best checkpoint is chosen."""
    best, patience = train.keep_best, train.patience
    if best is None:
        if patience is not None:
            yield (
                f"train.patience={patience} needs the figure that has to improve: "
                "train.keep_best=held_out.accuracy for the largest, -held_out.loss for the smallest"
            )
        return
    name = best.removeprefix("-")
    if not name.startswith(HELD_OUT) or name == HELD_OUT:
        yield (
            f"train.keep_best={best} is no held-out figure, which are named {HELD_OUT}NAME; try "
            f"train.keep_best={'-' * best.startswith('-')}{HELD_OUT}{name.rpartition('.')[2]}"
        )
    elif best in SMALL_IS_GOOD:
        yield (
            f"train.keep_best={best} would keep the checkpoint with the largest loss; the smallest "
            f"is train.keep_best=-{best}"
        )


def _any_job(config: Config) -> Iterator[str]:
    ranks = node_range(config.cluster.nodes)[1] * config.cluster.ranks_per_node
    if ranks > MOST_RANKS:
        yield (
            f"cluster.nodes x cluster.ranks_per_node is {ranks} ranks; at most {MOST_RANKS} are "
            f"possible"
        )
    gpu_count(config.cluster.gpus_per_node)
    batch_stages(config.accumulation.batch_schedule)
    if config.train.samples is not None and config.train.updates is not None:
        yield (
            f"train.updates={config.train.updates} and train.samples={config.train.samples} are "
            f"two lengths of the run; leave one of them out, or set it to null"
        )
    if config.train.initial_weights is not None and config.train.initial_state is not None:
        yield (
            "train.initial_weights and train.initial_state both say where the weights begin; "
            "initial_state has the optimizer and the place in the data, too: leave one out"
        )
    yield from _best_figure(config.train)
    yield from filter(None, map(CALLBACKS.refusal, config.run.callbacks))
    max_concurrent_points(config.sweep.parallel)
    yield from search_problems(config.sweep)
    yield from accumulation_problems(config.accumulation)
    if not is_program(config.job):  # which has no use for any key of this section
        yield from _sentinel_problems(config, ranks)
    for name in (
        non_default_values(config.cluster, SLURM_ONLY) if config.cluster.kind != "slurm" else ()
    ):
        yield (
            f"cluster.{name} means nothing on a {config.cluster.kind} cluster; add +cluster=slurm, "
            f"or leave it out"
        )
    in_queue = config.cluster.allocation == "new"
    if config.run.max_restarts and config.cluster.requeue is False and in_queue:
        yield (
            "run.max_restarts needs cluster.requeue=true: on SLURM a run begins again by being "
            "handed back to the queue"
        )
    if config.run.survive:
        yield from _survive_refusals(config)
    if config.run.survive is False and non_default_values(config.run).get("max_replacements"):
        yield (
            f"run.max_replacements={config.run.max_replacements} needs ranks that go on meanwhile; "
            f"try run.survive=true, or {RESTARTS}"
        )
    if is_program(config.job):
        yield from program_problems(config)
    elif not isinstance(config.job.get("_target_"), str):
        yield "job._target_ must be the dotted name of a job class, as in my_jobs.line.Line"


SENTINEL = "sentinel"
"""The callback that `accumulation.sentinel_every` adds."""


def callback_names(config: Config) -> list[str]:
    """Return the names of a run's callbacks, those that other keys add included."""
    added = [SENTINEL] if config.accumulation.sentinel_every is not None else []
    return [*config.run.callbacks, *added]


def _sentinel_problems(config: Config, ranks: int) -> Iterator[str]:
    """Yield why leaves cannot be computed by another rank again."""
    accumulation = config.accumulation
    if SENTINEL in config.run.callbacks:
        yield "run.callbacks=sentinel is what accumulation.sentinel_every=200 adds; state that"
    if (every := accumulation.sentinel_every) is None:
        if accumulation.sentinel != AccumulationConfig.sentinel:
            yield (
                f"accumulation.sentinel={accumulation.sentinel} has no effect without "
                "accumulation.sentinel_every; add accumulation.sentinel_every=200"
            )
        return
    setting = f"accumulation.sentinel_every={every}"
    if missing := CALLBACKS.refusal(SENTINEL):
        yield f"{setting}: {missing}"
    if accumulation.reduction != "reproducible":
        yield (
            f"{setting} compares the bits of micro-steps, which depend on the rank with "
            f"accumulation.reduction={accumulation.reduction}; add "
            "accumulation.reduction=reproducible, or leave it out"
        )
    if ranks == 1:
        yield (
            f"{setting} needs another rank, which computes a micro-step again; try "
            "cluster.ranks_per_node=2 (with 3 ranks or more a lasting error is named, too)"
        )
    if accumulation.sentinel == "exclude" and not config.run.survive:
        yield (
            "accumulation.sentinel=exclude needs ranks that continue without the excluded one; add "
            "run.survive=true, or try accumulation.sentinel=stop"
        )


def accumulation_problems(accumulation: AccumulationConfig) -> Iterator[str]:
    """Yield what cannot be used of the split of a batch."""
    has_cap = accumulation.micro_batch is not None or accumulation.micro_tokens is not None
    if accumulation.reduction == "reproducible" and not has_cap:
        yield (
            "accumulation.reduction=reproducible needs accumulation.micro_batch: the size of a "
            "leaf, the unit of work; try accumulation.micro_batch=16 (or accumulation.micro_tokens "
            "where samples have lengths)"
        )
    if accumulation.micro_tokens is None:
        if accumulation.pad_to != 1:
            yield (
                f"accumulation.pad_to={accumulation.pad_to} means nothing without "
                "accumulation.micro_tokens, the most padded tokens of a micro-step; set it, or "
                "leave pad_to out"
            )
        return
    for name in ("steps", "micro_batch"):
        if (value := getattr(accumulation, name)) is not None:
            yield (
                f"accumulation.micro_tokens={accumulation.micro_tokens} takes the place of "
                f"accumulation.{name}={value}; leave one of them out"
            )


FSDP = ("engine.shard_model", ("node", "all"))
SHARDS = ("engine.shard_optimizer", (True,))


class TorchFacts(FrameworkFacts):
    """Facts about torch."""

    limits = (
        Limit("engine.mode", ("jit",), why="it is MindSpore's"),
        Limit("engine.jit_level", ("auto",), why="it is MindSpore's"),
        Limit("engine.style", ("own",), why="it is MindSpore's"),
        Limit("accumulation.reduction", ("fast",), FSDP, "FSDP has an order of its own"),
        Limit("engine.shard_optimizer", (False,), FSDP, "it shards the state already"),
        Limit("accumulation.reduction", ("fast",), SHARDS),
        Limit("accumulation.balance", ("even",), FSDP, "ranks of a copy compute in step"),
    )
    package, tested_version = "torch", "2.13.0"

    def problems(self, config: Config, *, coupled: bool) -> Iterator[str]:
        yield from super().problems(config, coupled=coupled)
        if config.transport == "mccl":
            yield "transport=mccl is not available with torch; try transport=gloo"
        if config.engine.shard_model != "none" and coupled:
            yield (
                f"engine.shard_model={config.engine.shard_model} is not available with embed() and "
                f"loss_of_embeddings(); try engine.shard_model=none"
            )
        if config.accumulation.sentinel_every is not None and coupled:
            yield (
                f"accumulation.sentinel_every={config.accumulation.sentinel_every} is not "
                "available with embed() and loss_of_embeddings(), where a micro-step's gradient "
                "depends on all others; leave it out"
            )
        module, _, name = str(config.optimizer.get("_target_", "")).rpartition(".")
        known = (*SHARDABLE, *WHOLE)
        by_class = config.engine.shard_by == "auto"
        if (
            config.engine.shard_optimizer
            and by_class
            and module == "torch.optim"
            and name not in known
        ):
            yield (
                f"engine.shard_optimizer=true does not know optimizer._target_={module}.{name}; "
                f"it knows {', '.join(known)}. If it steps each parameter by that parameter alone, "
                "state engine.shard_by=parameters"
            )
        if not (by_class or config.engine.shard_optimizer):
            yield (
                f"engine.shard_by={config.engine.shard_by} says how the optimizer is sharded; add "
                "engine.shard_optimizer=true, or leave it out"
            )

    def survival_problems(self, config: Config, *, talks: bool = False) -> Iterator[str]:
        on_gpus = config.transport == "auto" and gpu_count(config.cluster.gpus_per_node)
        transport, explicit = "nccl" if on_gpus else config.transport, bool(config.run.survive)
        yield from interrupt_refusals(transport, talks=talks, explicit=explicit)
        if config.engine.shard_model == "all":
            yield (
                f"{SURVIVE} engine.shard_model=all, where a lost rank takes its shards along; try "
                f"engine.shard_model=node, or {RESTARTS}"
            )
