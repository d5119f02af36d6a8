"""What a configuration must not be all at once, in one place: rules on values, nothing imported.

What one field may hold stands beside it (`bounds.py`); an optimizer's arguments have rules of their
own (`optimizer_rules.py`). The workers check again what only they can know (devices, the model).
Each function is of one thought and gives a sentence for all of it that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchestrator.config import pack_rules, search_rules, survive_rules
from orchestrator.config.bounds import beyond, plain, value_of
from orchestrator.config.optimizer_rules import problems
from orchestrator.config.schema import (
    BOUNDS,
    SLURM_ONLY,
    ClusterConfig,
    Config,
    EngineConfig,
    ScheduleConfig,
    gpu_count,
    node_range,
)
from orchestrator.config.user_code import program_section
from orchestrator.config.user_code.program_section import is_program
from orchestrator.errors import ConfigError, JobError
from orchestrator.extensions import FRAMEWORKS

MOST_RANKS = 2**20

SHARDABLE = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip
"""Optimizers of torch.optim whose state can be in pieces; an engine's own list, in words."""

TRANSPORTS = {
    "torch": ("auto", "gloo", "nccl", "hccl"),
    "mindspore": ("auto", "mccl", "nccl", "hccl"),
}


def check(config: Config) -> None:
    """Refuse what no plan and no cluster can use. Raises one `ConfigError` for all of it."""
    _refuse(beyond(plain(config), BOUNDS))  # before anything is computed from such numbers
    single = [bound.refusal(dotted, value_of(config, dotted)) for dotted, bound in BOUNDS.items()]
    _refuse([*filter(None, single), *_any_job(config), *problems(config.optimizer)])


def at_once(parallel: Any) -> int | None:
    """How many points `sweep.parallel` asks for at once; None: `auto`. Raises `ConfigError`."""
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
        JobError: the job is written for another framework than the one asked for.
    """
    if framework is None:
        return
    if config.engine.framework not in ("auto", framework):
        raise JobError(
            f"engine.framework={config.engine.framework}, but the job is written for {framework}: "
            f"{config.job['_target_']}; leave engine.framework out, or choose another job"
        )
    if refusal := FRAMEWORKS.refusal(framework):
        told = refusal.replace(FRAMEWORKS.key, "framework", 1)
        raise JobError(f"{config.job['_target_']}: {told}")
    engine = {"torch": _torch, "mindspore": _mindspore}.get(framework, lambda *_, **__: ())
    _refuse([*_transport(config, framework), *engine(config, coupled=coupled)])


def refuse_schedule(job: str, schedule: ScheduleConfig) -> None:
    """Raise `ConfigError` for a schedule beside a job's own rates: one would be a lie."""
    plain = ScheduleConfig()
    stated = [
        f"schedule.{name}={value}"
        for name, value in vars(schedule).items()
        if value != getattr(plain, name)
    ]
    if stated:
        raise ConfigError(
            f"{job}.learning_rate(update) gives the rate of each update, so {', '.join(stated)} "
            f"would have no effect; leave {'it' if len(stated) == 1 else 'them'} out"
        )


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise ConfigError("\n".join(wrong))


def _any_job(config: Config) -> Iterator[str]:
    yield from _ranks(config)
    gpu_count(config.cluster.gpus_per_node)
    at_once(config.sweep.parallel)
    yield from search_rules.anywhere(config.sweep)
    yield from pack_rules.anywhere(config)
    yield from _reproducible(config)
    yield from _only_on_slurm(config)
    in_queue = config.cluster.allocation == "new"
    if config.run.max_restarts and config.cluster.requeue is False and in_queue:
        yield (
            "run.max_restarts needs cluster.requeue=true: on SLURM a run begins again by being "
            "handed back to the queue"
        )
    yield from survive_rules.anywhere(config)
    yield from survive_rules.replacements(config)
    if is_program(config.job):
        yield from program_section.problems(config, Config())
    elif not isinstance(config.job.get("_target_"), str):
        yield "job._target_ must be the dotted name of a job class, as in jobs.digits.Digits"


def _ranks(config: Config) -> Iterator[str]:
    ranks = node_range(config.cluster.nodes)[1] * config.cluster.ranks_per_node
    if ranks > MOST_RANKS:
        yield (
            f"cluster.nodes x cluster.ranks_per_node is {ranks} ranks; at most {MOST_RANKS} are "
            f"possible"
        )


def _reproducible(config: Config) -> Iterator[str]:
    if config.accumulation.reduction != "reproducible":
        return
    if config.accumulation.micro_batch is None:
        yield (
            "accumulation.reduction=reproducible needs accumulation.micro_batch: the size of a "
            "leaf, the atom of work; try accumulation.micro_batch=16"
        )


