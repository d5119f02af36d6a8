"""What the scheduler says of jobs: one call for any number of them, read into plain values.

squeue knows what is queued, runs, or ended a short while ago (MinJobAge); sacct knows the rest, and
every earlier run of a requeued job, where there is accounting.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.scheduler.client import Answer, SchedulerDown, SlurmClient

QUEUE_FORMAT = "%i|%T|%N|%L|%M|%S|%r|%o"
ACCOUNT_FORMAT = "JobID,State,ExitCode,NodeList,Start,End"
# Columns of one job and their widths: a name or a comment can hold any text, a column only its own.
STANDING = {
    "State": 24, "RestartCnt": 12, "Requeue": 8, "PreemptTime": 24, "EndTime": 24, "exit_code": 12,
    "Reason": 64,
}  # fmt: skip
SPAN = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
ALIVE = frozenset({
    "PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING",
    "SIGNALING", "STAGE_OUT", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT",
})  # fmt: skip
# A node could not start the job (its prolog failed, say, or it still had the job's last start):
# SLURM queues it again and holds it for good, until somebody says `scontrol release`.
HELD_AFTER_LAUNCH = "launch failed requeued held"
# What stops a whole job, and with it all that would see its ranks stand still.
STANDSTILL = {
    "STOPPED": "all of it was stopped (scancel -s STOP); `scancel -s CONT {}` lets it go on",
    "SUSPENDED": (
        "suspended, for a job that goes first or by hand; it goes on as it is when that has ended, "
        "or an administrator says `scontrol resume {}`"
    ),
}
WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job as the scheduler sees it.

    Attributes:
        state: SLURM's word, as in RUNNING, without what sacct adds to it ("CANCELLED by 0").
        nodes: the node list in SLURM's notation; "" while it is pending.
        time_left_s: until the time limit; None when there is none or it is not known.
        start: seconds since 1970 of its start, or of the start that the scheduler expects.
        reason: why it is pending.
        exit_code, exit_signal: of the batch script, where it has ended.
    """

    id: str
    state: str
    nodes: str = ""
    time_left_s: float | None = None
    start: float | None = None
    reason: str = ""
    command: str = ""
    exit_code: int | None = None
    exit_signal: int | None = None

    @property
    def alive(self) -> bool:
        """Whether it runs, or may yet."""
        return self.state in ALIVE

    @property
    def waiting(self) -> bool:
        return self.state in WAITING

    @property
    def held(self) -> bool:
        """Whether it waits for a person, since a node could not start it."""
        return self.waiting and self.reason.lower().replace("_", " ") == HELD_AFTER_LAUNCH

    @property
    def standstill(self) -> str:
        """Why a job that was started does nothing, and what lets it go on; "" of any other."""
        return STANDSTILL.get(self.state, "").format(self.id)


def seconds(span: str) -> float | None:
    """SLURM's [days-][hours:]minutes:seconds; None for UNLIMITED, N/A and the like.

    >>> seconds("1-02:03:04"), seconds("0:59"), seconds("UNLIMITED")
    (93784.0, 59.0, None)
    """
    found = SPAN.fullmatch(span.strip())
    if found is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)


def _number(text: str) -> float | None:
    return float(text) if text.strip().isdigit() else None


def read_queue(answer: Answer) -> dict[str, Job]:
    """The jobs in squeue's answer; one whose id is unknown is absent.

    Raises:
        SchedulerDown: it is no answer. Only a scheduler that answers can say that a job is gone.
    """
    _heed(answer)
    jobs: dict[str, Job] = {}
    for line in answer.out.splitlines() if answer.code == 0 else ():
        job, state, nodes, left, _, start, reason, command = line.split("|", 7)
        jobs[job] = Job(
            id=job, state=state, nodes=nodes.replace("(null)", ""), time_left_s=seconds(left),
            start=_number(start), reason="" if reason == "None" else reason, command=command,
        )  # fmt: skip
    return jobs


def _heed(answer: Answer) -> None:
    """Raises `SchedulerDown` unless it is the scheduler's word on jobs, be it "I know of none"."""
    if answer.code and not answer.knows_no_such_job:
        raise SchedulerDown(f"the scheduler gave no answer: {answer.words}")


def queue_command(ids: Iterable[str]) -> tuple[str, ...]:
    return ("squeue", "-h", "-a", "-r", "-t", "all", "-j", ",".join(ids), "-o", QUEUE_FORMAT)


def queued(client: SlurmClient, ids: Iterable[str]) -> dict[str, Job]:
    """What squeue knows of these jobs. Raises `SchedulerDown`."""
    return read_queue(client.ask(*queue_command(ids)))


