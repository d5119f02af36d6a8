"""What the scheduler says of jobs: one call for any number of them, read into plain values.

squeue knows what is queued, runs, or ended a short while ago (MinJobAge); sacct knows the rest, and
every earlier run of a requeued job, where there is accounting.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.submit.slurm_client import Answer, SlurmClient

QUEUE_FORMAT = "%i|%T|%N|%L|%M|%S|%r|%o"
ACCOUNT_FORMAT = "JobIDRaw,State,ExitCode,NodeList,Start,End"
SPAN = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
ALIVE = frozenset({
    "PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING",
    "SIGNALING", "STAGE_OUT", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT",
})  # fmt: skip
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
    """The jobs in squeue's answer. An unknown id makes it an error; that job is then absent."""
    jobs: dict[str, Job] = {}
    for line in answer.out.splitlines() if answer.code == 0 else ():
        job, state, nodes, left, _, start, reason, command = line.split("|", 7)
        jobs[job] = Job(
            id=job, state=state, nodes=nodes.replace("(null)", ""), time_left_s=seconds(left),
            start=_number(start), reason="" if reason == "None" else reason, command=command,
        )  # fmt: skip
    return jobs


def queue_command(ids: Iterable[str]) -> tuple[str, ...]:
    return ("squeue", "-h", "-a", "-t", "all", "-j", ",".join(ids), "-o", QUEUE_FORMAT)


def queued(client: SlurmClient, ids: Iterable[str]) -> dict[str, Job]:
    """What squeue knows of these jobs. Raises `SchedulerDown`."""
    return read_queue(client.ask(*queue_command(ids)))


def mine(client: SlurmClient, user_id: int) -> dict[str, Job]:
    """All jobs of a user. Raises `SchedulerDown`."""
    return read_queue(
        client.ask("squeue", "-h", "-a", "-t", "all", "-u", str(user_id), "-o", QUEUE_FORMAT)
    )


def accounted(client: SlurmClient, ids: Iterable[str]) -> dict[str, list[Job]] | None:
    """Every run of these jobs by sacct, oldest first; None where there is no accounting."""
    answer = client.ask("sacct", "-nPXD", "-j", ",".join(ids), "-o", ACCOUNT_FORMAT)
    if answer.code:
        return None
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


def shown(client: SlurmClient, job: str) -> dict[str, str]:
    """`scontrol show job` as a table; empty when the controller has forgotten the job."""
    answer = client.ask("scontrol", "--oneliner", "show", "job", job)
    pairs = (word.split("=", 1) for word in answer.out.split() if "=" in word)
    return dict(pairs) if answer.code == 0 else {}
