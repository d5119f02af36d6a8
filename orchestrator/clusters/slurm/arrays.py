"""Many runs as few submissions: those that ask for the same become the elements of one array.

An element does what a job of its own would have done: the array's script only goes to the run's own
batch script. So whatever holds for a job (stop, requeue, restart, its end) holds for an element,
whose id is `123_4`. Runs are elements where they lie side by side, each in a folder that is called
by its number, which is the element's index, too; other runs are jobs of their own.

The code is copied once an array, beside the runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from orchestrator.clusters.api import Handle, Request
from orchestrator.clusters.slurm.elements import ARRAYS, NUMBER
from orchestrator.clusters.slurm.safe_values import quoted
from orchestrator.clusters.slurm.scripts import UNLIKE, script_name
from orchestrator.clusters.slurm.task import write_task
from orchestrator.config.program_section import target_of
from orchestrator.config.schema import Config
from orchestrator.errors import spans
from orchestrator.run_folder.files import make_folder, names_in
from orchestrator.run_folder.rundir import RunDir, code_state_beside, write_atomically
from orchestrator.scheduler.client import SlurmClient

CODE = "code"  # a folder beside the runs
MAX_ARRAY_SIZE = re.compile(r"^MaxArraySize\s*=\s*(\d+)", re.MULTILINE)


class Member(Protocol):
    """What is asked of a `SlurmCluster` here."""

    config: Config
    tell: Callable[[str], None]

    def request(self, run: Path, attempt: int, copy: Path | None = None) -> Request: ...
    def submit(self, request: Request) -> Handle: ...
    def copy_code(self, run: Path, into: Path) -> None: ...
    def write_epilog(self, run: RunDir) -> None: ...


Placed = tuple[Member, Request]


def submit_as_arrays(placed: Sequence[Placed], at_once: int | None) -> None:
    """Submit all of them, each with its handle.json then.

    Raises:
        ClusterError: the scheduler refuses one of the submissions, or is gone. Those before it are
            queued, and nothing is left of the others but their folders.
    """
    for group in _alike(placed):
        conf = group[0][0].config.cluster.slurm_conf
        for part in _parts(group, _largest(conf) if len(group) > 1 else 1):
            if len(part) == 1:
                cluster, request = part[0]
                cluster.submit(request)
            else:
                _submit(part, at_once)


def _alike(placed: Sequence[Placed]) -> list[list[Placed]]:
    """Those that one array can hold, in order."""
    groups: dict[object, list[Placed]] = {}
    for number, (cluster, request) in enumerate(placed):
        options = request.details["options"]
        numbered = NUMBER.fullmatch(request.run.name)
        key: object = (
            cluster.config.cluster.slurm_conf,
            request.run.parent,
            request.attempt,
            tuple((k, v) for k, v in options.items() if k not in UNLIKE),
        )
        groups.setdefault(key if numbered else number, []).append((cluster, request))
    return list(groups.values())


def _largest(conf: str | None) -> int:
    """How many indices an array may have: MaxArraySize is one more than the highest."""
    found = MAX_ARRAY_SIZE.search(SlurmClient(conf).must("scontrol", "show", "config"))
    return int(found[1]) if found else 1001


def _parts(group: list[Placed], most: int) -> Iterator[list[Placed]]:
    """Cut where a number would be no index any more: 0 to 1000, 1001 to 2001."""
    parts: dict[int, list[Placed]] = {}
    for member in group:
        parts.setdefault(_number(member) // most if most > 1 else 0, []).append(member)
    yield from parts.values()


def _number(member: Placed) -> int:
    return int(member[1].run.name) if NUMBER.fullmatch(member[1].run.name) else 0


def _submit(part: Sequence[Placed], at_once: int | None) -> None:
    """One array, of runs that are alike."""
    from orchestrator.clusters.slurm.queueing import queue

    cluster, request = part[0]
    sweep, attempt = request.run.parent, request.attempt
    copies: dict[object, Path] = {}
    for member, _ in part:
        target = target_of(member.config.job)
        key = target if isinstance(target, str) else target.command
        if member.config.run.snapshot and key not in copies:
            copies[key] = _next(sweep / CODE)
            member.copy_code(sweep, copies[key])
    for member, asked in part:
        run, target = RunDir(asked.run), target_of(member.config.job)
        copy = copies.get(target if isinstance(target, str) else target.command)
        member.write_epilog(run)
        write_task(run)
        text = member.request(asked.run, attempt, copy).text
        write_atomically(run.submitit / f"{script_name(attempt)}.sh", text)
        if copy is not None:  # which code it is, for whoever reads this run alone
            run.code.mkdir(mode=0o700, exist_ok=True)
            state = code_state_beside(run.snapshot(attempt))
            state.unlink(missing_ok=True)
            os.link(code_state_beside(copy), state)
    largest = _largest(cluster.config.cluster.slurm_conf)
    script = _next(sweep / ARRAYS).with_suffix(".sh")
    write_atomically(script, array_script(part, at_once, largest))
    elements = {a.run.name: str(int(a.run.name) % largest) for _, a in part}
    conf = cluster.config.cluster.slurm_conf
    queue(RunDir(sweep), script, attempt, conf, elements, tell=cluster.tell)


def _next(folder: Path) -> Path:
    """A name in a folder of numbered things that is not taken."""
    if not folder.is_dir():
        make_folder(folder)
    taken = [int(stem) for name in names_in(folder) if (stem := name.split(".")[0]).isdigit()]
    return folder / f"{max(taken, default=-1) + 1:03d}"


def array_script(part: Sequence[Placed], at_once: int | None, largest: int) -> str:
    """The text that sbatch gets for an array: what its elements ask for, and where each goes on.

    Args:
        largest: MaxArraySize. Runs of higher numbers count from there, and name their log
            themselves.
    """
    _, request = part[0]
    sweep, stated = request.run.parent, dict(request.details["options"])
    numbers = [int(asked.run.name) for _, asked in part]
    offset = min(numbers) // largest * largest
    names = {str(asked.details["options"]["job-name"]) for _, asked in part}
    stated["job-name"] = names.pop() if len(names) == 1 else sweep.name
    stated["output"] = f"{sweep}/%a/logs/batch.log" if not offset else "/dev/null"
    limit = f"%{at_once}" if at_once else ""
    stated["array"] = ",".join(spans(number - offset for number in numbers)) + limit
    run = quoted(sweep) + ("/$SLURM_ARRAY_TASK_ID" if not offset else "/$number")
    return "\n".join([
        "#!/bin/bash",
        *(
            f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={quoted(str(value))}"
            for name, value in stated.items()
        ),
        "",
        "umask 077",
        *([f"number=$((SLURM_ARRAY_TASK_ID + {offset}))"] if offset else []),
        *([f"exec >>{run}/logs/batch.log 2>&1"] if offset else []),
        f"exec bash {run}/submitit/{script_name(request.attempt)}.sh",
        "",
    ])  # fmt: skip
