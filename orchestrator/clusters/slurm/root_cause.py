"""Who failed first in a SLURM job: from the ranks' own reports, and from what srun said of them.

A rank that raised has written its failure. One that was killed could not; srun names it, and says
whether it was for want of memory. The others fail an instant later because of it.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.agent.root_cause import (
    TAIL_LINES,
    TAKEN_AWAY,
    WORDLESS,
    behind_of,
    beside_finished,
    of_behind,
    tail,
    told_with_waits,
)
from orchestrator.clusters.api import Culprit
from orchestrator.errors import EXIT_FINISHED, EXIT_STOPPED, FENCED_RANK, describe_status
from orchestrator.lifecycle.signs.heartbeat import read_waits
from orchestrator.lifecycle.signs.last_word import all_wordless, ended_with
from orchestrator.lifecycle.signs.node_watch import FINISHED
from orchestrator.lifecycle.survival.record import GenerationRecord, to_blame
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import read_progress
from orchestrator.slurm_client import TaskEnd, task_ends
from orchestrator.trainer.failure import MEMORY

KILLED = 128 + signal.SIGKILL
OUT_OF_MEMORY = re.compile(
    r"MemoryError|OutOfMemoryError|out of memory|oom-kill|Out Of Memory|cannot allocate memory",
    re.IGNORECASE,
)
EXCEPTION_LINES = 3
MOST_ASKED = 64  # nodes, of what their first ranks waited for
EXCEPTION = re.compile(r"[\w.]+(?:Error|Exception|Exit|Interrupt)\b")
KERNEL_OUT_OF_MEMORY = re.compile(r"oom[-_ ]kill|Out Of Memory", re.IGNORECASE)


def stopped_only(run: RunDir, attempt: int) -> bool:
    """Whether no task ended otherwise than by a stop signal: then srun's code, which is the highest
    of theirs, speaks for all. A task that crashes makes srun stop the others, whose code is higher.
    """
    return all(end.stopped for end in task_ends(read_said(run, attempt)))


def srun_ended(run: RunDir, attempt: int) -> str | None:
    """How srun itself was ended by a signal, which is no rank's fault; None when it was not."""
    said = read_said(run, attempt)
    if "srun: forcing job termination" in said:
        return "srun was told to end the job"
    if task_ends(said) or KERNEL_OUT_OF_MEMORY.search(said):
        return None
    return "srun was killed"


def describe_code(code: int) -> str:
    """A code as a shell gives it.

    >>> describe_code(137), describe_code(1)
    ('was killed by signal 9 (SIGKILL)', 'ended with code 1')
    """
    return f"was {describe_status(128 - code)}" if code > 128 else f"ended with code {code}"


def read_said(run: RunDir, attempt: int) -> str:
    """What srun said of an attempt's step, as far as it can matter."""
    return "\n".join(tail(run.srun_log(attempt), 400))


def survived(end: TaskEnd) -> bool:
    """Whether others go on without it (`run.survive`), once they have begun to train."""
    return end.signal in TAKEN_AWAY or end.words == describe_status(FENCED_RANK)


def _unsurvived(record: GenerationRecord, ends: Sequence[TaskEnd]) -> Sequence[TaskEnd]:
    """The ends that the attempt's own can be due to, losses that nobody survived included."""
    if not record.begun:
        return ends
    own = [end for end in ends if not survived(end)]
    return own or to_blame(ends, lambda end: [end.rank], record.losses()) or ends


def _unsaid(
    run: RunDir, attempt: int, record: GenerationRecord, told: set[int]
) -> tuple[int, str] | None:
    """The first rank, and its node, that the attempt's end can be due to, and that ended without a
    word of anybody: its own, or srun's.

    Args:
        told: ranks that there is a word of.
    """
    silent = all_wordless(run, attempt)
    if record.begun:
        both = {**dict.fromkeys(told, ""), **dict(silent)}
        due = to_blame(both, lambda rank: [rank], record.losses())
        silent = [one for one in silent if one[0] in due]
    return next((one for one in silent if one[0] not in told), None)


def blame_slurm(run: RunDir, attempt: int, node_of: Mapping[int, str], code: int) -> Culprit:
    """The culprit of a failed attempt; of one that hangs, also what others waited for.

    Args:
        node_of: name of each rank's node, as far as it is known.
        code: srun's exit code.
    """
    culprit = _blamed(run, attempt, node_of, code)
    return told_with_waits(culprit, _waits(run, attempt)) if culprit.hangs else culprit


