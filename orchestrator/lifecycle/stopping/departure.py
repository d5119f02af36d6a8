"""Departure: the end of an attempt whose run continues (preemption, time limit, lost node).

All ranks agree to stop at a boundary, or rank 0 alone leaves inside a window. Rank 0 writes a
checkpoint and `departure.json`, all ranks end cleanly, and after srun the batch script requeues
the job (`clusters.slurm.outcome`). So no rank needs SLURM's commands, which a container may lack.
"""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ClusterError, NoWayOn
from orchestrator.lifecycle.stopping.deadline import JobStatus
from orchestrator.lifecycle.topology import Topology
from orchestrator.rundir.checksums import to_json_text
from orchestrator.rundir.files import read_end, write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import read_outcome

if TYPE_CHECKING:
    from orchestrator.slurm_client import SlurmClient

REQUEUE_TRIES = 20
SAID_BYTES = 2**20
NODE_FAILURE = re.compile(r"srun: error: Node failure on (\S+)")


def requeues(requeue: bool | None, allocation: str) -> bool:
    """Return whether the scheduler restarts a run: not in the user's own allocation."""
    return requeue is not False and allocation == "new"


def goes_on(run: RunDir, topology: Topology, *, requeue: bool) -> bool:
    """Return whether a stop means "restart later" rather than the end of the run."""
    return topology.scheduled and requeue and not run.cancel.exists()


def depart(run: RunDir, attempt: int, why: str, updates: int | None) -> None:
    """Record on rank 0 that this attempt ended by an agreed stop, after `updates` updates.

    An existing note (a silent node, perhaps this one while suspended) keeps its reason.
    """
    earlier: dict[str, Any] = run.read(run.departure(attempt)) or {}
    write_json(
        run.departure(attempt), {"why": why, **earlier, "updates": updates, "time": time.time()}
    )


def restart_reason(run: RunDir, attempt: int) -> str | None:
    """Return what ended the attempt before this one; None if it left no note."""
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
    if failed:
        return f"node {failed[1]} failed"
    outcome = read_outcome(run, last)  # the scheduler may have ended the job before srun noticed
    return outcome.lost if outcome is not None else None


def departure_note(why: str) -> dict[str, Any]:
    """Return the note of an attempt that ends without its number of updates."""
    return {"why": why, "updates": None, "time": time.time()}


def ask_job_status(job_id: str) -> JobStatus | None:
    """Return how the scheduler sees this job. Raises `ClusterError` when it cannot be asked."""
    from orchestrator.slurm_client import job_status

    return job_status(scheduler(), job_id)


def scheduler() -> SlurmClient:
    """Return a client for SLURM's commands. Raises `ClusterError` where there are none."""
    from orchestrator.slurm_client import SlurmClient

    return SlurmClient()


def note_departure(run: RunDir, attempt: int, value: dict[str, Any]) -> bool:
    """Note why an attempt ends; return whether this was the first note."""
    path = run.departure(attempt)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(to_json_text(path.name, value))
    return True


def leave_without(run: RunDir, attempt: int, error: NoWayOn) -> bool:
    """End the remaining ranks; return whether the job is requeued for it.

    It is where whole nodes are lost, as it would be without survivors.
    """
    if not error.nodes or run.cancel.exists():
        return False
    names = ", ".join(map(node_name, error.nodes))
    why = f"node{'s' * (len(error.nodes) > 1)} {names} went away; {error}"
    note_departure(run, attempt, departure_note(why))
    return True


def node_name(index: int) -> str:
    """Return the name of a node of this job, by its index in SLURM's list."""
    from submitit.slurm.slurm import SlurmJobEnvironment

    names = list(SlurmJobEnvironment().hostnames)
    return names[index] if index < len(names) else f"number {index}"


def ask_for_requeue(client: SlurmClient, job_id: str) -> None:
    """Retry `scontrol requeue` until it is accepted. Raises `ClusterError` if it never is."""
    from orchestrator.slurm_client import SchedulerDown

    for attempt in range(REQUEUE_TRIES):
        try:
            client.must("scontrol", "requeue", job_id)
        except SchedulerDown:
            time.sleep(min(2.0**attempt, 30.0))
        else:
            return
    raise ClusterError(f"job {job_id} could not be requeued: the scheduler does not answer")
