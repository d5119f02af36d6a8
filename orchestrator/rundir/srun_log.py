"""Ends of nodes and tasks in the logs of srun and of the batch script."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.errors import describe_status
from orchestrator.rundir.files import read_end, read_json
from orchestrator.rundir.folder import RunDir

EXITED = re.compile(r"Exited with exit code (\d+)")
STOP_CODES = frozenset(128 + n for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))
SIGNALS = {text: number for number in signal.valid_signals() if (text := signal.strsignal(number))}
SRUN_LOG_BYTES = 2**20
NODE_FAILURE = re.compile(
    r"srun: error: ((Node failure|Task launch for .* failed) on (node )?(?P<name>[^\s:]+)"
    r"|.*(missing step on|Cannot communicate with) node (?P<number>\d+))"
)
CANCELLED = re.compile(
    r"\*\*\* JOB \S+ ON \S+ CANCELLED AT (?P<time>[\d:T-]+) DUE TO (?P<why>[A-Z ]+)"
)
REQUEUED_BY_OTHERS = "requeued (scontrol requeue, or a node that failed or was set down)"
CANCELLED_BECAUSE = {
    "JOB REQUEUE": REQUEUED_BY_OTHERS,
    "NODE FAILURE": "a node failed",
    "PREEMPTION": "preempted",
    "TIME LIMIT": "near its time limit",
}
TASKS = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,\-]+): (?P<what>.+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskExit:
    """srun's message on the end of one task."""

    rank: int
    node: str
    what: str

    @property
    def status(self) -> int | None:
        """Return its exit code, or the negative number of the signal; None if unknown."""
        if code := EXITED.fullmatch(self.what):
            return int(code[1]) if int(code[1]) != 128 + signal.SIGKILL else -signal.SIGKILL
        number = SIGNALS.get(self.what.removesuffix(" (core dumped)"))
        return -number if number else None

    @property
    def killed(self) -> bool:
        """Return whether SIGKILL has ended it, or the agent whose parent it was."""
        return self.status == -signal.SIGKILL

    @property
    def description(self) -> str:
        """Describe the end as `describe_status` does."""
        return f"ended: {self.what}" if self.status is None else describe_status(self.status)


def numbers(listed: str) -> Iterator[int]:
    """Parse SLURM's list of numbers.

    >>> list(numbers("0,2-4"))
    [0, 2, 3, 4]
    """
    for part in listed.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def failed_node(run: RunDir, attempt: int, names: Sequence[str] = ()) -> str | None:
    """Return the name of a node that failed, by srun's log, or its number if that is all that is
    known; None if none did.

    Args:
        names: of the attempt's nodes, where they are known: a node that failed at once has left no
            file with its name.
    """
    try:
        log = read_end(run.srun_log(attempt), SRUN_LOG_BYTES).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return None
    if (match := NODE_FAILURE.search(log)) is None:
        return None
    name = match["name"]
    if name is None:
        number = int(match["number"])
        name = (read_json(run.node_ranks(attempt, number)) or {}).get("node")
        name = names[number] if name is None and number < len(names) else name
    return str(name or match["number"])


def node_failure(run: RunDir, attempt: int, names: Sequence[str] = ()) -> str | None:
    """Describe the failure of a node that srun's log reports (`failed_node`); else None."""
    node = failed_node(run, attempt, names)
    return None if node is None else f"node {node} failed"


def cancellation(run: RunDir, attempt: int) -> str | None:
    """Return why SLURM has ended the job during an attempt, by its script's log; else None."""
    began = min((path.stat().st_mtime for path in run.attempt(attempt).iterdir()), default=0.0)
    try:
        log = read_end(run.batch_log, SRUN_LOG_BYTES).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return None
    lines = list(CANCELLED.finditer(log))
    if not lines:
        return None
    at = time.mktime(time.strptime(lines[-1]["time"], "%Y-%m-%dT%H:%M:%S"))
    return CANCELLED_BECAUSE.get(lines[-1]["why"].strip()) if at >= int(began) else None


def task_exits(log: str) -> list[TaskExit]:
    """Return every abnormal end of a task in srun's log, in the log's order."""
    return [
        TaskExit(rank=rank, node=match["node"], what=match["what"].strip())
        for match in TASKS.finditer(log)
        for rank in numbers(match["tasks"])
    ]
