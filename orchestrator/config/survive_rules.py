"""What `run.survive=true` cannot be had with, and what can be done instead (docs/surviving.md)."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.config.schema import Config, gpu_count, node_range
from orchestrator.config.user_code.program_section import is_program

SURVIVE = "run.survive=true is not available with"
RESTARTS = "run.max_restarts=3"


def anywhere(config: Config) -> Iterator[str]:
    """Whatever the job is written for."""
    if not config.run.survive:
        return
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


def with_torch(config: Config) -> Iterator[str]:
    if not config.run.survive:
        return
    if config.transport not in ("auto", "gloo"):
        yield (
            f"{SURVIVE} transport={config.transport}, whose collectives cannot be left when a peer "
            f"is gone; try transport=gloo, or {RESTARTS} in its place"
        )
    if config.engine.norm == "exact":
        yield f"{SURVIVE} engine.norm=exact; try engine.norm=group or frozen"


def with_mindspore(config: Config) -> Iterator[str]:
    if config.run.survive:
        yield (
            f"{SURVIVE} MindSpore, whose ranks end when a peer is gone; try {RESTARTS}, which "
            "begins again from the newest checkpoint"
        )
