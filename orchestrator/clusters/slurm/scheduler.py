"""SLURM's commands: run with a deadline and a clean environment, their answers as values.

No SLURM_* or SBATCH_* variable of an enclosing job reaches them, except SLURM_CONF, and none of the
user's filters (SQUEUE_STATES, …). Without a controller each command takes about 10 s to fail.

squeue knows jobs that are queued, run, or ended a short while ago (MinJobAge). sacct, where there
is accounting, knows the others, and every earlier start of a requeued job.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from orchestrator.clusters.api import clean_environment
from orchestrator.errors import ClusterError, Interrupted, NotNow, expand_user
from orchestrator.units import seconds

T = TypeVar("T")

TIMEOUT_S = 60.0
PATIENCE_S = 60.0
LONGEST_PAUSE_S = 15.0
CONF = "SLURM_CONF"
# A user's own defaults of these commands: a partition in SQUEUE_PARTITION hides jobs of others.
FILTERS = ("SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_", "SACCTMGR_")
DOWN = (
    "unable to contact slurm controller",
    "unable to contact the controller",
    "socket timed out",
    "connection refused",
    "zero bytes were transmitted",
    "slurm backup controller in standby mode",
    "connect failure",
    "communications connection failure",
    "transport endpoint is not connected",
    "connection reset",
    "munge encode failed",  # the credentials' daemon does not answer: no command can be sent
    "munge decode failed",
    "protocol authentication error",
    "problem talking to the database",
    "temporarily unable to",
    "can not be altered now",
)
# The keys behind sbatch's messages, where neither they nor a line before names what to change.
MEANINGS = {
    "requested node configuration is not available": (
        "no node of the partition has what is asked of one: look at cluster.ranks_per_node x "
        "cluster.cpus_per_rank, cluster.memory_gib, cluster.gpus_per_node"
    ),
    r"\A[^\n]*invalid generic resource": (
        "there is no such resource (GPU, NPU) on this cluster: look at cluster.gpus_per_node and "
        "cluster.slurm_flags.gres"
    ),
    "more processors requested than permitted": (
        "cluster.ranks_per_node x cluster.cpus_per_rank is more than a node has"
    ),
}
DEVELOPMENT_CLUSTER = (
    "; `python -m slurm up` makes a development cluster here, for +cluster=slurm_dev"
    if (Path(__file__).parents[3] / "slurm" / "dev_cluster.py").exists()  # in a checkout
    else ""
)
ELSEWHERE = (
    "SLURM runs are submitted and followed on a machine of the cluster (a login node); without "
    "+cluster=slurm a run is local"
)


class SchedulerDown(NotNow):
    """A scheduler that does not answer; a later retry may succeed."""


class NoClient(ClusterError):
    """Missing SLURM commands, or no configured cluster."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A command's result."""

    code: int
    out: str
    err: str

    @property
    def down(self) -> bool:
        text = self.err.lower()
        return self.code != 0 and any(phrase in text for phrase in DOWN)

    @property
    def no_slurm_conf(self) -> bool:
        """Return whether no slurm.conf was found, here or on the network."""
        return self.code != 0 and "could not establish a configuration source" in self.err.lower()

    @property
    def message(self) -> str:
        """Return its error message."""
        return "\n".join(line for line in self.err.splitlines() if line.strip()) or self.out.strip()


def explained(message: str) -> str:
    """Return the scheduler's error message with an explanation."""
    known = (text for words, text in MEANINGS.items() if re.search(words, message, re.IGNORECASE))
    meaning = next(known, None)
    return f"the scheduler refuses it: {message}" + (f"\n{meaning}" if meaning else "")


