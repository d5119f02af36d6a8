"""Whether ranks go on without those that are lost: what that cannot be had with is refused where it
was asked for, and told where nobody has said (docs/explanation/surviving.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from orchestrator.config.pack_rules import packing
from orchestrator.config.schema import Config, gpu_count, node_range
from orchestrator.config.user_code.job_source import TargetFacts, check_target
from orchestrator.config.user_code.program_section import is_program

SURVIVE = "run.survive=true is not available with"
RESTARTS = "run.max_restarts=3"
ON = (
    "a rank or a node that is lost does not end the run: the others redo its update and go on "
    "(run.survive)"
)
OFF = "a rank that is lost ends the run: "
FROM_CHECKPOINT = (
    "; a shard of the optimizer that is lost comes from the newest checkpoint, and the updates "
    "since are redone"
)
UNKNOWN = "the job's source does not say which framework it is for; run.survive=true insists"


@dataclass(frozen=True, slots=True)
class Survival:
    """Whether the others go on, and what a person is told of it; "" where there is nothing to."""

    on: bool
    words: str = ""


def planned(config: Config) -> Survival:
    """What was asked for; where nothing was, on wherever it can be had on more than one node.

    The job's source is read for that. Raises `JobError` as `check_target` does.
    """
    asked = config.run.survive
    if asked is not None:
        return Survival(asked, _on(config) if asked else "")
    if is_program(config.job) or node_range(config.cluster.nodes)[1] == 1:
        return Survival(False)
    against = next(_against(config), None)
    return Survival(True, _on(config)) if against is None else Survival(False, OFF + against)


def _on(config: Config) -> str:
    return ON + FROM_CHECKPOINT * config.engine.shard_optimizer


def with_survival(config: Config, *, on: bool) -> Config:
    """The same, where whoever reads it needs not ask again."""
    return replace(config, run=replace(config.run, survive=on))


def _against(config: Config) -> Iterator[str]:
    """Why it is off where nobody has said, the first reason first."""
    if packing(config.sweep.pack) is not None:
        yield (
            f"{SURVIVE} sweep.pack: a node that is lost takes all points of its allocation back to "
            "the queue"
        )
    yield from _anywhere(config)
    yield from _with(config, check_target(config.job))


def _with(config: Config, facts: TargetFacts) -> Iterator[str]:
    if facts.framework == "torch":
        yield from _torch(config)
        if facts.talks_in_window:
            yield f"{SURVIVE} talks_in_window: nobody could break those collectives off"
    elif facts.framework == "mindspore":
        yield from _mindspore()
    elif facts.framework is None:
        yield UNKNOWN
    else:
        yield f"{SURVIVE} {facts.framework}; try {RESTARTS}"


def anywhere(config: Config) -> Iterator[str]:
    """What was asked for and cannot be had, whatever the job is written for."""
    if config.run.survive:
        yield from _anywhere(config)


def with_torch(config: Config) -> Iterator[str]:
    """The same of a job for torch."""
    return _torch(config) if config.run.survive else iter(())


def with_mindspore(config: Config) -> Iterator[str]:
    """The same of a job for MindSpore."""
    return _mindspore() if config.run.survive else iter(())


def _anywhere(config: Config) -> Iterator[str]:
    if is_program(config.job):
        yield (
            "run.survive=true means nothing to a program, whose updates nobody else can redo; try "
            f"{RESTARTS}"
        )
    elif node_range(config.cluster.nodes)[1] * config.cluster.ranks_per_node == 1:
        yield (
            "run.survive=true needs a second rank, which goes on without the first; try "
            f"cluster.ranks_per_node=2, or {RESTARTS}"
        )
    if config.cluster.kind not in ("local", "slurm"):
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
    asked = config.cluster.gpus_per_node
    if config.transport == "auto" and gpu_count(asked):
        yield (
            f"{SURVIVE} cluster.gpus_per_node={asked}, whose transport (NCCL, HCCL) has "
            "collectives that cannot be left when a peer is gone; try transport=gloo, which "
            f"computes on CPUs, or {RESTARTS} in its place"
        )


def _torch(config: Config) -> Iterator[str]:
    if config.transport not in ("auto", "gloo"):
        yield (
            f"{SURVIVE} transport={config.transport}, whose collectives cannot be left when a peer "
            f"is gone; try transport=gloo, or {RESTARTS} in its place"
        )


def _mindspore() -> Iterator[str]:
    yield (
        f"{SURVIVE} MindSpore, whose ranks end when a peer is gone; try {RESTARTS}, which begins "
        "again from the newest checkpoint"
    )


def replacements(config: Config) -> Iterator[str]:
    """What `run.max_replacements` cannot be had with."""
    if not config.run.max_replacements:
        return
    told = f"run.max_replacements={config.run.max_replacements}"
    if config.cluster.kind != "local":
        yield (
            f"{told} is for pretended nodes: on a {config.cluster.kind} cluster ranks that are "
            f"lost are not started again while the others go on; leave it out, or try {RESTARTS}"
        )
    elif config.run.survive is False:
        yield f"{told} needs ranks that go on meanwhile; try run.survive=true, or {RESTARTS}"
