"""What `run.survive=true` cannot be had with, and what can be done instead (docs/surviving.md)."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.config.program_section import is_program
from orchestrator.config.schema import Config

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
    if config.cluster.kind != "local":
        yield (
            f"run.survive=true is not available on a {config.cluster.kind} cluster yet; try "
            f"{RESTARTS}"
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
