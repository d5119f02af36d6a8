"""How an attempt ends although its run goes on: preempted, near its time limit, a node lost.

All ranks agree to stop at a boundary, or rank 0 alone leaves inside a window. Rank 0 writes a
checkpoint and `departure.json`, everybody ends cleanly, and the batch script, once srun has ended,
hands the job back to the queue (`clusters.slurm.outcome`). So no rank needs SLURM's
commands, which a container may not have.
"""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ClusterError, NoWayOn
from orchestrator.lifecycle.stopping.deadline import Standing
from orchestrator.lifecycle.topology import Topology
from orchestrator.rundir.checksums import to_json_text
from orchestrator.rundir.files import read_end, write_json
from orchestrator.rundir.folder import RunDir

if TYPE_CHECKING:
    from orchestrator.slurm_client import SlurmClient

REQUEUE_TRIES = 20
SAID_BYTES = 2**20
NODE_FAILURE = re.compile(r"srun: error: Node failure on (\S+)")


def requeues(requeue: bool | None, allocation: str) -> bool:
    """Whether the scheduler starts a run again: not in an allocation that is the person's own."""
    return requeue is not False and allocation == "new"


def goes_on(run: RunDir, topology: Topology, *, requeue: bool) -> bool:
    """Whether a stop means "start again later" rather than the end of the run."""
    return topology.scheduled and requeue and not run.cancel.exists()


def depart(run: RunDir, attempt: int, why: str, updates: int | None) -> None:
    """Rank 0: note that this attempt ended by an agreed stop, after `updates` updates.

    Where a note says already why it ends (a silent node, perhaps this one while it stood still),
    that is the reason, and what followed is not.
    """
    earlier: dict[str, Any] = run.read(run.departure(attempt)) or {}
    write_json(
        run.departure(attempt), {"why": why, **earlier, "updates": updates, "time": time.time()}
    )


def why_restarted(run: RunDir, attempt: int) -> str | None:
    """What ended the attempt before this one; None when it left no word of it."""
    before = [int(p.name) for p in run.attempts.iterdir() if p.name.isdigit()]
    last = max((number for number in before if number < attempt), default=None)
    if last is None:
        return None
    departure: dict[str, Any] | None = run.read(run.departure(last))
    if departure is not None:
        return str(departure["why"])
    try:
        said = read_end(run.srun_log(last), SAID_BYTES).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return None
    failed = NODE_FAILURE.search(said)  # the scheduler ended the job, agents included
    return f"node {failed[1]} failed" if failed else None


def left_now(why: str) -> dict[str, Any]:
    """The note of an attempt that ends without a word on how far it came."""
    return {"why": why, "updates": None, "time": time.time()}


def ask_standing(job_id: str) -> Standing | None:
    """How the scheduler sees this job. Raises `ClusterError` when it cannot be asked."""
    from orchestrator.slurm_client import standing

    return standing(scheduler(), job_id)


def scheduler() -> SlurmClient:
    """SLURM's commands, for those who need them. Raises `ClusterError` where there are none."""
    from orchestrator.slurm_client import SlurmClient

    return SlurmClient()


def first_to_leave(run: RunDir, attempt: int, value: dict[str, Any]) -> bool:
    """Note why an attempt ends, unless somebody has: whether nobody had."""
    path = run.departure(attempt)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(to_json_text(path.name, value))
    return True


def leave_without(run: RunDir, attempt: int, error: NoWayOn) -> bool:
    """What is left of the ranks ends. Whether the job goes back to the queue for it: where whole
    nodes are gone, as it would had nobody survived.
    """
    if not error.nodes or run.cancel.exists():
        return False
    names = ", ".join(map(node_name, error.nodes))
    why = f"node{'s' * (len(error.nodes) > 1)} {names} went away; {error}"
    first_to_leave(run, attempt, left_now(why))
    return True


def node_name(index: int) -> str:
    """Name of a node of this job, by its index in SLURM's own list."""
    from submitit.slurm.slurm import SlurmJobEnvironment

    names = list(SlurmJobEnvironment().hostnames)
    return names[index] if index < len(names) else f"number {index}"


def ask_for_requeue(client: SlurmClient, job_id: str) -> None:
    """`scontrol requeue` until it is accepted. Raises `ClusterError` when it never is."""
    from orchestrator.slurm_client import SchedulerDown

    for attempt in range(REQUEUE_TRIES):
        try:
            client.must("scontrol", "requeue", job_id)
        except SchedulerDown:
            time.sleep(min(2.0**attempt, 30.0))
        else:
            return
    raise ClusterError(f"job {job_id} could not be requeued: the scheduler does not answer")
