"""SLURM's commands: run with a deadline and a clean environment, their answers as values.

No SLURM_* or SBATCH_* variable of an enclosing job reaches them, except SLURM_CONF, and none of the
user's filters (SQUEUE_STATES, …). Without a controller each command takes about 10 s to fail;
followers therefore use `start` and read the answer later.

squeue knows jobs that are queued, run, or ended a short while ago (MinJobAge). sacct, where there
is accounting, knows the others, and every earlier start of a requeued job.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import ClusterError, NotNow, describe_status

FOREIGN_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SUBMITIT_")
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables of another scheduler or launcher."""
    return {k: v for k, v in env.items() if not k.startswith(FOREIGN_PREFIXES) and k not in FOREIGN}


def own_job_id(env: Mapping[str, str]) -> str:
    """Return this job's id from SLURM's environment; "0" outside a job.

    An element of an array is named by its array: the number in SLURM_JOB_ID is its own in most
    elements, but in one of them that of the whole array, which would be requeued or ended with it.

    >>> own_job_id({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"})
    '7_3'
    """
    if "SLURM_ARRAY_JOB_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID", "0")


TIMEOUT_S = 60.0
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
    "unable to establish controller machine",
    "connect failure",
    "communications connection failure",
    "transport endpoint is not connected",
    "connection reset",
    "munge",  # the credentials' daemon does not answer: no command can be sent
    "protocol authentication error",
    "problem talking to the database",
    "temporarily unable to",
)
MEANINGS = {
    "invalid partition": "there is no such partition; `sinfo` lists those that you may use",
    "invalid account": "the account may not be used here; `sacctmgr show associations` lists yours",
    "invalid qos": "there is no such quality of service for you",
    "node count specification invalid": "cluster.nodes is more than the partition has",
    "requested node configuration is not available": (
        "no node of the partition has what is asked of one: look at cluster.ranks_per_node x "
        "cluster.cpus_per_rank, cluster.memory_gib, cluster.gpus_per_node"
    ),
    "time limit is invalid": "cluster.time_min is above the partition's limit",
    "invalid generic resource": (
        "there is no such resource (GPU, NPU) on this cluster: look at cluster.gpus_per_node and "
        "cluster.slurm_flags.gres"
    ),
    "invalid feature": "no node has what cluster.constraint asks for",
    "reservation is invalid": "there is no such reservation, or it is not yours",
    "invalid node name": "cluster.exclude names a node that does not exist",
    "more processors requested than permitted": (
        "cluster.ranks_per_node x cluster.cpus_per_rank is more than a node has"
    ),
    "violates accounting/qos policy": "a limit of your account stands against it",
}
ELSEWHERE = (
    "SLURM runs are submitted and followed on a machine of the cluster (a login node); without "
    "+cluster=slurm a run is local, and `python -m slurm up` makes a development cluster, for "
    "+cluster=slurm_dev"
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
    def reports_unknown_job(self) -> bool:
        """Return whether the scheduler itself reports that there is no such job."""
        return self.code != 0 and "invalid job id" in self.err.lower()

    @property
    def no_slurm_conf(self) -> bool:
        """Return whether no slurm.conf was found, here or on the network."""
        return self.code != 0 and "could not establish a configuration source" in self.err.lower()

    @property
    def words(self) -> str:
        """Return its error message."""
        return "\n".join(line for line in self.err.splitlines() if line.strip()) or self.out.strip()


def explained(words: str) -> str:
    """Return the scheduler's error message with an explanation."""
    meaning = next((text for phrase, text in MEANINGS.items() if phrase in words.lower()), None)
    return f"the scheduler refuses it: {words}" + (f"\n{meaning}" if meaning else "")


class PendingCommand:
    """A running command."""

    def __init__(self, argv: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self._argv = argv
        self._deadline = time.monotonic() + TIMEOUT_S
        self._out = tempfile.TemporaryFile()  # noqa: SIM115  # a pipe's buffer holds 64 KiB only
        self._process = subprocess.Popen(
            argv, env=dict(environment), stdin=subprocess.DEVNULL, stdout=self._out,
            stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip

    def answer(self) -> Answer | None:
        """Return the answer once there is one."""
        if self._process.poll() is None:
            if time.monotonic() < self._deadline:
                return None
            self.forget()
            return Answer(124, "", f"{self._argv[0]}: socket timed out after {TIMEOUT_S:g} s")
        _, err = self._process.communicate()
        with self._out as file:
            file.seek(0)
            return Answer(self._process.returncode, file.read().decode("utf-8", "replace"), err)

    def forget(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
        self._out.close()


NO_FILE = "there is no such file"


def _unreadable(path: str) -> str | None:
    """Return why a slurm.conf cannot be used from here; None if it can."""
    try:
        with Path(path).open("rb"):
            return None
    except (FileNotFoundError, NotADirectoryError):
        return NO_FILE
    except OSError as error:
        return f"it cannot be read: {error.strerror}"


class SlurmClient:
    """SLURM's commands for one cluster: the one of `slurm_conf`, or the machine's own."""

    def __init__(self, slurm_conf: str | None = None) -> None:
        self._conf = str(Path(slurm_conf).expanduser()) if slurm_conf else None
        # SLURM's commands would look for a file that they cannot read for a minute.
        if self._conf is not None and (why := _unreadable(self._conf)):
            absent = "; for the development cluster run `python -m slurm up` first"
            hint = absent if why == NO_FILE else ""
            raise ClusterError(f"cluster.slurm_conf={slurm_conf}: {why}{hint}")
        told = os.environ.get(CONF)
        if self._conf is None and told is not None and (why := _unreadable(told)):
            raise NoClient(f"{CONF}={told}: {why}; unset it, or correct it")

    def environment(self, command: str) -> dict[str, str]:
        """Return a command's environment: ours, without traces of an enclosing job.

        A job inherits that of sbatch.
        """
        conf = self._conf or os.environ.get(CONF)
        batch = command == "sbatch"
        drop = ("SLURMD_",) if batch else ("SLURMD_", *FILTERS)
        clean = clean_environment(os.environ).items()
        return {
            **{name: value for name, value in clean if not name.startswith(drop)},
            **({CONF: conf} if conf else {}),
            **({} if batch else {"SLURM_TIME_FORMAT": "%s"}),
        }

    def _argv(self, command: tuple[str, ...]) -> tuple[str, ...]:
        if shutil.which(command[0]) is None:
            raise NoClient(f"there is no {command[0]} on this machine: {ELSEWHERE}")
        return command

    def start(self, *command: str) -> PendingCommand:
        """Begin a command without waiting for its answer."""
        return PendingCommand(self._argv(command), self.environment(command[0]))

    def ask(
        self,
        *command: str,
        text: str | None = None,
        timeout_s: float = TIMEOUT_S,
        holding: int | None = None,
    ) -> Answer:
        """Run a command to its end. Raises `SchedulerDown` without an answer.

        Args:
            holding: a descriptor that it keeps open for as long as it runs, even if this process
                ends. A Ctrl-C at our terminal does not reach it then.
        """
        argv = self._argv(command)
        own: dict[str, Any] = {"timeout": timeout_s}
        if holding is not None:
            own |= {"pass_fds": (holding,), "start_new_session": True}
        try:
            done = subprocess.run(
                argv, input=text or "", env=self.environment(command[0]), capture_output=True,
                text=True, errors="replace", check=False, **own,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise SchedulerDown(f"{command[0]} did not answer within {timeout_s:g} s") from error
        answer = Answer(done.returncode, done.stdout, done.stderr)
        if answer.no_slurm_conf:
            raise NoClient(f"this machine has {command[0]}, but belongs to no cluster: {ELSEWHERE}")
        if answer.down:
            raise SchedulerDown(f"the scheduler does not answer: {answer.words}")
        return answer

    def cluster_name(self) -> str:
        """Return the name of this cluster among others. Raises `ClusterError`."""
        shown = self.must("scontrol", "show", "config")
        found = re.search(r"^ClusterName\s*=\s*(\S+)", shown, re.MULTILINE)
        return found[1] if found else ""

    def must(self, *command: str) -> str:
        """Return a command's standard output. Raises `ClusterError` if it fails."""
        answer = self.ask(*command)
        if answer.code:
            raise ClusterError(f"{' '.join(command)}: {answer.words}")
        return answer.out


QUEUE_FORMAT = "%i|%T|%N|%L|%M|%S|%r|%o"
ACCOUNT_FORMAT = "JobID,State,ExitCode,NodeList,Start,End"
# Columns of one job and their widths: a name or a comment can hold any text, a column only its own.
JOB_FIELDS = {
    "State": 24, "RestartCnt": 12, "Requeue": 8, "PreemptTime": 24, "EndTime": 24, "exit_code": 12,
    "Reason": 64,
}  # fmt: skip
SPAN = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
ALIVE = frozenset({
    "PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING",
    "SIGNALING", "STAGE_OUT", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT",
})  # fmt: skip
# A node could not start the job (its prolog failed, say, or it still had the job's last start):
# SLURM queues it again and holds it until `scontrol release`.
HELD_AFTER_LAUNCH = "launch failed requeued held"
# States that stop a whole job, so that its ranks stand still.
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
        state: SLURM's state, as in RUNNING, without sacct's additions ("CANCELLED by 0").
        nodes: the node list in SLURM's notation; "" while it is pending.
        time_left_s: until the time limit; None when there is none or it is not known.
        start: seconds since 1970 of its start, or of the start that the scheduler expects.
        reason: why it is pending.
        exit_code, exit_signal: of the batch script, once it has ended.
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
        """Return whether it runs, or may yet."""
        return self.state in ALIVE

    @property
    def waiting(self) -> bool:
        return self.state in WAITING

    @property
    def held(self) -> bool:
        """Return whether it waits for `scontrol release`, since a node could not start it."""
        return self.waiting and self.reason.lower().replace("_", " ") == HELD_AFTER_LAUNCH

    @property
    def standstill(self) -> str:
        """Return why a started job does nothing, and what lets it continue; "" for any other."""
        return STANDSTILL.get(self.state, "").format(self.id)


def seconds(span: str) -> float | None:
    """Parse SLURM's [days-][hours:]minutes:seconds; None for UNLIMITED, N/A and the like.

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
    """Return the jobs in squeue's answer; one whose id is unknown is absent.

    Raises:
        SchedulerDown: it is no answer. Only a scheduler that answers can report a job as gone.
    """
    _require_answer(answer)
    jobs: dict[str, Job] = {}
    for line in answer.out.splitlines() if answer.code == 0 else ():
        job, state, nodes, left, _, start, reason, command = line.split("|", 7)
        jobs[job] = Job(
            id=job, state=state, nodes=nodes.replace("(null)", ""), time_left_s=seconds(left),
            start=_number(start), reason="" if reason == "None" else reason, command=command,
        )  # fmt: skip
    return jobs


def _require_answer(answer: Answer) -> None:
    """Raise `SchedulerDown` unless the scheduler answered, be it that it knows no such job."""
    if answer.code and not answer.reports_unknown_job:
        raise SchedulerDown(f"the scheduler gave no answer: {answer.words}")


def queue_command(ids: Iterable[str]) -> tuple[str, ...]:
    return ("squeue", "-h", "-a", "-r", "-t", "all", "-j", ",".join(ids), "-o", QUEUE_FORMAT)


def queued(client: SlurmClient, ids: Iterable[str]) -> dict[str, Job]:
    """Return these jobs by squeue. Raises `SchedulerDown`."""
    return read_queue(client.ask(*queue_command(ids)))


def queue_of_user(user_id: int) -> tuple[str, ...]:
    """Return the command for all jobs of a user."""
    return ("squeue", "-h", "-a", "-r", "-t", "all", "-u", str(user_id), "-o", QUEUE_FORMAT)


def mine(client: SlurmClient, user_id: int) -> dict[str, Job]:
    """Return all jobs of a user. Raises `SchedulerDown`."""
    return read_queue(client.ask(*queue_of_user(user_id)))


def accounted(client: SlurmClient, ids: Iterable[str]) -> dict[str, list[Job]] | None:
    """Return every run of these jobs by sacct, oldest first; None without accounting.

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
    """Return (job or array, sbatch's command) of a user's jobs by sacct; none without accounting.

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
class JobStatus:
    """Status of one job for its own batch script and ranks. Times: seconds since 1970.

    Attributes:
        state: SLURM's state; COMPLETING hides the final one.
        restarts: how often it was restarted, or is about to be.
        requeue: whether it may be.
        preempted_at: when it was chosen for preemption; None when it was not.
        ends_at: its time limit, or when a preempted one is ended; None when there is no limit.
        exit_code, exit_signal: of its batch script, once that has ended.
        reason: why it is in this state; "" without a reason.
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
        """Return whether a user has ended it. Call this while its batch script still runs.

        A job that completes by itself, is preempted or out of time has a reason.
        """
        ending = self.state == "COMPLETING" and not self.reason and self.preempted_at is None
        return ending or self.state == "CANCELLED"


def read_job_status(text: str) -> JobStatus | None:
    """Parse one line of squeue's answer to `job_status_command`; None when it is empty."""
    line = next((line for line in text.splitlines() if line.strip()), None)
    if line is None:
        return None
    values: dict[str, str] = {}
    for name, width in JOB_FIELDS.items():
        values[name], line = line[:width].strip(), line[width:]
    status = int(values["exit_code"] or 0)  # as `wait` gives it
    return JobStatus(
        state=values["State"],
        restarts=int(values["RestartCnt"] or 0),
        requeue=values["Requeue"] not in ("0", "no"),
        preempted_at=_number(values["PreemptTime"]),
        ends_at=_number(values["EndTime"]),
        exit_code=status >> 8,
        exit_signal=status & 0x7F,
        reason="" if values["Reason"] == "None" else values["Reason"],
    )


def job_status_command(job: str) -> tuple[str, ...]:
    columns = ",".join(f"{name}:{width}" for name, width in JOB_FIELDS.items())
    return ("squeue", "-h", "-a", "-r", "-t", "all", "-j", job, "-O", columns)


def job_status(client: SlurmClient, job: str) -> JobStatus | None:
    """Return a job's status; None if the controller no longer knows it. Raises `SchedulerDown`."""
    answer = client.ask(*job_status_command(job))
    _require_answer(answer)
    return read_job_status(answer.out) if answer.code == 0 else None


EXITED = re.compile(r"Exited with exit code (\d+)")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
STOP_CODES = frozenset(128 + number for number in STOP_SIGNALS)
SIGNALS = {text: number for number in signal.valid_signals() if (text := signal.strsignal(number))}
TASKS = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,\-]+): (?P<what>.+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskEnd:
    """srun's message on the end of one task."""

    rank: int
    node: str
    what: str

    @property
    def words(self) -> str:
        """Describe the end as `describe_status` does."""
        code = EXITED.fullmatch(self.what)
        if code is not None:
            return describe_status(int(code[1]))
        number = SIGNALS.get(self.what.removesuffix(" (core dumped)"))
        return describe_status(-number) if number else f"ended: {self.what}"


def numbers(listed: str) -> Iterator[int]:
    """Parse SLURM's list of numbers.

    >>> list(numbers("0,2-4"))
    [0, 2, 3, 4]
    """
    for part in listed.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def task_ends(log: str) -> list[TaskEnd]:
    """Return every abnormal end of a task in srun's log, in the log's order."""
    return [
        TaskEnd(rank=rank, node=found["node"], what=found["what"].strip())
        for found in TASKS.finditer(log)
        for rank in numbers(found["tasks"])
    ]
