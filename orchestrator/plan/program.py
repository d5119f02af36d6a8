"""The plan of a program: only where its ranks run."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from orchestrator.config.job_source import (
    calls_current_run,
    copied_script,
    is_this_python,
)
from orchestrator.config.program import program_of
from orchestrator.config.schema import Config, node_range
from orchestrator.plan.plan_warnings import idle_gpus

NOT_KNOWN = (
    "a program's batch, losses and weights are its own: nothing here splits its data, makes its "
    "update exact or counts what its ranks send, and after a restart it goes on from what it saves "
    "and loads itself (docs/how-to/programs.md)"
)
OF_WINDOWS = (
    "its loop over run.windows() splits its data, makes its updates exact and loads its newest "
    "checkpoint after a restart; its batch and weights are known once it runs "
    "(docs/how-to/library.md)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramPlan:
    """Content of plan.json for a program.

    Attributes:
        argv: its command line, as typed and with the arguments of the configuration.
    """

    nodes: int
    ranks_per_node: int
    argv: tuple[str, ...]
    style: str
    stop_signal: str
    warnings: tuple[str, ...] = ()
    updates: None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def to_json(self) -> dict[str, Any]:
        return {
            "program": {
                "argv": list(self.argv),
                "style": self.style,
                "stop_signal": self.stop_signal,
            },
            "ranks": self.ranks,
            "nodes": self.nodes,
            "ranks_per_node": self.ranks_per_node,
            "updates": None,
            "warnings": list(self.warnings),
        }


def plan_of_program(config: Config) -> ProgramPlan:
    """Return the plan of a configuration whose job is a program."""
    program, cluster = program_of(config.job), config.cluster
    start = ("-m", program.target) if program.is_module else (program.target,)
    return ProgramPlan(
        nodes=node_range(config.cluster.nodes)[1],
        ranks_per_node=config.cluster.ranks_per_node,
        argv=(*start, *program.argv),
        style=program.style,
        stop_signal=program.stop_signal,
        warnings=(
            *_like_ours(program.command),
            # On nodes a container or a preamble decides which Python that is.
            *(() if cluster.container or cluster.preamble else _other_python(program.target)),
            *idle_gpus(config),
        ),
    )


def _like_ours(command: tuple[str, ...]) -> Iterator[str]:
    """Return notes on our keys among a program's arguments, which go to the program anyway.

    >>> [*_like_ours(("train.py", "lr=1", "+cluster=slurm", "model.cluster.nodes=3"))]
    ['+cluster=slurm comes after --, so it is an argument of train.py; ours come before --']
    """
    sections = {section.name for section in fields(Config)}
    for argument in command[1:]:
        key, value, _ = argument.lstrip("+~").partition("=")
        section, _, name = key.partition(".")
        if value and section in sections and (name or section == "cluster"):
            yield (
                f"{argument} comes after --, so it is an argument of {command[0]}; ours come "
                f"before --"
            )


def _other_python(target: str) -> Iterator[str]:
    """Yield a note if the program is a Python of PATH that is not the launcher's."""
    path = shutil.which(target) if re.fullmatch(r"python[\d.]*", target) else None
    if path is not None and not is_this_python(target):
        yield (
            f"{target} is {path}, not the launcher's {sys.executable}: it may lack packages that "
            "this one has (ModuleNotFoundError); to run the program with the launcher's, leave it "
            "out: -- train.py, or -- -m package.train"
        )


def notes_of_program(config: Config) -> list[str]:
    """Return notes to print with its plan."""
    program = program_of(config.job)
    notes = [OF_WINDOWS if calls_current_run(program, ("windows",)) else NOT_KNOWN]
    apart = not program.is_module and copied_script(program) is None
    if config.cluster.kind != "local" and config.run.snapshot and apart:
        notes.append(
            f"{program.target} is not copied with the run, since it is no script of yours: what it "
            f"reads may be edited while the job waits"
        )
    return notes
