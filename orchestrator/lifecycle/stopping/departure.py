"""How an attempt ends although its run goes on: preempted, near its time limit, a node lost.

All ranks agree to stop at a boundary, or rank 0 alone leaves inside a window. Rank 0 writes a
checkpoint and `departure.json`, everybody ends cleanly, and the batch script, once srun has ended,
hands the job back to the queue (`clusters.slurm.outcome`). So no rank needs SLURM's
commands, which a container may not have; but for a node that fell silent, where srun itself never
ends.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ClusterError, NoWayOn
from orchestrator.lifecycle.stopping.deadline import Standing
from orchestrator.lifecycle.stopping.stop_signals import StopFlag
from orchestrator.lifecycle.survival.record import GenerationRecord
from orchestrator.lifecycle.topology import BATCH_PID_VARIABLE, Topology
from orchestrator.rundir.checksums import to_json_text
from orchestrator.rundir.files import read_end, write_json
from orchestrator.rundir.folder import RunDir

if TYPE_CHECKING:
    from orchestrator.slurm_client import SlurmClient

POLL_S = 0.05
LOOK_S = 1.0
TOLD_S = 3.0  # after which srun has told all ranks that one of them was killed
MARGIN_S = 10.0
REQUEUE_TRIES = 20
SAID_BYTES = 16 * 2**20
NODE_FAILURE = re.compile(r"srun: error: Node failure on (\S+)")
# The scheduler has found out, from the node's slurmd, that a step is there no more. It does not
# call that a node failure, and does not start the job again. Nodes are numbered as in the step.
STEP_GONE = re.compile(
    r"srun: error: (?:.*aborting, (?:io error|step missing|can not test)\b.*|"
    r"cannot communicate with) node (\d+)",
    re.IGNORECASE,
)


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
    record = GenerationRecord(run.attempt(last))
    failed = _nodes_unsurvived(run, last, record)
    if failed and (departure is None or not record.begun):
        return f"node {failed[0]} failed"
    if departure is None:
        return None
    ended = _ended_there(run, last, departure["node"]) if departure.get("node") else None
    return ended or str(departure["why"])


def _nodes_unsurvived(run: RunDir, attempt: int, record: GenerationRecord) -> list[str]:
    """Nodes that failed, as srun says, but for those that the others went on without."""
    found = NODE_FAILURE.findall(_said_by_srun(run, attempt))
    gone = {rank for lost in record.losses() for rank in lost}
    went = {node for rank, node in run.nodes_of_ranks(attempt).items() if rank in gone}
    return [node for node in found if node not in went]


def _ended_there(run: RunDir, attempt: int, node: str) -> str | None:
    """The rank whose end made a node fall silent, where srun saw it end but could end nobody else,
    since the controller was away; None where the whole node went.
    """
    from orchestrator.slurm_client import task_ends

    said, node_of = _said_by_srun(run, attempt), run.nodes_of_ranks(attempt)
    first = next((end for end in task_ends(said) if not end.stopped), None)
    if first is None or node_of.get(first.rank) != node:
        return None
    return f"rank {first.rank} on {node} ended first: {first.words}"


def step_gone(run: RunDir, attempt: int) -> dict[str, Any] | None:
    """The departure that follows from a node whose processes are gone, as srun noticed.

    For this attempt's own batch script, where the numbers of nodes still mean the same nodes.
    """
    gone = STEP_GONE.search(_said_by_srun(run, attempt))
    return _departure_of_silent(node_name(int(gone[1]))) if gone else None


def _said_by_srun(run: RunDir, attempt: int) -> str:
    try:
        said = read_end(run.srun_log(attempt), SAID_BYTES)
    except FileNotFoundError:
        return ""
    return said.decode("utf-8", errors="replace")


def _departure_of_silent(node: str) -> dict[str, Any]:
    return {**left_now(f"node {node} stopped answering"), "node": node}


def left_now(why: str) -> dict[str, Any]:
    """The note of an attempt that ends without a word on how far it came."""
    return {"why": why, "updates": None, "time": time.time()}


def script_is_gone(topology: Topology) -> bool:
    """Whether the batch script, which hands the job back, was killed. For a rank on its node."""
    pid = os.environ.get(BATCH_PID_VARIABLE)
    if pid is None or topology.node_index != 0:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(") ")[2][:1]
    except FileNotFoundError:
        return True
    return state in "ZX"


def hand_back(job_id: str) -> None:
    """What the batch script would do, for one that was killed. Where the scheduler cannot be asked
    (a container without its commands), the departure stays for the next `status` or `resume`.
    """
    print("the job is handed back from here: its batch script is gone, or may be", flush=True)
    try:
        ask_for_requeue(scheduler(), job_id)
    except ClusterError as error:
        print(f"error: {error}", flush=True)


def ask_standing(job_id: str) -> Standing | None:
    """How the scheduler sees this job. Raises `ClusterError` when it cannot be asked."""
    from orchestrator.slurm_client import standing

    return standing(scheduler(), job_id)


def scheduler() -> SlurmClient:
    """SLURM's commands, for those who need them. Raises `ClusterError` where there are none."""
    from orchestrator.slurm_client import SlurmClient

    return SlurmClient()


def await_verdict(
    run: RunDir, attempt: int, stop: StopFlag, timeout_s: float, *, survive: bool = False
) -> bool:
    """A peer went away: wait to learn what that means, up to `timeout_s` and a margin.

    If a rank failed, srun sends us SIGTERM at once. If a whole node fell silent, a watcher writes a
    departure. A rank that left with code 0 is one that srun sees nothing in. If none of this comes,
    it is a failure that nobody else has seen. Files are looked at once in `LOOK_S`.

    Args:
        survive: srun ends nobody; a rank that failed has written that down.

    Returns:
        Whether the attempt is departing, so that this is no failure.
    """
    signals = stop.received
    now = look_at = time.monotonic()
    deadline = now + timeout_s + MARGIN_S
    while now < deadline and stop.received == signals:
        if now >= look_at:
            if run.departure(attempt).exists():
                return True
            if survive and any(not failure["secondary"] for failure in run.failures(attempt)):
                break
            if run.wordless(attempt).exists():  # of a rank that was killed, srun tells us soon
                deadline = min(deadline, now + TOLD_S)
            look_at = now + LOOK_S
        time.sleep(POLL_S)
        now = time.monotonic()
    return run.departure(attempt).exists()


def leave_silent_node(
    run: RunDir, attempt: int, topology: Topology, node_index: int, *, requeue: bool
) -> None:
    """Called from the heartbeat's thread: hand the job back to the queue.

    Raises:
        ClusterError: the scheduler cannot be asked, the job may not be started again, or the run
            has ended already; srun has to be ended then, which would wait for that node for ever.
    """
    if run.read_result() is not None:
        raise ClusterError(f"node {node_name(node_index)} fell silent after the run's end")
    value = _departure_of_silent(node_name(node_index))
    print(f"error: {value['why']}", flush=True)
    if not first_to_leave(run, attempt, value):  # another watcher, or an agreed stop sees to it
        return
    if not requeue:
        raise ClusterError("the run ends, since its job may not be requeued")
    ask_for_requeue(scheduler(), topology.job_id)


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