def _only_on_slurm(config: Config) -> Iterator[str]:
    kind, plain = config.cluster.kind, ClusterConfig()
    for name in SLURM_ONLY if kind != "slurm" else ():
        if getattr(config.cluster, name) != getattr(plain, name):
            yield (
                f"cluster.{name} means nothing on a {kind} cluster; add +cluster=slurm, or leave "
                f"it out"
            )


def _transport(config: Config, framework: str) -> Iterator[str]:
    known = TRANSPORTS.get(framework, (config.transport,))
    others = framework == "torch" and config.transport not in TRANSPORTS["mindspore"]
    if config.transport not in known and not others:
        yield (
            f"transport={config.transport} is not one of {framework}'s, which are "
            f"{', '.join(known)}; try transport=auto"
        )


def _torch(config: Config, *, coupled: bool) -> Iterator[str]:
    del coupled  # torch has them
    if config.engine.wire != "own":
        yield from _narrow_wire(config)
    if config.engine.shard_optimizer:
        yield from _shards(config)
    yield from survive_rules.with_torch(config)
    plain = EngineConfig()
    for key in ("mode", "jit_level", "style"):
        if getattr(config.engine, key) != getattr(plain, key):
            yield f"engine.{key} is MindSpore's, and this job is written for torch; leave it out"


def _narrow_wire(config: Config) -> Iterator[str]:
    wire, own = f"engine.wire={config.engine.wire}", "or engine.wire=own"
    if config.accumulation.reduction != "fast":
        yield (
            f"{wire} rounds sums in an order that depends on the ranks; try "
            f"accumulation.reduction=fast, {own}"
        )


def _shards(config: Config) -> Iterator[str]:
    sharded = "engine.shard_optimizer=true is not available with"
    module, _, name = str(config.optimizer.get("_target_", "")).rpartition(".")
    if module == "torch.optim" and name not in SHARDABLE:
        yield (
            f"{sharded} optimizer._target_={module}.{name}, which does not "
            f"treat each number by itself, from nothing; there are {', '.join(SHARDABLE)}"
        )
    for key, only in (("accumulation.reduction", "fast"), ("engine.wire", "own")):
        if (value := value_of(config, key)) != only:
            yield f"{sharded} {key}={value}; try {key}={only}"


def _mindspore(config: Config, *, coupled: bool) -> Iterator[str]:
    yield from survive_rules.with_mindspore(config)
    if config.train.precision == "bfloat16" and config.transport not in ("hccl", "nccl"):
        yield (
            "train.precision=bfloat16 cannot be computed by MindSpore on a CPU; try "
            "train.precision=float16, or say which devices there are: transport=hccl or nccl"
        )
    if config.accumulation.reduction != "fast":
        yield (
            f"accumulation.reduction={config.accumulation.reduction} is not available with "
            f"MindSpore; try accumulation.reduction=fast"
        )
    if config.engine.wire != "own":
        wire = config.engine.wire
        yield f"engine.wire={wire} is not available with MindSpore; try engine.wire=own"
    if config.engine.shard_optimizer:
        yield (
            "engine.shard_optimizer=true is not available with MindSpore; leave it out, or write "
            "the job for torch"
        )
    if config.engine.jit_level != "auto" and config.engine.mode == "pynative":
        yield (
            f"engine.jit_level={config.engine.jit_level} means nothing with "
            f"engine.mode=pynative; try engine.mode=jit"
        )
    if coupled:
        yield (
            "embed() and loss_of_embeddings() are not available with MindSpore; write the job "
            "for torch"
        )
    if config.engine.style == "framework":
        yield from _framework_style(config)


def _framework_style(config: Config) -> Iterator[str]:
    ranks = node_range(config.cluster.nodes)[1] * config.cluster.ranks_per_node
    style, own = "engine.style=framework", "or engine.style=own"
    if ranks > 1:
        yield (
            f"{style} cannot use {ranks} ranks: MindSpore's AutoParallel needs Ascend or GPU for "
            f"more than one process; try cluster.nodes=1 cluster.ranks_per_node=1, {own}"
        )
    if config.engine.mode == "pynative":
        yield f"{style} needs a graph; try engine.mode=graph, {own}"
    if config.train.clip_norm is not None:
        yield (f"{style} cannot clip the accumulated gradient; leave train.clip_norm out, {own}")
    if config.accumulation.ragged != "drop":
        yield f"{style} needs windows of equal size; try accumulation.ragged=drop, {own}"
    if config.train.precision != "float32":
        yield f"{style} computes in float32; try train.precision=float32, {own}"
    if config.train.on_non_finite != "stop":
        yield f"{style} cannot skip an update; try train.on_non_finite=stop, {own}"
