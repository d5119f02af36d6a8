"""Following a SLURM run from its folder: how training goes comes from there, where the job is from
the scheduler. Neither is waited for: a scheduler that does not answer holds nothing up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from orchestrator.agent.root_cause import tail
from orchestrator.clusters.api import Culprit, Handle, State
from orchestrator.clusters.slurm.news import News
from orchestrator.clusters.slurm.queue.cancelling import UNSENT, cancel_all, end, stop
from orchestrator.clusters.slurm.queue.packing.members import is_over, title_of
from orchestrator.clusters.slurm.root_cause import blame_slurm
from orchestrator.clusters.slurm.trust import client_of
from orchestrator.errors import ClusterError, RunFolderError, describe_status
from orchestrator.rundir.folder import RunDir
from orchestrator.scheduler.client import Asked, SchedulerDown
from orchestrator.scheduler.jobs import (
    Job,
    accounted,
    queue_command,
    queued,
    read_queue,
)

FRESH_S = 2.5  # squeue needs a moment to know a new job
ASK_EVERY_S = 15.0  # a follower's calls of squeue: at most four a minute
ASK_RUNNING_EVERY_S = 30.0  # while the run folder shows that the job runs
RESULT_GRACE_S = 5.0
UNSEEN_S = 15.0
SAID = "error: "  # how the batch script says why it gives up
CAUSES = {
    "CANCELLED": "cancelled through the scheduler (scancel)",
    "TIMEOUT": "the time limit was reached; resume goes on from what was saved",
    "NODE_FAIL": "a node failed, and the job was not requeued",
    "OUT_OF_MEMORY": "out of memory, killed by the kernel",
    "BOOT_FAIL": "a node did not boot",
    "DEADLINE": "the job's deadline passed",
    "PREEMPTED": "preempted, and not requeued",
    "GONE": "the scheduler has forgotten the job, and it left no result",
}


def read_handle(run: RunDir) -> dict[str, Any]:
    """Where a SLURM run was placed. Raises `RunFolderError` when the folder does not say."""
    handle = run.read_handle()
    if handle is None:
        raise RunFolderError(f"{run.path} was never submitted: it has no {run.handle.name}")
    return handle


def ending(run: RunDir, job: Job, attempt: int | None = None) -> tuple[State, Culprit]:
    """What a job that ended without a result means. Reads only.

    Args:
        attempt: the one that ended; the newest where it is not known.
    """
    attempt = max(0, run.attempts_made() - 1) if attempt is None else attempt
    node, lines = job.nodes or "scheduler", tail(run.batch_log)
    state = State.STOPPED if job.state == "CANCELLED" else State.FAILED
    said = next((line.removeprefix(SAID) for line in lines[-1:] if line.startswith(SAID)), None)
    cause = CAUSES.get(job.state) or said
    if cause is None and (run.failures(attempt) or run.srun_log(attempt).exists()):
        found = _by_ranks(run, job, attempt)
        if found is not None:
            return state, found
    return state, Culprit(
        rank=None, node=node, cause=cause or _without_a_word(run, job, node), log_tail=lines
    )


def _by_ranks(run: RunDir, job: Job, attempt: int) -> Culprit | None:
    """What the ranks left, where the batch script could not tell it any more."""
    departure = run.read(run.departure(attempt))
    if departure is not None:
        cause = (
            f"its ranks left in order ({departure['why']}), but the batch script "
            f"{_how(job)} before it could hand the job back to the queue; resume goes on"
        )
        return Culprit(rank=None, node=departure.get("node") or "batch", cause=cause)
    found = blame_slurm(run, attempt, run.nodes_of_ranks(attempt), job.exit_code or 0)
    return None if found.rank is None else found


def _how(job: Job) -> str:
    if job.exit_signal:
        return f"was {describe_status(-job.exit_signal)}"
    return "ended" if job.exit_code is None else f"ended with code {job.exit_code}"


def _without_a_word(run: RunDir, job: Job, node: str) -> str:
    # exit signal 53 is slurmd's own: it could not open the output file
    if job.exit_signal == 53 or not run.attempts_made():
        return (
            f"the job ended ({job.state}) before it could write anything: the run folder "
            f"{run.path} is probably not visible on {node}; keep runs on a shared file system"
        )
    script = f": its batch script {_how(job)}" if job.exit_signal or job.exit_code else ""
    return f"the job ended ({job.state}) without a result{script}"


class SlurmHandle(Handle):
    """A submitted run, held by whoever follows it.

    Attributes:
        job: the latest that the scheduler said; None before its first answer.
        silent_since: when the scheduler stopped answering; None while it answers.
    """

    def __init__(self, run: RunDir) -> None:
        handle = read_handle(run)
        self._run = run
        self.job_id = str(handle["job_id"])
        self.title = title_of(run, self.job_id)
        self._news = News()
        self.client = client_of(run, handle.get("slurm_conf"))
        self.job: Job | None = None
        self.silent_since: datetime | None = None
        self._asked: Asked | None = None
        submitted = handle.get("time")
        just_submitted = isinstance(submitted, float) and time.time() - submitted < FRESH_S
        # The first question is due at once, or when squeue can know the job.
        self._asked_at = time.monotonic() - ASK_EVERY_S + (FRESH_S if just_submitted else 0.0)
        self._seen = self._seen_when_asked = (run.attempts_made(), False)
        self._result_at: float | None = None
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
        self._ask(ended=result is not None)
        if result is not None:
            over = self.silent_since is not None or (self.job is not None and not self.job.alive)
            over = over or is_over(self._run)  # others may go on in its job
            # The result is final; squeue, which is asked rarely, may show the job for a while.
            self._result_at = self._result_at or time.monotonic()
            over = over or time.monotonic() - self._result_at > RESULT_GRACE_S
            return State(result["state"]) if over else State.RUNNING
        if self.job is None:
            return State.PENDING
        if self.job.alive:
            self._ended_at = None
            return State.PENDING if self.job.waiting else State.RUNNING
        self._ended_at = self._ended_at or time.monotonic()
        if time.monotonic() - self._ended_at < RESULT_GRACE_S:
            return State.RUNNING
        state, self.culprit = ending(self._run, self.job)  # told, not written: that is not ours
        return state

    def _ask(self, *, ended: bool) -> None:
        """Start a call of squeue if one is due, and read its answer once there is one."""
        self._seen = (self._run.attempts_made(), ended)
        if self._asked is None:
            steady = self.job is not None and not self.job.waiting and self.silent_since is None
            steady = steady and self._seen == self._seen_when_asked
            pause_s = ASK_RUNNING_EVERY_S if steady else ASK_EVERY_S
            if time.monotonic() - self._asked_at >= pause_s:
                self._asked_at, self._seen_when_asked = time.monotonic(), self._seen
                self._asked = self.client.start(*queue_command([self.job_id]))
            return
        answer = self._asked.answer()
        if answer is None:
            return
        self._asked = None
        try:
            self.job = read_queue(answer).get(self.job_id) or self._past()
        except SchedulerDown:  # an error never means that the job is gone
            self.silent_since = self.silent_since or datetime.now().astimezone()
        else:
            self.silent_since = None

    def _past(self) -> Job | None:
        """A job that squeue has forgotten. Raises `SchedulerDown` when the accounting is silent."""
        runs = (accounted(self.client, [self.job_id]) or {}).get(self.job_id)
        if runs:
            return runs[-1]
        if self.job is not None or time.monotonic() - self._began > UNSEEN_S:
            return Job(id=self.job_id, state="GONE")
        return None

    def stop(self) -> None:
        """Ask all ranks to stop for good, each kind of run in its way; see `how_it_stops`."""
        job = self._asked_now()
        if job is None or job.waiting:
            self.kill()
            return
        stop(self.client, {self._run: self.job_id})

    def kill(self) -> None:
        """End the job at once, queued or running; what follows the last checkpoint is lost."""
        end(self.client, {self._run: self.job_id})

    @property
    def waiting_for(self) -> str:
        return self.job.reason if self.job is not None and self.job.waiting else ""

    def news(self) -> Sequence[str]:
        return self._news.of(self.job, self.silent_since, self.attempt)

    def in_progress(self) -> str:
        job = self._asked_now()
        lives = job is not None and job.alive and not is_over(self._run)
        return f"{self.title}, {job.state.lower()}" if job is not None and lives else ""

    def cancel(self, run: RunDir, *, now: bool) -> str:
        said = cancel_all([run], now=now).get(run.path)
        if said is None:
            raise ClusterError(
                f"{run.path} is not queued or running ({self.title}); there is nothing to cancel"
            )
        if said.endswith(UNSENT):
            raise ClusterError(f"{self.title}, {said}")
        return f"{self.title} {said}"

    def _asked_now(self) -> Job | None:
        return queued(self.client, [self.job_id]).get(self.job_id)

    def close(self) -> None:
        if self._asked is not None:
            self._asked.forget()