def queue_of_user(user_id: int) -> tuple[str, ...]:
    """The command that tells of all jobs of a user."""
    return ("squeue", "-h", "-a", "-r", "-t", "all", "-u", str(user_id), "-o", QUEUE_FORMAT)


def mine(client: SlurmClient, user_id: int) -> dict[str, Job]:
    """All jobs of a user. Raises `SchedulerDown`."""
    return read_queue(client.ask(*queue_of_user(user_id)))


def accounted(client: SlurmClient, ids: Iterable[str]) -> dict[str, list[Job]] | None:
    """Every run of these jobs by sacct, oldest first; None where there is no accounting.

    Raises:
        SchedulerDown: there is, but it does not answer.
    """
    answer = client.ask("sacct", "-nPXD", "-j", ",".join(ids), "-o", ACCOUNT_FORMAT)
    if answer.code and "accounting storage is disabled" in answer.words.lower():
        return None
    if answer.code:
        raise SchedulerDown(f"the accounting gave no answer: {answer.words}")
    runs: dict[str, list[Job]] = {}
    for line in answer.out.splitlines():
        job, state, code, nodes, start, _ = line.split("|", 5)
        status, _, number = code.partition(":")
        runs.setdefault(job, []).append(
            Job(
                id=job,
                state=state.split(" ", 1)[0],
                nodes=nodes.replace("None assigned", ""),
                start=_number(start),
                exit_code=int(status),
                exit_signal=int(number or 0),
            )
        )
    return runs


def accounted_scripts(client: SlurmClient, user_id: int, *, since: float) -> list[tuple[str, str]]:
    """(job or array, what sbatch was given) of a user's jobs by sacct; none without accounting.

    Args:
        since: seconds since 1970 of the earliest submission; clocks may differ by a day.

    Raises:
        SchedulerDown: there is accounting, but it does not answer.
    """
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since - 86400))
    answer = client.ask("sacct", "-nPXD", "-u", str(user_id), "-S", start, "-o", "JobID,SubmitLine")
    if answer.code and "accounting storage is disabled" in answer.words.lower():
        return []
    if answer.code:
        raise SchedulerDown(f"the accounting gave no answer: {answer.words}")
    found: list[tuple[str, str]] = []
    for line in answer.out.splitlines():
        job, _, submitted = line.partition("|")
        _, _, script = submitted.partition("sbatch --parsable ")
        if script:
            found.append((job.partition("_")[0], script))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """One job as its own batch script and ranks need to know it. Times: seconds since 1970.

    Attributes:
        state: SLURM's word; COMPLETING hides what it will be.
        restarts: how often it was started again, or is about to be.
        requeue: whether it may be.
        preempted_at: when it was chosen to make room; None when it was not.
        ends_at: its time limit, or when a preempted one is ended; None when there is no limit.
        exit_code, exit_signal: of its batch script, once that has ended.
        reason: why it is in this state; "" when there is nothing to say.
    """

    state: str
    restarts: int = 0
    requeue: bool = True
    preempted_at: float | None = None
    ends_at: float | None = None
    exit_code: int = 0
    exit_signal: int = 0
    reason: str = ""

    @property
    def cancelled(self) -> bool:
        """Whether a person has ended it: a job that completes by itself has a reason to, and one
        that is preempted or out of time too. To be asked while its batch script still runs.
        """
        ending = self.state == "COMPLETING" and not self.reason and self.preempted_at is None
        return ending or self.state == "CANCELLED"


def read_standing(text: str) -> Standing | None:
    """One line of squeue's answer to `standing_command`; None when it is empty."""
    line = next((line for line in text.splitlines() if line.strip()), None)
    if line is None:
        return None
    values: dict[str, str] = {}
    for name, width in STANDING.items():
        values[name], line = line[:width].strip(), line[width:]
    status = int(values["exit_code"] or 0)  # as `wait` gives it
    return Standing(
        state=values["State"],
        restarts=int(values["RestartCnt"] or 0),
        requeue=values["Requeue"] not in ("0", "no"),
        preempted_at=_number(values["PreemptTime"]),
        ends_at=_number(values["EndTime"]),
        exit_code=status >> 8,
        exit_signal=status & 0x7F,
        reason="" if values["Reason"] == "None" else values["Reason"],
    )


def standing_command(job: str) -> tuple[str, ...]:
    columns = ",".join(f"{name}:{width}" for name, width in STANDING.items())
    return ("squeue", "-h", "-a", "-r", "-t", "all", "-j", job, "-O", columns)


def standing(client: SlurmClient, job: str) -> Standing | None:
    """How a job stands; None when the controller knows it no more. Raises `SchedulerDown`."""
    answer = client.ask(*standing_command(job))
    _heed(answer)
    return read_standing(answer.out) if answer.code == 0 else None
