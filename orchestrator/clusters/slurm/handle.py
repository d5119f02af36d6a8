"""Follow and cancel SLURM runs from their folders.

The folder shows how training proceeds, the scheduler where the job is. A follower waits for
neither: a thread of its own asks the scheduler. Any number of runs is cancelled by one squeue and
at most two scancel.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from orchestrator.clusters.api import Handle, State
from orchestrator.clusters.slurm.diagnosis import diagnose
from orchestrator.clusters.slurm.scheduler import (
    ScheduledJob,
    SchedulerDown,
    SlurmClient,
    accounted_ends,
    queued,
)
from orchestrator.clusters.slurm.submission import ARRAYS
from orchestrator.clusters.slurm.trust import client_of, read_handle
from orchestrator.errors import ClusterError
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import describe_stop, write_result
from orchestrator.rundir.status import DAMAGE

CANCEL_S, POLL_S = 5.0, 0.5
IS_OVER = ("invalid job id", "already completing or completed")
FRESH_S = 2.5  # squeue needs a moment to know a new job
QUERY_INTERVAL_S = 15.0  # a follower's calls of squeue: at most four a minute
RESULT_GRACE_S = 5.0
UNSEEN_S = 15.0


@dataclass(frozen=True, slots=True)
class Cancellation:
    """The effect of `cancel` on a run, as a clause: "is cancelled; …".

    Attributes:
        foreign: nothing does, since the job that its folder names is not the run's.
    """

    clause: str
    foreign: bool = False


def cancel_all(runs: Sequence[RunDir], *, now: bool) -> dict[Path, Cancellation]:
    """Stop runs at their next boundaries, or at once; waiting runs leave the queue.

    Returns:
        What happens to each, without those that are over.

    Raises:
        ClusterError: the scheduler does not answer, or refuses. No run counts as cancelled then.
    """
    clusters: dict[str | None, list[tuple[RunDir, str]]] = {}
    for run in runs:
        handle = run.read_handle()
        if handle is not None:
            clusters.setdefault(handle.get("slurm_conf"), []).append((run, str(handle["job_id"])))
    outcomes: dict[Path, Cancellation] = {}
    for conf, members in clusters.items():
        [*_, client] = [client_of(run, conf) for run, _ in members]
        jobs = queued(client, [job_id for _, job_id in members])
        ends: dict[RunDir, ScheduledJob] = {}
        stops: dict[RunDir, ScheduledJob] = {}
        for run, job_id in members:
            job = jobs.get(job_id)
            if job is None or not job.alive:
                continue
            if not now and not job.waiting and (result := run.read_result()) is not None:
                outcomes[run.path] = Cancellation(
                    f"is about to end: the run has ended ({result['state']}); nothing was sent; "
                    "--now ends the job at once"
                )
            elif job.state == "SUSPENDED" and not now and run.read_plan().get("program"):
                outcomes[run.path] = Cancellation(
                    f"is {job.suspended_by}; nothing was sent; --now ends it at once"
                )
            elif is_ours(run, job) or _has_log_of(client, run, job):
                (ends if now or job.waiting else stops)[run] = job
            else:
                outcomes[run.path] = Cancellation(
                    f"which {run.handle} names, is not this run's: it runs {job.command}; nothing "
                    "was sent",
                    foreign=True,
                )
        _send(client, ends, "now")
        _send(client, stops, "stop", "--signal=USR2")
        _await_end(client, {run: job for run, job in ends.items() if job.waiting})
        for run in ends:
            outcomes[run.path] = Cancellation("is cancelled; resume goes on from what was saved")
        for run, job in stops.items():
            still = f"; until then, {job.suspended_by}" if job.suspended_by else ""
            try:
                what = describe_stop(run)
            except DAMAGE as error:
                what = f"is asked to stop; what it does then is not known ({error})"
            outcomes[run.path] = Cancellation(f"{what}{still}; --now ends it at once")
    return outcomes


def _send(client: SlurmClient, jobs: Mapping[RunDir, ScheduledJob], how: str, *flags: str) -> None:
    """Mark the runs as cancelled, so that their ranks end rather than depart; signal their jobs.

    A full disk keeps none from being ended at once: a job that scancel ends is not requeued.
    New marks are removed if the signal could not be sent, since the runs are not cancelled then.
    """
    if not jobs:
        return
    # scancel would send a suspended job no signal, and try for minutes; a boundary reads the mark.
    ids = sorted({j.id for j in jobs.values() if how == "now" or j.state != "SUSPENDED"})
    new = [run for run in jobs if not run.cancel.exists()]
    try:
        for run in jobs:
            try:
                write_json(run.cancel, {"how": how, "time": time.time()})
            except OSError as error:  # a full disk
                if how == "now":
                    continue
                raise ClusterError(
                    f"{run.cancel} cannot be written ({error.strerror}), and without it the job "
                    f"would be requeued after its stop; --now ends it at once"
                ) from error
        if ids:
            _scancel(client, ids, *flags)
    except ClusterError:
        for run in new:
            with contextlib.suppress(OSError):  # a read-only disk, which has no mark either
                run.cancel.unlink()
        raise


def _scancel(client: SlurmClient, ids: Sequence[str], *flags: str) -> None:
    answer = client.run("scancel", *flags, *ids)
    # of many, some may have just ended: they are over, and the others got the signal
    lines = answer.message.lower().splitlines()
    over = all(any(phrase in line for phrase in IS_OVER) for line in lines)
    if answer.code and not (len(ids) > 1 and over):
        raise ClusterError(f"scancel: {answer.message}")


def is_ours(run: RunDir, job: ScheduledJob) -> bool:
    """Return whether a job runs this run: its batch script, as the scheduler knows it, is in the
    run's folder, or it is the run's element of an array of its sweep.
    """
    script = Path(os.path.realpath(job.command))
    return any(
        script.is_relative_to(os.path.realpath(folder)) or _is_same(script.parent, folder)
        for folder in _script_folders(run, job)
    )


def is_of_another(client: SlurmClient, run: RunDir, job: ScheduledJob) -> bool:
    """Return whether a job is not this run's, though its handle names it: ids begin again where a
    controller has lost its state, and the folder may be a copy.

    A script that this machine does not see may be the run's: by another path, if folders of the
    same names hold it, or where the folder was at its start, and is no more. Of a job without a
    script nothing is known.
    """
    if job.command in ("", "(null)") or is_ours(run, job):
        return False
    if not os.path.lexists(job.command):
        script = Path(job.command)
        ends = [folder.absolute().parts[-2:] for folder in _script_folders(run, job)]
        begun = Path(str(run.read_config()["run"]["dir"]))
        moved = script.is_relative_to(begun) or script.parent == begun.parent / ARRAYS
        if moved or script.parent.parts[-2:] in ends:
            return False
    return not _has_log_of(client, run, job)  # a site's sbatch may submit a copy of the script


def _has_log_of(client: SlurmClient, run: RunDir, job: ScheduledJob) -> bool:
    """Return whether a job's output goes to the run's log. Raises `SchedulerDown` if that is not
    known: neither may the job be ended for this run's sake, nor the run for the job's.
    """
    answer = client.run("scontrol", "show", "job", job.id)
    if answer.code:
        raise SchedulerDown(f"scontrol show job {job.id}: {answer.message}")
    logs = re.findall(r"\bStdOut=(\S+)", answer.out)
    return os.path.realpath(run.batch_log) in map(os.path.realpath, logs)


def _script_folders(run: RunDir, job: ScheduledJob) -> list[Path]:
    """Return where the batch scripts of a run's jobs of such an id are."""
    is_element = run.path.name == job.id.partition("_")[2]
    return [run.submitit, *([run.path.parent / ARRAYS] if is_element else [])]


