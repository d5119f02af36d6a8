"""The one owner of signals in a rank: a handler only sets a flag.

The flag travels with the next boundary's reduction, so all ranks stop after the same update.
Nothing else in a worker may install a handler for these signals.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.agent.topology import Topology
from orchestrator.errors import ClusterError, Unrecoverable
from orchestrator.rundir.checksums import to_json_text
from orchestrator.rundir.files import read_end, write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import read_outcome

if TYPE_CHECKING:
    from orchestrator.slurm_client import SlurmClient

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class StopFlag:
    """Flag set by a stop signal and read by the loop.

    Attributes:
        signal: the latest one, None before any.
        time: by `time.monotonic`, when the first one came; 0 before.
        times: when the first of each kind came.
        received: how many came.
        asked: a stop was requested other than by a signal.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.time = 0.0
        self.times: dict[signal.Signals, float] = {}
        self.received = 0
        self.asked = False
        self._pid = os.getpid()

    @property
    def requested(self) -> bool:
        return self.asked or self.signal is not None

    @property
    def words(self) -> str:
        """Describe the signal for people."""
        return "asked to stop" + (f" by {self.signal.name}" if self.signal else "")

    def install(self) -> StopFlag:
        """Install the handlers, then unblock the signals.

        They may have been blocked before this process began, so that a stop while Python starts
        is kept, not fatal.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() != self._pid:  # a forked child (a loader worker): not its flag to set
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.take(signal.Signals(number))

    def take(self, number: signal.Signals) -> None:
        """Record a stop signal, to this process or to its agent."""
        self.signal = number
        now = time.monotonic()
        self.time = self.time or now
        self.times.setdefault(self.signal, now)
        self.received += 1


# ----------------------------------------------------------------------
# Deadline of a stop: from the signal to the kill, by the scheduler's answer or the configuration.
#
# Without an answer, the shortest time that the kind of signal allows holds.
#
# - The job is no longer RUNNING (requeued, cancelled, a node set down, its time over): KillWait.
# - PreemptTime is set: GraceTime (the partition's or the QOS's; see EndTime), then KillWait.
# - SIGTERM while it still runs (scancel --full, an srun that gives up): KillWait.
# - Another signal: until EndTime, which is the time limit, then KillWait; without a limit, never.
#

ASK_S = 1.0
LATE_S = 90.0
"""SLURM sends its notice of a time limit up to a minute early, and minds limits twice a minute."""


class JobStatus(Protocol):
    """What the deadline reads of a scheduler's job; see `orchestrator.slurm_client.JobStatus`."""

    @property
    def state(self) -> str: ...
    @property
    def restarts(self) -> int: ...
    @property
    def reason(self) -> str: ...
    @property
    def preempted_at(self) -> float | None: ...
    @property
    def ends_at(self) -> float | None: ...


KILL_WAIT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """Stop times from the controller's configuration, in seconds.

    Attributes:
        kill_wait_s: KillWait, between SIGTERM and SIGKILL.
        preempt_s: GraceTime of the job's partition, before that; None without preemption.
        ahead_s: before a time limit.
    """

    kill_wait_s: float = KILL_WAIT_S
    preempt_s: float | None = None
    ahead_s: float = 60.0

    @classmethod
    def read(cls, submission: dict[str, Any], ahead_s: float) -> Notice:
        """Read the times that the launcher wrote to submission.json."""
        return cls(
            kill_wait_s=float(submission.get("kill_wait_s", KILL_WAIT_S)),
            preempt_s=submission.get("preempt_grace_s"),
            ahead_s=ahead_s,
        )

    @property
    def shortest_s(self) -> float:
        """Return the shortest of the expected stops: a time limit, and preemption."""
        if self.preempt_s is None:
            return self.ahead_s
        return min(self.ahead_s, self.preempt_s + self.kill_wait_s)


def killed_at(
    stop: StopFlag, job: JobStatus | None, notice: Notice, now: float, clock: float
) -> float | None:
    """Return when the kill comes, by the clock of `stop`; None if none will come.

    Args:
        job: the scheduler's answer after the latest signal; None before it.
        now, clock: the same moment in seconds since 1970, and by the clock of `stop`.
    """
    term = stop.times.get(signal.SIGTERM)
    first = min(stop.times.values(), default=clock)
    if job is None:
        return first + notice.shortest_s if term is None else term + notice.kill_wait_s
    if job.state != "RUNNING":
        return (first if term is None else term) + notice.kill_wait_s
    if job.preempted_at is not None:
        grace_s = job.ends_at - job.preempted_at if job.ends_at else notice.preempt_s or 0.0
        return first + max(0.0, grace_s) + notice.kill_wait_s
    if term is not None:
        return term + notice.kill_wait_s
    return None if job.ends_at is None else clock + job.ends_at - now + notice.kill_wait_s


def reason(job: JobStatus, now: float, ahead_s: float, restarts: int = 0) -> str | None:
    """Return why the scheduler wants the job to stop; None if it does not show.

    Args:
        ahead_s: how long before a time limit the ranks are signalled.
        restarts: how often the job had been restarted when this start began.
    """
    if job.preempted_at is not None:
        return "preempted"
    if job.restarts > restarts:
        return "requeued (scontrol requeue, or a node that was set down)"
    # The end time of an ended or ending job is no limit.
    left_s = job.ends_at - now if job.ends_at and job.state == "RUNNING" else None
    if job.reason == "TimeLimit" or (left_s is not None and left_s < ahead_s + LATE_S):
        return "near its time limit"
    return None


class Deadline:
    """Rank 0's query to the scheduler, once for each new signal, with a bounded wait.

    Args:
        ask: returns the job's status; may raise, or never return.
    """

    def __init__(self, stop: StopFlag, notice: Notice, ask: Callable[[], JobStatus | None]) -> None:
        self._stop, self._notice, self._ask = stop, notice, ask
        self._asked_for = 0
        self._job: JobStatus | None = None

    def grace_s(self) -> float | None:
        """Return seconds between the first signal and the kill; None if no kill will come.

        Before any signal, the shortest possible time.
        """
        if not self._stop.received:
            return self._notice.shortest_s
        end = killed_at(self._stop, self._heard(), self._notice, time.time(), time.monotonic())
        return None if end is None else end - self._stop.time

    def why(self, restarts: int) -> str:
        """Return the reason for the stop: the scheduler's if it gives one, else the signal."""
        job = self._heard()
        known = reason(job, time.time(), self._notice.ahead_s, restarts) if job else None
        return known or self._stop.words

    def _heard(self) -> JobStatus | None:
        if self._stop.received != self._asked_for:
            self._asked_for, self._job = self._stop.received, None
            thread = threading.Thread(target=self._look, name="deadline", daemon=True)
            thread.start()
            thread.join(ASK_S)
        return self._job

    def _look(self) -> None:
        asked_for = self._asked_for
        try:
            job = self._ask()
        except Exception as error:  # noqa: BLE001  # no scheduler, no command: the configured times hold
            print(f"the scheduler cannot be asked how long a stop may take: {error}", flush=True)
            return
        if asked_for == self._asked_for:
            self._job = job


# ----------------------------------------------------------------------
# Departure: the end of an attempt whose run continues (preemption, time limit, lost node).
#
# All ranks agree to stop at a boundary, or rank 0 alone leaves inside a window. Rank 0 writes a
# checkpoint and `departure.json`, all ranks end cleanly, and after srun the batch script requeues
# the job (`clusters.slurm.outcome`). So no rank needs SLURM's commands, which a container may lack.
#

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


def leave_without(run: RunDir, attempt: int, error: Unrecoverable) -> bool:
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
