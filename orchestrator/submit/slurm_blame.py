"""Who failed first in a SLURM job: from the ranks' own reports, and from what srun said of them.

A rank that raised has written its failure. One that was killed could not; srun names it, and says
whether it was for want of memory. The others fail an instant later because of it.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.rundir import RunDir
from orchestrator.submit.api import Culprit
from orchestrator.submit.blame import TAIL_LINES, describe_status, tail

EXITED = re.compile(r"Exited with exit code (\d+)")
SIGNALS = {text: number for number in signal.valid_signals() if (text := signal.strsignal(number))}
TASKS = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,\-]+): (?P<what>.+)")
OUT_OF_MEMORY = re.compile(
    r"MemoryError|OutOfMemoryError|out of memory|oom-kill|Out Of Memory|cannot allocate memory",
    re.IGNORECASE,
)
KERNEL_OUT_OF_MEMORY = re.compile(r"oom[-_ ]kill|Out Of Memory", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskEnd:
    """srun's word on one task."""

    rank: int
    node: str
    what: str

    @property
    def words(self) -> str:
        """In our words, which are those of `describe_status`."""
        code = EXITED.fullmatch(self.what)
        if code is not None:
            return describe_status(int(code[1]))
        number = SIGNALS.get(self.what.removesuffix(" (core dumped)"))
        return describe_status(-number) if number else f"ended: {self.what}"


def numbers(listed: str) -> Iterator[int]:
    """SLURM's list of numbers.

    >>> list(numbers("0,2-4"))
    [0, 2, 3, 4]
    """
    for part in listed.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def task_ends(log: str) -> list[TaskEnd]:
    """Every task that srun says ended badly, in the order in which it says so."""
    return [
        TaskEnd(rank=rank, node=found["node"], what=found["what"].strip())
        for found in TASKS.finditer(log)
        for rank in numbers(found["tasks"])
    ]


def _read(path: Path) -> str:
    return "\n".join(tail(path, 400))


def blame_slurm(run: RunDir, attempt: int, node_of: Mapping[int, str], code: int) -> Culprit:
    """The culprit of a failed attempt.

    Args:
        node_of: name of each rank's node, as far as it is known.
        code: srun's exit code.
    """
    failures = {f["rank"]: f for f in run.failures(attempt)}
    primary = [f for f in failures.values() if not f["secondary"]]
    said = _read(run.srun_log(attempt))
    ends = task_ends(said)
    silent = [e for e in ends if e.rank not in failures]  # they had no time to say why
    if primary:
        return _reported(run, min(primary, key=lambda f: f["time"]))
    if silent:
        end = silent[0]
        node = node_of.get(end.rank, end.node)
        cause = end.words
        if KERNEL_OUT_OF_MEMORY.search(end.what) or KERNEL_OUT_OF_MEMORY.search(said):
            cause = f"out of memory, killed by the kernel ({end.words}); {MEMORY_REMEDY}"
        return Culprit(rank=end.rank, node=node, cause=cause, log_tail=_log(run, end.rank, node_of))
    if failures:
        return _reported(run, min(failures.values(), key=lambda f: f["time"]))
    return _unreported(run, ends, node_of, said, code)


MEMORY_REMEDY = "more accumulation.steps make the micro-batches smaller"


def _reported(run: RunDir, failure: Mapping[str, Any]) -> Culprit:
    cause = str(failure["cause"])
    if OUT_OF_MEMORY.search(cause):
        cause = f"out of memory: {cause}; {MEMORY_REMEDY}"
    return Culprit(
        rank=failure["rank"], node=failure["node"], cause=cause,
        log_tail=tail(run.rank_log(failure["rank"])), usage=failure["usage"],
    )  # fmt: skip


def _unreported(
    run: RunDir, ends: list[TaskEnd], node_of: Mapping[int, str], said: str, code: int
) -> Culprit:
    """Nobody got as far as reporting: the interpreter, an import, or srun itself failed."""
    lines = tuple(line for line in said.splitlines() if line.strip())
    if ends:
        end = ends[0]
        return Culprit(
            rank=end.rank,
            node=node_of.get(end.rank, end.node),
            cause=f"{end.words}, before it began",
            log_tail=_log(run, end.rank, node_of) or lines[-TAIL_LINES:],
        )
    lines = lines or tail(run.batch_log)
    cause = f"srun ended with code {code}" + (f": {lines[-1]}" if lines else "")
    return Culprit(rank=None, node="batch", cause=cause, log_tail=lines[-TAIL_LINES:])


def _log(run: RunDir, rank: int, node_of: Mapping[int, str]) -> tuple[str, ...]:
    """The end of what a rank said: in its own log, or before it had one, in its node's."""
    nodes = list(dict.fromkeys(node_of.values()))
    node = node_of.get(rank)
    index = nodes.index(node) if node in nodes else 0
    return tail(run.rank_log(rank)) or tail(run.node_log(f"node{index}"))
