"""Job arrays: runs that request the same become the elements of one array.

The array's script only executes the run's own batch script. So stop, requeue, restart and end work
for an element, whose id is `123_4`, as for a job. Runs are elements if they are in one sweep's
folder and their folders are named by numbers, which are the elements' indices; other runs, and
those of higher numbers than SLURM takes (MaxArraySize), are jobs of their own. The code is copied
once per array.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

from orchestrator.clusters.api import Request
from orchestrator.clusters.slurm.base import BaseSlurmCluster
from orchestrator.clusters.slurm.batch_script import option_line, script_name
from orchestrator.clusters.slurm.safe_values import quoted
from orchestrator.clusters.slurm.scheduler import SlurmClient
from orchestrator.clusters.slurm.submission import ARRAYS, NUMBER, BeyondLimit, queue
from orchestrator.clusters.slurm.task import write_task
from orchestrator.config.program import target_of
from orchestrator.rundir.files import make_folder, names_in, write_atomically, written_together
from orchestrator.rundir.folder import RunDir
from orchestrator.units import plural, spans

Placed = tuple[BaseSlurmCluster, Request]

CODE = "code"  # the folder of code that several runs start from, next to them
UNLIKE = ("job-name", "output")  # differs between a sweep's points, and no limit depends on it
LIMITED_BY = ("account", "qos", "partition", "reservation")  # which limits hold for a job
MAX_ARRAY_TASKS = re.compile(r"\bmax_array_tasks=(\d+)")


def submit_as_arrays(placed: Sequence[Placed], at_once: int | None) -> None:
    """Submit all runs; each then has its handle.json.

    Raises:
        BeyondLimit: the site's limits leave room for some of them only; these are queued.
        ClusterError: the scheduler refuses one of the submissions, or does not answer. Earlier ones
            are queued; of the others only their folders are left.
    """
    fit, why = fitting(placed)
    groups: dict[object, list[Placed]] = {}  # equal runs of one parent folder; each other run alone
    for index, (cluster, request) in enumerate(fit):
        key: object = (
            cluster.config.cluster.slurm_conf,
            request.run.parent,
            request.attempt,
            tuple((k, v) for k, v in request.details["options"].items() if k not in UNLIKE),
        )
        numbered = NUMBER.fullmatch(request.run.name)
        groups.setdefault(key if numbered else index, []).append((cluster, request))
    starts: list[Callable[[], object]] = []
    for group in groups.values():  # all files are written before the first job is queued
        starts += _starts(group, at_once)
    for start in starts:
        start()
    if why:
        raise BeyondLimit("\n".join(why))


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
        count = total
        if total > 1:
            conf = cluster.config.cluster.slurm_conf
            client, most = SlurmClient(conf), min(total, *largest_array(conf))
            if (room := room_for(client, request.text, most)) < most:
                count = room
                points = plural(total, "point")
                why.append(f"the limit of submitted jobs leaves room for {room} of {points} now")
        fit += members[:count]
    return fit, why


def room_for(client: SlurmClient, script: str, most: int) -> int:
    """Return how many elements of this script's array the scheduler would accept now.

    Only sbatch knows which limits apply; `--test-only` counts as a submission does. Usually there
    is room for all, so that is asked first.
    """

    def refused(count: int) -> bool:
        answer = client.run("sbatch", "--test-only", f"--array=0-{count - 1}", text=script)
        return BeyondLimit.found_in(answer.message)

    if most < 1 or not refused(most):
        return most
    return bisect.bisect_left(range(1, most), True, key=refused)


@cache
def largest_array(slurm_conf: str | None) -> tuple[int, int]:
    """Return how many indices and how many elements an array may have; asked once per process.

    MaxArraySize is one more than the highest index.
    """
    settings = SlurmClient(slurm_conf).settings()
    indices = int(settings.get("MaxArraySize", 1001))
    tasks = MAX_ARRAY_TASKS.search(settings.get("SchedulerParameters", ""))
    return indices, min(indices, int(tasks[1])) if tasks else indices


def _starts(group: list[Placed], at_once: int | None) -> Iterator[Callable[[], object]]:
    """Write the files of equal runs; yield functions that queue them, by arrays or one by one."""
    if len(group) < 2:
        yield from (partial(cluster.submit, request) for cluster, request in group)
        return
    indices, tasks = largest_array(group[0][0].config.cluster.slurm_conf)
    able = [element for element in group if int(element[1].run.name) < indices]
    others = [element for element in group if int(element[1].run.name) >= indices]
    parts = [able[n : n + tasks] for n in range(0, len(able), max(1, tasks))]
    for part in (*parts, *([element] for element in others)):
        cluster, request = part[0]
        if len(part) == 1:
            yield partial(cluster.submit, request)
            continue
        sweep, conf = request.run.parent, cluster.config.cluster.slurm_conf
        lay_out(sweep, part)
        script = _next_path(sweep / ARRAYS).with_suffix(".sh")
        write_atomically(script, array_script([r for _, r in part], at_once))
        names = [r.run.name for _, r in part]
        requeue = cluster.config.cluster.requeue is not False
        yield partial(
            queue,
            RunDir(sweep),
            script,
            request.attempt,
            conf,
            names,
            requeue=requeue,
            tell=cluster.tell,
        )


def _next_path(folder: Path) -> Path:
    """Return a numbered path in a folder that is not taken."""
    if not folder.is_dir():
        make_folder(folder)
    taken = [int(stem) for name in names_in(folder) if (stem := name.split(".")[0]).isdigit()]
    return folder / f"{max(taken, default=-1) + 1:03d}"


def lay_out(sweep: Path, part: Sequence[Placed]) -> None:
    """Write the batch scripts of runs of one sweep, their tasks, and the code that they share."""

    def source_of(cluster: BaseSlurmCluster) -> object:
        target = target_of(cluster.config.job)
        return target if isinstance(target, str) else target.command

    copies: dict[object, Path] = {}
    for cluster, _ in part:
        if cluster.config.run.snapshot and source_of(cluster) not in copies:
            copies[source_of(cluster)] = copy = _next_path(sweep / CODE)
            cluster.copy_code(sweep, copy)
    with written_together([sweep]):
        for cluster, request in part:
            run, copy = RunDir(request.run), copies.get(source_of(cluster))
            write_task(run)
            text = cluster.request(request.run, request.attempt, copy).text
            write_atomically(run.submitit / f"{script_name(request.attempt)}.sh", text)


def array_script(part: Sequence[Request], at_once: int | None) -> str:
    """Return the array's script: its elements' request, and where each continues."""
    request = part[0]
    sweep, options = request.run.parent, dict(request.details["options"])
    names = {str(element.details["options"]["job-name"]) for element in part}
    options["job-name"] = names.pop() if len(names) == 1 else sweep.name
    options["output"] = f"{sweep}/%a/logs/batch.log"
    limit = f"%{at_once}" if at_once else ""
    options["array"] = ",".join(spans(int(element.run.name) for element in part)) + limit
    script = f"/$SLURM_ARRAY_TASK_ID/submitit/{script_name(request.attempt)}.sh"
    return "\n".join(
        [
            "#!/bin/bash",
            *(option_line(name, value) for name, value in options.items()),
            "",
            f"exec bash {quoted(sweep)}{script}",
            "",
        ]
    )
