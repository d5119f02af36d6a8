"""Job arrays: runs that request the same become the elements of one array.

The array's script only executes the run's own batch script. So stop, requeue, restart and end work
for an element, whose id is `123_4`, as for a job. Runs are elements if they are in one sweep's
folder and their folders are named by numbers, which are the elements' indices; other runs are jobs
of their own. The code is copied once per array.
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.clusters.slurm.batch_script import option_line, script_name
from orchestrator.clusters.slurm.safe_values import quoted
from orchestrator.clusters.slurm.submission import (
    ARRAYS,
    BeyondLimit,
    Placed,
    group_equal,
    lay_out,
    next_name,
    number_of,
    queue,
)
from orchestrator.errors import spans
from orchestrator.rundir.files import write_atomically
from orchestrator.rundir.folder import RunDir
from orchestrator.slurm_client import SlurmClient
from orchestrator.units import plural

LIMITED_BY = ("account", "qos", "partition", "reservation")  # which limits hold for a job
# Values of `scontrol show assoc_mgr`: MaxSubmitJobs=20(3), of which 3 are used; N for no limit.
FIGURES = re.compile(r"(\w*SubmitJobs\w*)=(\d+)\((\d+)\)")
MAX_ARRAY_SIZE = re.compile(r"^MaxArraySize\s*=\s*(\d+)", re.MULTILINE)
MAX_ARRAY_TASKS = re.compile(r"^SchedulerParameters\s*=.*\bmax_array_tasks=(\d+)", re.MULTILINE)


def submit_as_arrays(placed: Sequence[Placed], at_once: int | None) -> None:
    """Submit all runs; each then has its handle.json.

    Raises:
        BeyondLimit: the site's limits leave room for some of them only; these are queued.
        ClusterError: the scheduler refuses one of the submissions, or does not answer. Earlier ones
            are queued; of the others only their folders are left.
    """
    placed, why = fitting(placed)
    if len(placed) == 1:
        placed[0][0].submit(placed[0][1])
    elif placed:
        _submit_arrays(placed, at_once)
    if why:
        raise BeyondLimit("\n".join(why))


def _submit_arrays(placed: Sequence[Placed], at_once: int | None) -> None:
    confs = {cluster.config.cluster.slurm_conf for cluster, _ in placed}
    most = {conf: largest_array(conf) for conf in confs}
    sweeps: dict[Path, list[Placed]] = {}
    for member in placed:
        sweeps.setdefault(member[1].run.parent, []).append(member)
    for sweep, members in sweeps.items():
        arrays: list[Array] = []
        for group in group_equal(members):
            may = most[group[0][0].config.cluster.slurm_conf]
            for part in _parts(group, may):
                if number_of(part[0]) is None or len(part) == 1:
                    part[0][0].submit(part[0][1])
                else:
                    arrays.append(_prepared(part, at_once, may))
        for one in arrays:
            queue(RunDir(sweep), one.script, one.attempt, one.conf, one.elements, tell=one.tell)


def fitting(placed: Sequence[Placed]) -> tuple[list[Placed], list[str]]:
    """Select the runs that the site's limits (MaxSubmitJobs) admit, without submitting.

    Returns:
        The runs that fit, and a sentence for each limit that excludes others.
    """
    fit: list[Placed] = []
    why: list[str] = []
    limited: dict[object, list[Placed]] = {}
    for cluster, request in placed:
        options = request.details["options"]
        key = (cluster.config.cluster.slurm_conf, *(options.get(name) for name in LIMITED_BY))
        limited.setdefault(key, []).append((cluster, request))
    for members in limited.values():
        (cluster, request), total = members[0], len(members)
        conf = cluster.config.cluster.slurm_conf
        client, most = SlurmClient(conf), min(total, *largest_array(conf)) if total > 1 else 1
        found = total
        if most > 1 and (room := room_for(client, request.text, most)) < most:
            found = room
            why.append(
                f"{tightest(client)}: there is room for {found} of {plural(total, 'point')} now"
            )
        fit += members[:found]
    return fit, why


def foresee(placed: Sequence[Placed]) -> list[str]:
    """Predict how `submit_as_arrays` would submit the runs.

    Returns a sentence for each limit with too little room.
    """
    _, why = fitting(placed)
    return [f"{sentence}; the same line submits the others later" for sentence in why]


def room(ask: Callable[[int], bool], most: int) -> int:
    """Return how many of `most` are accepted, asking about few numbers.

    >>> asked = []
    >>> room(lambda n: asked.append(n) or n <= 5, 100), asked
    (5, [100, 1, 2, 4, 8, 6, 5])
    """
    if most < 1 or ask(most):
        return max(0, most)
    least, beyond = 0, 1
    while beyond < most and ask(beyond):
        least, beyond = beyond, 2 * beyond
    beyond = min(beyond, most)
    while beyond - least > 1:
        middle = (least + beyond) // 2
        least, beyond = (middle, beyond) if ask(middle) else (least, middle)
    return least


def room_for(client: SlurmClient, script: str, most: int) -> int:
    """Return how many elements of this script's array the scheduler would accept now.

    Only sbatch knows which limits apply; `--test-only` counts as a submission does.
    """

    def accepted(count: int) -> bool:
        answer = client.ask("sbatch", "--test-only", f"--array=0-{count - 1}", text=script)
        return not BeyondLimit.found_in(answer.words)

    return room(accepted, most)


def tightest(client: SlurmClient) -> str:
    """Describe the most restrictive limit and its use, as far as the scheduler shows it."""
    answer = client.ask(
        "scontrol", "show", "assoc_mgr", f"users={getpass.getuser()}", "flags=assoc,qos"
    )
    found = [(int(m[2]) - int(m[3]), m[1], m[2], m[3]) for m in FIGURES.finditer(answer.out)]
    if answer.code or not found:
        return "the limit of submitted jobs"
    _, name, most, used = min(found)
    return f"{name}={most}, of which {used} are taken"


def largest_array(conf: str | None) -> tuple[int, int]:
    """Return how many indices and how many elements an array may have.

    MaxArraySize is one more than the highest index.
    """
    shown = SlurmClient(conf).must("scontrol", "show", "config")
    indices, tasks = MAX_ARRAY_SIZE.search(shown), MAX_ARRAY_TASKS.search(shown)
    most = int(indices[1]) if indices else 1001
    return most, min(most, int(tasks[1])) if tasks else most


def _parts(group: list[Placed], most: tuple[int, int]) -> Iterator[list[Placed]]:
    """Split runs into arrays at the highest index, 0 to 1000, 1001 to 2001, and by size.

    Each run is alone if the site has no arrays.
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
    """An array for sbatch: its script, and each run's index by its folder's name."""

    script: Path
    elements: dict[str, str]
    attempt: int
    conf: str | None
    tell: Callable[[str], None]


def _prepared(part: Sequence[Placed], at_once: int | None, most: tuple[int, int]) -> Array:
    """Prepare one array of equal runs: write all its files."""
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
    """Return the array's script: its elements' request, and where each continues.

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
        # A run's own script sets the umask; a user's program keeps the one that it finds here.
        *([f"(umask 077; : >>{run}/logs/batch.log)"] if offset else []),
        *([f"exec >>{run}/logs/batch.log 2>&1"] if offset else []),
        f"exec bash {run}/submitit/{script_name(request.attempt)}.sh",
        "",
    ])  # fmt: skip