class SlurmClient:
    """SLURM's commands for one cluster: the one of `slurm_conf`, or the machine's own."""

    def __init__(self, slurm_conf: str | None = None) -> None:
        self._conf = str(expand_user(slurm_conf)) if slurm_conf else os.environ.get(CONF)
        if self._conf is None:
            return
        try:  # SLURM's commands would look for a file that they cannot read for a minute
            Path(self._conf).open("rb").close()
        except OSError as error:
            absent = isinstance(error, FileNotFoundError | NotADirectoryError)
            why = "there is no such file" if absent else f"it cannot be read: {error.strerror}"
            if not slurm_conf:
                raise NoClient(f"{CONF}={self._conf}: {why}; unset it, or correct it") from error
            hint = DEVELOPMENT_CLUSTER if absent else ""
            raise ClusterError(f"cluster.slurm_conf={slurm_conf}: {why}{hint}") from error

    def environment(self, command: str) -> dict[str, str]:
        """Return a command's environment: ours, without traces of an enclosing job.

        A job inherits that of sbatch.
        """
        batch = command == "sbatch"
        drop = ("SLURMD_",) if batch else ("SLURMD_", *FILTERS)
        clean = clean_environment(os.environ).items()
        return {
            **{name: value for name, value in clean if not name.startswith(drop)},
            **({CONF: self._conf} if self._conf else {}),
            **({} if batch else {"SLURM_TIME_FORMAT": "%s"}),
        }

    def run(
        self,
        *command: str,
        text: str = "",
        timeout_s: float = TIMEOUT_S,
        holding: int | None = None,
    ) -> Answer:
        """Run a command to its end. Raises `SchedulerDown` without an answer.

        A Ctrl-C at our terminal does not reach it.

        Args:
            text: its standard input.
            holding: a descriptor that it keeps open for as long as it runs, even if this process
                ends.
        """
        if shutil.which(command[0]) is None:
            raise NoClient(
                f"there is no {command[0]} on this machine: {ELSEWHERE}{DEVELOPMENT_CLUSTER}"
            )
        try:
            done = subprocess.run(
                command,
                input=text,
                env=self.environment(command[0]),
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=timeout_s,
                pass_fds=() if holding is None else (holding,),
                start_new_session=True,
            )
        except subprocess.TimeoutExpired as error:
            raise SchedulerDown(f"{command[0]} did not answer within {timeout_s:g} s") from error
        answer = Answer(done.returncode, done.stdout, done.stderr)
        if answer.no_slurm_conf:
            raise NoClient(
                f"this machine has {command[0]}, but belongs to no cluster; set {CONF} to your "
                f"site's slurm.conf, if there is one: {ELSEWHERE}"
            )
        if answer.down:
            raise SchedulerDown(f"the scheduler does not answer: {answer.message}")
        return answer

    def settings(self) -> dict[str, str]:
        """Return the cluster's settings by their names in slurm.conf. Raises `ClusterError`."""
        shown = self.check_output("scontrol", "show", "config")
        lines = (line.partition("=") for line in shown.splitlines() if "=" in line)
        return {key.strip(): value.strip() for key, _, value in lines}

    def check_output(self, *command: str) -> str:
        """Return a command's standard output. Raises `ClusterError` if it fails."""
        answer = self.run(*command)
        if answer.code:
            raise ClusterError(f"{' '.join(command)}: {answer.message}")
        return answer.out


def retry_unanswered(
    action: Callable[[], T],
    *,
    patience_s: float = PATIENCE_S,
    tell: Callable[[str], None] = lambda _: None,
    undone: str = "not submitted",
) -> T:
    """Retry a scheduler's command while there is no answer.

    Args:
        patience_s: for how long; `math.inf` retries for ever.
        tell: called before each pause. It may raise `Interrupted` to stop waiting.
        undone: what has not happened, if there is never an answer.

    Raises:
        NotNow: there was no answer, or `tell` raised `Interrupted`.
    """
    began, pause = time.monotonic(), 1.0
    while True:
        try:
            return action()
        except SchedulerDown as error:
            waited = time.monotonic() - began
            remaining_s = patience_s - waited
            if remaining_s <= 0:
                raise NotNow(f"{error}\n{undone}, though tried for {waited:.0f} s") from error
            try:
                limit = "" if remaining_s == math.inf else f" for up to {remaining_s:.0f} s"
                tell(f"{error}; trying again{limit}")
            except Interrupted as ended:
                raise NotNow(f"{error}\n{undone}: {ended}") from error
            time.sleep(min(pause, remaining_s))
            pause = min(2 * pause, LONGEST_PAUSE_S)