def _waits(run: RunDir, attempt: int) -> dict[int, str]:
    """What each node's first rank waited for last."""
    found: dict[int, str] = {}
    for path in sorted(run.attempt(attempt).glob("node-*.json"))[:MOST_ASKED]:
        ranks = (run.read(path) or {}).get("ranks")
        if ranks:
            index = int(path.stem.partition("-")[2])
            found[ranks[0]] = read_waits(run.heartbeat(attempt, index))
    return found


def _blamed(run: RunDir, attempt: int, node_of: Mapping[int, str], code: int) -> Culprit:
    failures = {f["rank"]: f for f in run.failures(attempt)}
    primary = [f for f in failures.values() if not f["secondary"]]
    said = read_said(run, attempt)
    every, record = task_ends(said), GenerationRecord(run.attempt(attempt))
    ends = _unsurvived(record, every)
    # Those that had no time to say why; those that were only stopped after another come last.
    silent = sorted((e for e in ends if e.rank not in failures), key=lambda e: e.stopped)
    if primary:
        return _reported(run, min(primary, key=lambda f: f["time"]))
    # srun names all whose code is not 0, unless it was killed itself.
    told = {*failures, *(end.rank for end in every)}
    left = None if code == KILLED and not ends else _unsaid(run, attempt, record, told)
    if left is not None:
        return _left(run, *left)
    stood = run.all_behind(attempt) if failures else []
    if stood and all(end.stopped or end.signal is None for end in silent):
        first = min(stood, key=lambda one: one["since"])
        return of_behind(run, behind_of(first["rank"], first["node"], first))
    if silent and not (failures and silent[0].stopped):
        began = bool(failures) or read_progress(run.progress(attempt)) is not None
        return silent_end(run, silent[0], node_of, said, began=began)
    if failures:
        first = _reported(run, min(failures.values(), key=lambda f: f["time"]))
        finished = ended_with(run, attempt, FINISHED)
        return replace(beside_finished(first, finished), hangs=not finished)
    lines = tuple(line for line in said.splitlines() if line.strip()) or tail(run.batch_log)
    cause = f"srun {describe_code(code)}" + (f": {lines[-1]}" if lines else "")
    return Culprit(rank=None, node="batch", cause=cause, log_tail=lines[-TAIL_LINES:])


def _left(run: RunDir, rank: int, node: str) -> Culprit:
    """A rank that ended with code 0 and without a word."""
    cause = describe_status(EXIT_FINISHED) + WORDLESS
    return Culprit(rank=rank, node=node, cause=cause, log_tail=tail(run.rank_log(rank)))


def _reported(run: RunDir, failure: Mapping[str, Any]) -> Culprit:
    cause = str(failure["cause"])
    if OUT_OF_MEMORY.search(cause):
        cause = f"out of memory: {cause}"  # and what to do, said by the rank
    return Culprit(
        rank=failure["rank"], node=failure["node"], cause=cause,
        log_tail=tail(run.rank_log(failure["rank"])), usage=failure["usage"],
        hangs=failure.get("hangs", False),
    )  # fmt: skip


def silent_end(
    run: RunDir, end: TaskEnd, node_of: Mapping[int, str], said: str, *, began: bool
) -> Culprit:
    """A rank that left no report: it was killed, or did not get as far as being able to report."""
    log = _log(run, end.rank, node_of)
    cause = end.words
    if KERNEL_OUT_OF_MEMORY.search(end.what) or KERNEL_OUT_OF_MEMORY.search(said):
        cause = f"out of memory, killed by the kernel ({end.words}); {MEMORY}"
    elif not began:
        log = log or tuple(line for line in said.splitlines() if line.strip())[-TAIL_LINES:]
        cause += f" before the first update{_last_word(log)}"
    elif end.words == describe_status(EXIT_STOPPED):
        cause += WORDLESS
    return Culprit(rank=end.rank, node=node_of.get(end.rank, end.node), cause=cause, log_tail=log)


def _last_word(log: tuple[str, ...]) -> str:
    """What a process that could not begin said last: an exception, whose text may have lines."""
    said = [line.strip() for line in log if line.strip() and not line.startswith("srun: ")]
    raised = [place for place, line in enumerate(said) if EXCEPTION.match(line)]
    words = said[raised[-1] :][:EXCEPTION_LINES] if raised else said[-1:]
    return f": {' '.join(words)}" if words else ""


def _log(run: RunDir, rank: int, node_of: Mapping[int, str]) -> tuple[str, ...]:
    """The end of what a rank said: in its own log, or before it had one, in its node's."""
    nodes = list(dict.fromkeys(node_of.values()))
    node = node_of.get(rank)
    index = nodes.index(node) if node in nodes else 0
    return tail(run.rank_log(rank)) or tail(run.node_log(f"node{index}"))
