"""Many runs as few submissions: those that ask for the same become the elements of one array.

An element does what a job of its own would have done: the array's script only goes to the run's own
batch script. So whatever holds for a job (stop, requeue, restart, its end) holds for an element,
whose id is `123_4`. Runs are elements where they lie side by side, each in a folder that is called
by its number, which is the element's index, too; other runs are jobs of their own.

The code is copied once an array, beside the runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.clusters.slurm.queue.elements import ARRAYS
from orchestrator.clusters.slurm.queue.in_turn import (
    SPARE,
    alone_at,
    next_name,
    queue_next,
    refusal,
    room_for,
    tightest,
    turns,
    wait_turn,
)
from orchestrator.clusters.slurm.queue.laid_out import Placed, alike, lay_out, number_of
from orchestrator.clusters.slurm.queue.packing.submit import submit_packed
from orchestrator.clusters.slurm.queue.scripts import script_name
from orchestrator.clusters.slurm.request.batch_script import option_line
from orchestrator.clusters.slurm.request.safe_values import quoted
from orchestrator.errors import ClusterError, spans
from orchestrator.rundir.files import write_atomically
from orchestrator.rundir.folder import RunDir
from orchestrator.scheduler.client import SlurmClient

LIMITED_BY = ("account", "qos", "partition", "reservation")  # which limits hold for a job
MAX_ARRAY_SIZE = re.compile(r"^MaxArraySize\s*=\s*(\d+)", re.MULTILINE)
MAX_ARRAY_TASKS = re.compile(r"^SchedulerParameters\s*=.*\bmax_array_tasks=(\d+)", re.MULTILINE)


def submit_as_arrays(placed: Sequence[Placed], at_once: int | None) -> None:
    """Submit all of them, each with its handle.json then; or with a turn.json, where the site lets
    nobody have so many in the queue (`in_turn.py`).

    Raises:
        ClusterError: the scheduler refuses one of the submissions, or is gone. Those before it are
            queued, and nothing is left of the others but their folders.
    """
    placed = submit_packed(placed)
    if not placed:
        return
    if len(placed) == 1:
        placed[0][0].submit(placed[0][1])
        return
    confs = {cluster.config.cluster.slurm_conf for cluster, _ in placed}
    most = {conf: largest_array(conf) for conf in confs}
    full = _beyond_limits(placed, most)
    for sweep, members in _by_sweep(placed):
        arrays: list[Array] = []
        for group in alike(members):
            may = most[group[0][0].config.cluster.slurm_conf]
            for part in _parts(group, may):
                if number_of(part[0]) is None or (len(part) == 1 and sweep not in full):
                    part[0][0].submit(part[0][1])
                else:
                    arrays.append(_prepared(part, at_once, may))
        if arrays:
            _queue(sweep, arrays, at_once, in_turn=sweep in full)


def _by_sweep(placed: Sequence[Placed]) -> Iterator[tuple[Path, list[Placed]]]:
    sweeps: dict[Path, list[Placed]] = {}
    for member in placed:
        sweeps.setdefault(member[1].run.parent, []).append(member)
    yield from sweeps.items()


def _beyond_limits(
    placed: Sequence[Placed], most_of: Mapping[str | None, tuple[int, int]]
) -> set[Path]:
    """The sweeps for which the queue has no room at once. Raises `ClusterError` when there is not
    even enough for one after another.
    """
    found: set[Path] = set()
    alike: dict[object, list[Placed]] = {}
    for cluster, request in placed:
        options = request.details["options"]
        key = (cluster.config.cluster.slurm_conf, *(options.get(name) for name in LIMITED_BY))
        alike.setdefault(key, []).append((cluster, request))
    for members in alike.values():
        cluster, request = members[0]
        conf = cluster.config.cluster.slurm_conf
        client, most = SlurmClient(conf), min(len(members), *most_of[conf])
        if most > 1 and room_for(client, request.text, most) < most:
            if (why := refusal(client, request.text, len(members))) is not None:
                raise ClusterError(why)
            found |= {request.run.parent for _, request in members}
    return found


def _queue(sweep: Path, arrays: Sequence[Array], at_once: int | None, *, in_turn: bool) -> None:
    """Queue the arrays of one sweep; from the first for which there is no room, in turn."""
    from orchestrator.clusters.slurm.queue.sbatch import BeyondLimit, queue

    with alone_at(sweep):
        left = list(arrays)
        while left and not in_turn:
            one, conf = left[0], left[0].conf
            try:
                queue(RunDir(sweep), one.script, one.attempt, conf, one.elements, tell=one.tell)
            except BeyondLimit:
                if one is arrays[0]:  # nothing of this sweep is queued that could go on
                    raise
                in_turn = True
            else:
                del left[0]
        if left:
            _queue_in_turn(sweep, left, at_once)


def _queue_in_turn(sweep: Path, arrays: Sequence[Array], at_once: int | None) -> None:
    """Queue as much of them as there is room for, and say what becomes of the others."""
    limit = tightest(SlurmClient(arrays[0].conf))
    for one in arrays:
        note = {"attempt": one.attempt, "slurm_conf": one.conf, "at_once": at_once, "limit": limit}
        wait_turn([RunDir(sweep / name) for name in one.elements], one.script, one.elements, note)
    done = queue_next(sweep, spare=SPARE)
    total = sum(len(one.elements) for one in arrays)
    arrays[0].tell(turns(limit, done, total))


def largest_array(conf: str | None) -> tuple[int, int]:
    """How many indices an array may have (MaxArraySize is one more than the highest), and how many
    elements.
    """
    shown = SlurmClient(conf).must("scontrol", "show", "config")
    indices, tasks = MAX_ARRAY_SIZE.search(shown), MAX_ARRAY_TASKS.search(shown)
    most = int(indices[1]) if indices else 1001
    return most, min(most, int(tasks[1])) if tasks else most


def _parts(group: list[Placed], most: tuple[int, int]) -> Iterator[list[Placed]]:
    """Cut where a number would be no index any more, 0 to 1000, 1001 to 2001, and where elements
    would be too many. Each alone where the site has no arrays.
    """
    indices, tasks = most
    if indices < 1:
        yield from ([member] for member in group)
        return
    parts: dict[int, list[Placed]] = {}
    for member in group:
        parts.setdefault((number_of(member) or 0) // indices, []).append(member)
    for part in parts.values():
        yield from (part[n : n + tasks] for n in range(0, len(part), tasks))


@dataclass(frozen=True, kw_only=True, slots=True)
class Array:
    """One that sbatch is to be given: its script, and each run's index by its folder's name."""

    script: Path
    elements: dict[str, str]
    attempt: int
    conf: str | None
    tell: Callable[[str], None]


def _prepared(part: Sequence[Placed], at_once: int | None, most: tuple[int, int]) -> Array:
    """One array, of runs that are alike: all that it is made of is written."""
    cluster, request = part[0]
    sweep, attempt = request.run.parent, request.attempt
    lay_out(
        sweep, part, lambda member, asked, copy: member.request(asked.run, asked.attempt, copy).text
    )
    largest, _ = most
    script = next_name(sweep / ARRAYS).with_suffix(".sh")
    write_atomically(script, array_script(part, at_once, largest))
    return Array(
        script=script,
        elements={a.run.name: str(int(a.run.name) % largest) for _, a in part},
        attempt=attempt,
        conf=cluster.config.cluster.slurm_conf,
        tell=cluster.tell,
    )


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
        *(option_line(name, value) for name, value in stated.items()),
        "",
        *([f"number=$((SLURM_ARRAY_TASK_ID + {offset}))"] if offset else []),
        # A run's own script sets the umask; a program of the user's has the one that it finds here.
        *([f"(umask 077; : >>{run}/logs/batch.log)"] if offset else []),
        *([f"exec >>{run}/logs/batch.log 2>&1"] if offset else []),
        f"exec bash {run}/submitit/{script_name(request.attempt)}.sh",
        "",
    ])  # fmt: skip
