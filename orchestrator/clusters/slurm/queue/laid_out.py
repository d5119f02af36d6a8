"""What is written before many runs are submitted together: the code that they share, once, and into
each run's folder what its own batch script starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from orchestrator.clusters.api import Handle, Request
from orchestrator.clusters.slurm.queue.elements import NUMBER, next_name
from orchestrator.clusters.slurm.queue.scripts import UNLIKE, script_name
from orchestrator.clusters.slurm.task import write_task
from orchestrator.config.program import target_of
from orchestrator.config.schema import Config
from orchestrator.rundir.files import read_json, write_atomically, write_json, written_together
from orchestrator.rundir.folder import RunDir, code_state_beside

CODE = "code"  # a folder beside the runs


class Member(Protocol):
    """What is asked of a `SlurmCluster` here."""

    config: Config
    tell: Callable[[str], None]

    def request(self, run: Path, attempt: int, copy: Path | None = None) -> Request: ...
    def share_script(self, run: Path, attempt: int, copy: Path | None = None) -> str: ...
    def submit(self, request: Request) -> Handle: ...
    def copy_code(self, run: Path, into: Path) -> None: ...
    def write_epilog(self, run: RunDir) -> None: ...


Placed = tuple[Member, Request]
Script = Callable[[Member, Request, Path | None], str]
"""A run's own batch script. The path: of the code that it shares with others, if it is a copy."""


def number_of(member: Placed) -> int | None:
    """Its folder's, where that is called by one."""
    return int(member[1].run.name) if NUMBER.fullmatch(member[1].run.name) else None


def alike(placed: Sequence[Placed]) -> list[list[Placed]]:
    """Those that ask for the same and lie side by side, in order; each other run by itself."""
    groups: dict[object, list[Placed]] = {}
    for number, (cluster, request) in enumerate(placed):
        options = request.details["options"]
        key: object = (
            cluster.config.cluster.slurm_conf,
            request.run.parent,
            request.attempt,
            tuple((k, v) for k, v in options.items() if k not in UNLIKE),
        )
        numbered = number_of((cluster, request)) is not None
        groups.setdefault(key if numbered else number, []).append((cluster, request))
    return list(groups.values())


def lay_out(sweep: Path, part: Sequence[Placed], script: Script) -> Path | None:
    """Write all that runs of one sweep are started from, but what starts them.

    Returns:
        The copy of the code that the first of them starts from; None where there is none.
    """
    copies: dict[object, Path] = {}
    states: dict[tuple[Path, str], Path] = {}
    for member, _ in part:
        if member.config.run.snapshot and _source(member) not in copies:
            copies[_source(member)] = next_name(sweep / CODE)
            member.copy_code(sweep, copies[_source(member)])
    with written_together([sweep]):
        for member, asked in part:
            copy = copies.get(_source(member))
            _lay_out(member, asked, script(member, asked, copy))
            if copy is not None:
                _say_which(copy, RunDir(asked.run), asked.attempt, states)
    return copies.get(_source(part[0][0]))


def _source(member: Member) -> object:
    """What tells one copy of code from another."""
    target = target_of(member.config.job)
    return target if isinstance(target, str) else target.command


def _lay_out(member: Member, asked: Request, text: str) -> None:
    """Into the run's folder: what its script starts."""
    run = RunDir(asked.run)
    member.write_epilog(run)
    write_task(run)
    write_atomically(run.submitit / f"{script_name(asked.attempt)}.sh", text)


def _say_which(copy: Path, run: RunDir, attempt: int, states: dict[tuple[Path, str], Path]) -> None:
    """Into the run's folder: which code it is, for whoever reads this run alone. Its differences
    from git may be large, so runs share the file; not the copy's own, whose seal is of its name.

    Args:
        states: what was written so far, by the copy and the file's name.
    """
    run.code.mkdir(mode=0o700, exist_ok=True)
    state = code_state_beside(run.snapshot(attempt))
    first = states.setdefault((copy, state.name), state)
    if first is state:
        write_json(state, read_json(code_state_beside(copy)) or {})
    else:
        state.unlink(missing_ok=True)
        os.link(first, state)