def _is_same(folder: Path, other: Path) -> bool:
    try:
        return folder.samefile(other)
    except OSError:
        return False


def _await_end(client: SlurmClient, jobs: Mapping[RunDir, ScheduledJob]) -> None:
    """Wait for jobs to end that have not begun, and so have no batch script to write their end."""
    pending = dict(jobs)
    deadline = time.monotonic() + CANCEL_S
    while pending and time.monotonic() < deadline:
        known = queued(client, [job.id for job in pending.values()])
        for run, job in list(pending.items()):
            if job.id not in known or not known[job.id].alive:
                with contextlib.suppress(*DAMAGE):  # a full disk, say: `status` writes it later
                    write_result(run, State.STOPPED)
                del pending[run]
        if pending:
            time.sleep(POLL_S)


class SlurmHandle(Handle):
    """Handle of a submitted run for its followers.

    Attributes:
        job: the scheduler's latest answer; None before the first.
        silent_since: when the scheduler stopped answering; None while it answers.
    """

    def __init__(self, run: RunDir) -> None:
        handle = read_handle(run)
        self._run = run
        self.job_id = str(handle["job_id"])
        self.title = f"job {self.job_id}"
        self.client = client_of(run, handle.get("slurm_conf"))
        self.job: ScheduledJob | None = None
        self.silent_since: datetime | None = None
        self._answer: Future[ScheduledJob | None] | None = None
        fresh = time.time() - float(handle.get("time", 0.0)) < FRESH_S
        # The first question is due at once, or when squeue can know the job.
        self._queried_at = time.monotonic() - QUERY_INTERVAL_S + (FRESH_S if fresh else 0.0)
        self._result_at: float | None = None
        self._ended_at: float | None = None
        self._began = time.monotonic()
        self._reported_state = ""
        self._reported_silence_at: float | None = None

    def poll(self, timeout_s: float) -> State:
        """Read the folder and, at intervals, query the scheduler. Never waits for its answer."""
        time.sleep(timeout_s)
        result = self._run.read_result()
        self._query()
        if result is not None:
            # The result is final; squeue, which is asked rarely, may show the job for a while.
            self._result_at = self._result_at or time.monotonic()
            over = (
                self.silent_since is not None
                or (self.job is not None and not self.job.alive)
                or time.monotonic() - self._result_at > RESULT_GRACE_S
            )
            return State(result["state"]) if over else State.RUNNING
        if self.job is None:
            return State.PENDING
        if self.job.alive:
            self._ended_at = None
            return State.PENDING if self.job.waiting else State.RUNNING
        self._ended_at = self._ended_at or time.monotonic()
        if time.monotonic() - self._ended_at < RESULT_GRACE_S:
            return State.RUNNING
        state, self.culprit = diagnose(self._run, self.job)  # not written: not ours
        return state

    def _query(self) -> None:
        """Query the scheduler if that is due, and read its answer once there is one."""
        if self._answer is None:
            if time.monotonic() - self._queried_at >= QUERY_INTERVAL_S:
                self._queried_at = time.monotonic()
                self._answer = Future()
                threading.Thread(target=self._find, args=[self._answer], daemon=True).start()
        elif self._answer.done():
            answer, self._answer = self._answer, None
            try:
                job = answer.result()
            except SchedulerDown:  # an error never means that the job has ended
                self.silent_since = self.silent_since or datetime.now().astimezone()
                return
            self.silent_since = None
            unseen_s = time.monotonic() - self._began
            if job is None and (self.job is not None or unseen_s > UNSEEN_S):
                job = ScheduledJob(id=self.job_id, state="GONE")
            self.job = job

    def _find(self, answer: Future[ScheduledJob | None]) -> None:
        """Look for the job in the queue, else in the accounting."""
        job_id = self.job_id
        try:
            job = queued(self.client, [job_id]).get(job_id)
            if job is not None and is_of_another(self.client, self._run, job):
                answer.set_result(None)
            else:
                answer.set_result(job or accounted_ends(self.client, [job_id]).get(job_id))
        except Exception as error:  # noqa: BLE001  # raised where the answer is read
            answer.set_exception(error)

    def stop(self) -> None:
        """Ask all ranks to stop for good, as each kind of run does; a waiting job ends."""
        cancel_all([self._run], now=False)

    def kill(self) -> None:
        """End the job at once, queued or running; progress since the last checkpoint is lost."""
        cancel_all([self._run], now=True)

    @property
    def waiting_for(self) -> str:
        return self.job.waits_for if self.job is not None and self.job.waiting else ""

    def new_messages(self) -> Sequence[str]:
        """Return changes: the scheduler stops or resumes answering; the job's state and nodes."""
        messages: list[str] = []
        if self.silent_since is not None and self._reported_silence_at is None:
            self._reported_silence_at = time.monotonic()
            messages.append(
                f"the scheduler has not answered since {self.silent_since:%H:%M:%S}; the job is "
                f"not affected, and it is asked again and again"
            )
        elif self.silent_since is None and self._reported_silence_at is not None:
            waited_s = time.monotonic() - self._reported_silence_at
            self._reported_silence_at = None
            messages.append(f"the scheduler answers again, {waited_s:.0f} s later")
        job, attempt = self.job, self._run.latest_attempt
        present = f"{job.state} {job.nodes} {attempt}" if job is not None else ""
        if job is None or not job.alive or present == self._reported_state:
            return messages
        self._reported_state = present
        where = f"on {job.nodes}" if job.nodes else (f"({job.reason})" if job.reason else "")
        restarts = f", attempt {attempt + 1}" if attempt else ""
        still = f": {job.suspended_by}" if job.suspended_by else ""
        messages.append(f"{self.title} is {job.state.lower()} {where}{restarts}".strip() + still)
        return messages

    def in_progress(self) -> str:
        job = queued(self.client, [self.job_id]).get(self.job_id)
        if job is None or not job.alive or is_of_another(self.client, self._run, job):
            return ""
        return f"{self.title}, {job.state.lower()}"

    def cancel(self, run: RunDir, *, now: bool) -> str:
        cancellation = cancel_all([run], now=now).get(run.path)
        if cancellation is None:
            raise ClusterError(
                f"{run.path} is not queued or running ({self.title}); there is nothing to cancel"
            )
        if cancellation.foreign:
            raise ClusterError(f"{self.title}, {cancellation.clause}")
        return f"{self.title} {cancellation.clause}"