QUEUE_FIELDS = (
    "JobArrayID",
    "State",
    "NodeList",
    "TimeLeft",
    "EndTime",
    "PreemptTime",
    "RestartCnt",
    "Requeue",
    "exit_code",
    "Reason",
    "Command",
)
# The last column alone may hold the separator.
QUEUE = ("squeue", "-a", "-r", "-t", "all", "-O", ":|,".join(QUEUE_FIELDS) + ":")
# Any other state, also one of a later SLURM, is that of a job that runs or may yet: a reservation
# was deleted (RESV_DEL_HOLD), or it runs in another cluster of the federation (REVOKED).
ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "GONE",  # ours: no longer known to SLURM
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    }
)
# A node could not start the job (its prolog failed, say, or it still had the job's last start):
# SLURM queues it again and holds it.
HELD_AFTER_LAUNCH = "launch failed requeued held"
HELD = {
    HELD_AFTER_LAUNCH: "a node could not start it, and `sinfo -R` may know why; ",
    "job requeued in held state": "",
    "job requeued in special exit state": "",
    "jobhelduser": "",
    "jobheldadmin": "an administrator holds it, and only one can release it; ",
    "reservationdeleted": "",
}
"""Reasons of jobs that wait for `scontrol release`, with what is known of the cause."""
RESERVATION_DELETED = re.compile(r"reservation .* was deleted")
NEVER_STARTS = {
    "dependencyneversatisfied": "its dependency can no longer be met",
    "partitiontimelimit": "its time (cluster.time_min) is above the partition's limit",
    "qosmaxwalldurationperjoblimit": "its time (cluster.time_min) is above its QOS's limit",
    "assocmaxwalldurationperjoblimit": "its time (cluster.time_min) is above its account's limit",
}
"""Reasons of jobs that wait in vain."""
# States of a job whose processes are all stopped.
SUSPENDED = {
    "STOPPED": "all of it was stopped (scancel -s STOP); `scancel -s CONT {}` lets it go on",
    "SUSPENDED": (
        "suspended by SLURM for another job, or by hand; it continues when that job has ended, or "
        "by an administrator's `scontrol resume {}`"
    ),
}
WAITING = frozenset(
    {
        "PENDING",
        "CONFIGURING",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledJob:
    """A job as the scheduler sees it. Times are seconds since 1970.

    Attributes:
        id: as in `7`, or `7_3` for an element of an array.
        state: SLURM's state, as in RUNNING, without sacct's additions ("CANCELLED by 0").
            COMPLETING hides the final one.
        nodes: the node list in SLURM's notation; "" while it is pending.
        time_left_s: until the time limit; None when there is none or it is not known.
        ends_at: its time limit, or when a preempted one is ended; None when there is no limit.
        preempted_at: when it was chosen for preemption; None when it was not.
        restarts: how often it was restarted, or is about to be.
        requeue: whether it may be.
        reason: why it is in this state; "" without a reason.
        command: its script.
        exit_code, exit_signal: of the batch script, once it has ended.
    """

    id: str
    state: str
    nodes: str = ""
    time_left_s: float | None = None
    ends_at: float | None = None
    preempted_at: float | None = None
    restarts: int = 0
    requeue: bool = True
    reason: str = ""
    command: str = ""
    exit_code: int | None = None
    exit_signal: int | None = None

    @property
    def alive(self) -> bool:
        """Return whether it runs, or may yet."""
        return self.state not in ENDED

    @property
    def cancelled(self) -> bool:
        """Return whether a user has ended it. Call this while its batch script still runs.

        A job that completes by itself, is preempted or out of time has a reason.
        """
        ending = self.state == "COMPLETING" and not self.reason and self.preempted_at is None
        return ending or self.state == "CANCELLED"

    @property
    def waiting(self) -> bool:
        return self.state in WAITING

    @property
    def at_work(self) -> bool:
        """Return whether it runs: RUNNING, for a moment SUSPENDED or RESIZING, or SIGNALING, for as
        long as one of its nodes takes no signal.
        """
        return self.alive and not self.waiting and self.state != "COMPLETING"

    @property
    def held(self) -> bool:
        """Return whether it waits for `scontrol release`, since a node could not start it."""
        return self.waiting and self._reason_key == HELD_AFTER_LAUNCH

    @property
    def _reason_key(self) -> str:
        key = self.reason.lower().replace("_", " ").strip("()")
        return "reservationdeleted" if RESERVATION_DELETED.fullmatch(key) else key

    @property
    def waits_for(self) -> str:
        """Return SLURM's reason for a job that waits, with what the user can do about it."""
        key = self._reason_key
        if key in HELD:
            release = f"it waits for `scontrol release {self.id}`"
            return f"{self.reason}: {HELD[key]}{release}"
        if key in NEVER_STARTS:
            return f"{self.reason}: {NEVER_STARTS[key]}, so it may never start; `cancel` ends it"
        return self.reason

    @property
    def suspended_by(self) -> str:
        """Return what suspended a started job, and what lets it continue; "" for any other."""
        return SUSPENDED.get(self.state, "").format(self.id)


CUT_SHORT = re.compile(r"\d+(_\S*)?\|")


class UnreadableAnswer(SchedulerDown):
    """An answer in another form than SLURM's, as that of a site's wrapper."""


def _rows(command: str, answer: str, columns: int) -> list[list[str]]:
    """Return the rows on jobs in a table, without its header and lines that a wrapper printed.

    Raises:
        UnreadableAnswer: a row is cut short, or there is neither a header nor a row. Such an answer
            cannot report a job as gone.
    """
    lines = [line for line in answer.splitlines() if line.strip()]
    table = [row for line in lines if len(row := line.split("|", columns - 1)) == columns]
    cut_short = [line for line in lines if CUT_SHORT.match(line) and line.count("|") < columns - 1]
    if bad := cut_short or (lines if not table else []):
        raise UnreadableAnswer(
            f"{command} gave no answer that can be read, but this line: {bad[0]}"
        )
    return [row for row in table if row[0][:1].isdigit()]


@contextlib.contextmanager
def _row_of(command: str, row: Sequence[str]) -> Generator[None]:
    """Raise `UnreadableAnswer` if a row cannot be parsed."""
    try:
        yield
    except ValueError as error:
        raise UnreadableAnswer(
            f"{command} gave no answer that can be read, but this line: {'|'.join(row)}"
        ) from error


def _number(text: str) -> float | None:
    return float(text) if text.strip().isdigit() else None


def read_queue(answer: Answer) -> dict[str, ScheduledJob]:
    """Return the jobs in squeue's answer; one whose id is unknown is absent.

    Raises:
        SchedulerDown: it is no answer. Only a scheduler that answers can report a job as gone.
    """
    if answer.code and "invalid job id" in answer.err.lower():  # it says so itself
        return {}
    if answer.code:
        raise SchedulerDown(f"the scheduler gave no answer: {answer.message}")
    jobs: dict[str, ScheduledJob] = {}
    for row in _rows("squeue", answer.out, len(QUEUE_FIELDS)):
        with _row_of("squeue", row):
            values = dict(zip(QUEUE_FIELDS, row, strict=True))
            status = int(values["exit_code"] or 0)  # as `wait` gives it
            restarts = int(values["RestartCnt"] or 0)
        jobs[values["JobArrayID"]] = ScheduledJob(
            id=values["JobArrayID"],
            state=values["State"],
            nodes=values["NodeList"].replace("(null)", ""),
            time_left_s=seconds(values["TimeLeft"]),
            ends_at=_number(values["EndTime"]),
            preempted_at=_number(values["PreemptTime"]),
            restarts=restarts,
            requeue=values["Requeue"] not in ("0", "no"),
            reason="" if values["Reason"] == "None" else values["Reason"],
            command=values["Command"],
            exit_code=status >> 8,
            exit_signal=status & 0x7F,
        )
    return jobs


def _job_list(ids: Collection[str]) -> str:
    """Return the ids as an argument, of several elements of an array the array's: a command line
    holds 128 KiB an argument, less than the ids of 10,000 elements.
    """
    arrays: dict[str, list[str]] = {}
    for job in ids:
        arrays.setdefault(job.partition("_")[0], []).append(job)
    return ",".join(
        array if len(elements) > 1 else elements[0] for array, elements in arrays.items()
    )


def queued(client: SlurmClient, ids: Collection[str]) -> dict[str, ScheduledJob]:
    """Return these jobs by squeue. Raises `SchedulerDown`."""
    jobs = read_queue(client.run(*QUEUE, "-j", _job_list(ids)))
    return {job: jobs[job] for job in ids if job in jobs}


def elements_of(client: SlurmClient, job: str) -> list[ScheduledJob]:
    """Return a job, or the elements of an array, by squeue. Raises `SchedulerDown`."""
    return list(read_queue(client.run(*QUEUE, "-j", job)).values())


def jobs_of_user(client: SlurmClient, user_id: int) -> dict[str, ScheduledJob]:
    """Return all jobs of a user. Raises `SchedulerDown`."""
    return read_queue(client.run(*QUEUE, "-u", str(user_id)))


def _accounting(client: SlurmClient, *options: str) -> str:
    """Return sacct's answer; "" without accounting, or where it lacks a field.

    Raises:
        SchedulerDown: there is accounting, but it does not answer.
    """
    answer = client.run("sacct", "-PXD", *options)
    # SLURM before 21.08 does not keep the line of a submission.
    unknown = ("accounting storage is disabled", "invalid field requested")
    if answer.code and any(phrase in answer.message.lower() for phrase in unknown):
        return ""
    if answer.code:
        raise SchedulerDown(f"the accounting gave no answer: {answer.message}")
    return answer.out


def accounted(client: SlurmClient, ids: Collection[str]) -> dict[str, ScheduledJob]:
    """Return the latest start of these jobs by sacct; {} without accounting.

    Raises:
        SchedulerDown: there is accounting, but it does not answer.
    """
    jobs: dict[str, ScheduledJob] = {}
    listed, wanted = _job_list(ids), frozenset(ids)
    answer = _accounting(client, "-j", listed, "-o", "JobID,State,ExitCode,NodeList")
    for row in _rows("sacct", answer, 4):
        with _row_of("sacct", row):
            job, state, ended, nodes = row
            code, number = map(int, ended.split(":"))
        if job not in wanted:
            continue
        jobs[job] = ScheduledJob(  # later starts of a job follow
            id=job,
            state=state.split(" ", 1)[0],
            nodes=nodes.replace("None assigned", ""),
            exit_code=code,
            exit_signal=number,
        )
    return jobs


def accounted_ends(client: SlurmClient, ids: Collection[str]) -> dict[str, ScheduledJob]:
    """Return those of these jobs, which squeue does not know, that have ended by sacct.

    One that runs by its record has been lost by the controller, or its end is not recorded yet.

    Raises:
        SchedulerDown: there is accounting, but it does not answer.
    """
    return {job_id: job for job_id, job in accounted(client, ids).items() if not job.alive}


def accounted_scripts(client: SlurmClient, user_id: int, *, since: float) -> list[tuple[str, str]]:
    """Return (job or array, sbatch's command) of a user's jobs by sacct; none without accounting.

    Args:
        since: seconds since 1970 of the earliest submission; clocks may differ by a day.

    Raises:
        SchedulerDown: there is accounting, but it does not answer.
    """
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since - 86400))
    scripts: list[tuple[str, str]] = []
    answer = _accounting(client, "-u", str(user_id), "-S", start, "-o", "JobID,SubmitLine")
    for job, submitted in _rows("sacct", answer, 2):
        _, _, script = submitted.partition("sbatch --parsable ")
        if script:
            scripts.append((job.partition("_")[0], script))
    return scripts
