"""Following a SLURM run from its folder: how training goes comes from there, where the job is from
the scheduler. Neither is waited for: a scheduler that does not answer holds nothing up.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

from orchestrator.errors import RunFolderError
from orchestrator.rundir import RunDir, read_json, write_json
from orchestrator.submit.api import Culprit, State
from orchestrator.submit.blame import tail
from orchestrator.submit.ending import write_end
from orchestrator.submit.slurm_client import Asked, SchedulerDown, SlurmClient
from orchestrator.submit.slurm_jobs import Job, accounted, queue_command, queued, read_queue

QUERY_S = 2.0
ENDING_QUERY_S = 0.3
RESULT_GRACE_S = 5.0
UNSEEN_S = 15.0
SAID = "error: "  # how the batch script says why it gives up
CAUSES = {
    "CANCELLED": "cancelled through the scheduler (scancel)",
    "TIMEOUT": "the time limit was reached; resume goes on from the newest checkpoint",
    "NODE_FAIL": "a node failed, and the job was not requeued",
    "OUT_OF_MEMORY": "out of memory, killed by the kernel",
    "BOOT_FAIL": "a node did not boot",
    "DEADLINE": "the job's deadline passed",
    "PREEMPTED": "preempted, and not requeued",
}


def read_handle(run: RunDir) -> dict[str, Any]:
    """Where a SLURM run was placed. Raises `RunFolderError` when the folder does not say."""
    handle = read_json(run.handle)
    if handle is None:
        raise RunFolderError(f"{run.path} was never submitted: it has no {run.handle.name}")
    return handle


def ending(run: RunDir, job: Job) -> tuple[State, Culprit]:
    """What a job that ended without a result means."""
    node = job.nodes or "scheduler"
    lines = tail(run.batch_log)
    cause = CAUSES.get(job.state) or next(
        (line.removeprefix(SAID) for line in lines[-1:] if line.startswith(SAID)), None
    )
    if cause is None:
        # exit signal 53 is slurmd's own: it could not open the output file
        unseen = job.exit_signal == 53 or not run.attempts_made()
        cause = f"the job ended ({job.state}) without a result"
        if unseen:
            cause = (
                f"the job ended ({job.state}) before it could write anything: the run folder "
                f"{run.path} is probably not visible on {node}; keep runs on a shared file system"
            )
    state = State.STOPPED if job.state == "CANCELLED" else State.FAILED
    return state, Culprit(rank=None, node=node, cause=cause, log_tail=lines)


class SlurmHandle:
    """A submitted run, held by whoever follows it.

    Attributes:
        job: the latest that the scheduler said; None before its first answer.
        silent_since: when the scheduler stopped answering; None while it answers.
    """

    def __init__(self, run: RunDir) -> None:
        handle = read_handle(run)
        self._run = run
        self.job_id = str(handle["job_id"])
        self.client = SlurmClient(handle["slurm_conf"])
        self.job: Job | None = None
        self.silent_since: datetime | None = None
        self.culprit: Culprit | None = None
        self._asked: Asked | None = None
        self._next = 0.0
        self._ended_at: float | None = None
        self._began = time.monotonic()

    @property
    def attempt(self) -> int:
        """The newest attempt that has begun; 0 before any."""
        return max(0, self._run.attempts_made() - 1)

    def poll(self, timeout_s: float) -> State:
        """Look at the folder and, now and then, ask the scheduler. Never waits for its answer."""
        time.sleep(timeout_s)
        result = self._run.read_result()
        self._ask(ENDING_QUERY_S if result else QUERY_S)
        if result is not None:
            over = self.silent_since is not None or (self.job is not None and not self.job.alive)
            return State(result["state"]) if over else State.RUNNING
        if self.job is None:
            return State.PENDING
        if self.job.alive:
            self._ended_at = None
            return State.PENDING if self.job.waiting else State.RUNNING
        self._ended_at = self._ended_at or time.monotonic()
        if time.monotonic() - self._ended_at < RESULT_GRACE_S:
            return State.RUNNING
        state, self.culprit = ending(self._run, self.job)
        write_end(self._run, state, self.culprit)
        return state

    def _ask(self, every_s: float) -> None:
        now = time.monotonic()
        if self._asked is None:
            if now >= self._next:
                self._asked = self.client.start(*queue_command([self.job_id]))
            return
        answer = self._asked.answer()
        if answer is None:
            return
        self._asked, self._next = None, now + every_s
        if answer.down:
            self.silent_since = self.silent_since or datetime.now().astimezone()
            return
        self.silent_since = None
        found = read_queue(answer).get(self.job_id)
        self.job = found or self._past()

    def _past(self) -> Job | None:
        """A job that squeue has forgotten."""
        try:
            runs = (accounted(self.client, [self.job_id]) or {}).get(self.job_id)
        except SchedulerDown:
            return self.job
        if runs:
            return runs[-1]
        if self.job is not None or time.monotonic() - self._began > UNSEEN_S:
            return Job(id=self.job_id, state="GONE")
        return None

    def stop(self) -> None:
        """Ask all ranks to stop together at the next boundary, with a checkpoint, for good."""
        self._mark_cancelled("stop")
        job = queued(self.client, [self.job_id]).get(self.job_id)
        if job is None or job.waiting:
            self.kill()
        else:
            self.client.must("scancel", "--signal=USR2", self.job_id)

    def kill(self) -> None:
        """End the job at once, queued or running; what follows the last checkpoint is lost."""
        self._mark_cancelled("now")
        self.client.must("scancel", self.job_id)

    def _mark_cancelled(self, how: str) -> None:
        """What makes the ranks end rather than depart. Written before they get any signal."""
        write_json(self._run.cancel, {"how": how, "time": time.time()})

    def close(self) -> None:
        if self._asked is not None:
            self._asked.forget()
