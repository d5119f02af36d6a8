"""Root cause of a failure: from exit statuses, the ranks' failure records, and their logs."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.agent.liveness import RankPosition
from orchestrator.agent.stacks import (
    DUMP_BYTES,
    Frame,
    as_lines,
    describe_stack,
    of_main_thread,
)
from orchestrator.errors import EXIT_FINISHED, EXIT_STOPPED, describe_status
from orchestrator.rundir.files import read_end
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import NODE_WENT_AWAY, Culprit

TAIL_LINES = 30
TAIL_BYTES = 64 * 1024
MOST_NAMED = 4
NO_EXIT_REPORT = " before its training had ended: something in it ended the process (os._exit, say)"
EXTERNAL_KILL_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM})
"""Signals by which a process is ended from outside, by the kernel for lack of memory included. All
other ends are due to the job's own code (an exception, a bad pointer), and would come back."""
MEMORY_REMEDY = "more accumulation.steps make the micro-batches smaller"
OUT_OF_MEMORY = re.compile(
    r"^MemoryError|OutOfMemoryError|out of memory|cannot allocate memory", re.IGNORECASE
)
NOT_JOINED = ", and has not joined the others"
NOT_OPENED = ", and has not opened the port where the ranks meet"
"""`RankPosition.where` of a program's rank, if nothing else is known."""
RAISED = re.compile(
    r"(?:[A-Za-z_][\w.]*\.)?[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt|Warning)\b"
)
"""Beginning of the line with which Python prints an exception."""
WATCHDOG = re.compile(
    r"Watchdog caught collective operation timeout|(NCCL|HCCL) watchdog|"
    r"Process group watchdog thread terminated"
)
ERROR_PREFIX = "error: "
"""Prefix of the last line of a rank whose main thread was stuck in the framework."""


@dataclass(kw_only=True, slots=True)  # not frozen: that takes 0.7 us more, for each of R ends
class AbnormalEnd:
    """An abnormal end of a rank, or of a whole node (rank None).

    Attributes:
        time: by a clock shared by all ends.
        node, index: name and number of its node.
        status: as of `subprocess`; 0 of a rank that ended without its final message.
        out_of_memory: the kernel killed processes of the node for lack of memory meanwhile.
        why: where it is known: why a node counts as lost, or a rank was killed.
    """

    time: float
    node: str
    index: int
    rank: int | None
    status: int
    out_of_memory: bool = False
    why: str = ""

    def describe(self) -> str:
        """Describe where the rank, or the ranks of the node, ended, and why.

        >>> AbnormalEnd(time=0.0, node="n1", index=1, rank=2, status=-9).describe()
        'on n1: killed by signal 9 (SIGKILL)'
        """
        return f"on {self.node}: {self.why.removeprefix(NODE_WENT_AWAY) or self.describe_cause()}"

    def describe_cause(self) -> str:
        cause = describe_status(self.status)
        if self.out_of_memory and -self.status == signal.SIGKILL:
            return f"out of memory, killed by the kernel ({cause})"
        return cause


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank that has not reached where the others wait, and its position."""

    rank: int
    node: str
    seen: RankPosition


def tail(path: Path, lines: int = TAIL_LINES) -> tuple[str, ...]:
    """Return the last lines of a text file; none when there is no such file.

    A file that cannot be read must not keep a failure from being reported: one line says why.
    """
    try:
        text = read_end(path, TAIL_BYTES).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ()
    except OSError as error:
        return (f"{path} cannot be read: {error.strerror}",)
    return tuple(text.splitlines()[-lines:])


def find_root_cause(
    run: RunDir,
    records: Sequence[Mapping[str, Any]],
    ends: Sequence[AbnormalEnd],
    behind: Sequence[Straggler] = (),
    finished: Sequence[int] = (),
) -> Culprit:
    """Return the culprit of a failed attempt: never a rank that only waited for another.

    Args:
        records: failing ranks' own reports of their failures.
        ends: observed ends, at least one.
        behind: ranks that made no progress meanwhile.
        finished: ranks that had completed.

    A killed rank, or one that ended without a message, wrote nothing. Its peers fail an instant
    later, as do those of a hanging rank, at their timeout; those failures are marked secondary.
    So the first end is blamed, unless its failure is secondary and another's is not: one that
    failed by itself, else one that ended without a message, else one that is behind.
    """
    failures = {f["rank"]: f for f in records}
    ordered = sorted(ends, key=lambda end: end.time)
    first = ordered[0]
    own = None if first.rank is None else failures.get(first.rank)
    others = (end for end in ordered if end.rank not in failures)
    without_report = next((end for end in others if not _gave_up(run, end)), None)
    primary = [failure for failure in failures.values() if not failure["secondary"]]
    if own is not None and not own["secondary"]:
        return from_failure(run, own)
    if primary and first is not without_report:
        return from_failure(run, min(primary, key=lambda f: f["time"]))
    if without_report is not None:
        return _of_end(run, without_report)
    if behind:  # the others waited for it in vain
        last = max(behind, key=lambda straggler: straggler.seen.stood_s)
        cause = f"the others waited in vain: it was still {last.seen.at}"
        lines = last.seen.stack_lines() or tail(run.rank_log(last.rank))
        return Culprit(
            rank=last.rank, node=last.node, cause=cause, log_tail=tuple(lines), hangs=True
        )
    if own is None:
        return _of_end(run, first)
    culprit = replace(from_failure(run, own), hangs=not finished)
    if not finished:
        return culprit
    # No other rank can be the peer that it lost.
    named = ", ".join(map(str, sorted(finished)[:MOST_NAMED]))
    more = f" and {len(finished) - MOST_NAMED} others" if len(finished) > MOST_NAMED else ""
    cause = f"{culprit.cause}; rank {named}{more} had ended before, with exit code 0"
    return replace(culprit, cause=cause)


def add_waits(culprit: Culprit, waits: Mapping[int, str]) -> Culprit:
    """Add what other ranks waited for to a hanging culprit's cause.

    Args:
        waits: each rank's wait: how long, where and for what; "" if it did not wait.

    >>> hung = Culprit(rank=1, node="node0", cause="it hangs", hangs=True)
    >>> add_waits(hung, {0: "9 s at the boundary of update 3", 2: "", 3: "8 s at …"}).cause
    'it hangs; rank 0 waited for it 9 s at the boundary of update 3, and so did 1 more'
    >>> add_waits(hung, {0: "9 s for bucket 1", 1: "9 s for bucket 2"}).cause[:60]
    'it hangs; no rank was behind: rank 0 waited 9 s for bucket 1'
    """
    waited = {rank: wait for rank, wait in sorted(waits.items()) if wait}
    if not culprit.hangs or not waited:
        return culprit
    first, more = next(iter(waited)), len(waited) - 1
    note = f"rank {first} waited for it {waited[first]}" + f", and so did {more} more" * (more > 0)
    if culprit.rank in waited:
        each = [f"rank {rank} waited {wait}" for rank, wait in waited.items()][:MOST_NAMED]
        note = (
            f"no rank was behind: {'; '.join(each)}. A link between them is cut, or they did not "
            "call the same collectives"
        )
    return replace(culprit, cause=f"{culprit.cause}; {note}")


def _gave_up(run: RunDir, end: AbnormalEnd) -> bool:
    """Return whether a rank ended itself since it had waited for others, stuck in the framework.

    Its last line says so, or NCCL's or HCCL's watchdog has ended it with SIGABRT.
    """
    if end.rank is None:
        return False
    log = tail(run.rank_log(end.rank))
    if end.status == -signal.SIGABRT:
        return any(WATCHDOG.search(line) for line in log)
    return bool(_last_message(end, log))


def _last_message(end: AbnormalEnd, log: Sequence[str]) -> str:
    """Return the error with which a rank ended itself, from its log's last line; "" without one."""
    last = log[-1] if log and end.status > 0 else ""  # one that was killed may write errors, too
    return last.removeprefix(ERROR_PREFIX) if last.startswith(ERROR_PREFIX) else ""


def _of_end(run: RunDir, end: AbnormalEnd) -> Culprit:
    if end.rank is None:
        return Culprit(rank=None, node=end.node, cause=end.why, log_tail=_node_log_tail(run, end))
    log = tail(run.rank_log(end.rank))
    if not log and end.status >= 0:  # a process that was killed before it wrote has no log
        log = _node_log_tail(run, end)
    if end.why:  # its agent killed it, which its status alone would hide
        return Culprit(rank=end.rank, node=end.node, cause=end.why, log_tail=log, hangs=True)
    cause = end.describe_cause()
    if cause.startswith("out of memory"):
        cause += f"; {MEMORY_REMEDY}"
    elif end.status in (EXIT_FINISHED, EXIT_STOPPED):
        cause += NO_EXIT_REPORT
    elif message := _last_message(end, log):  # it could say no more than that
        cause = message
    return Culprit(rank=end.rank, node=end.node, cause=cause, log_tail=log)


def _node_log_tail(run: RunDir, end: AbnormalEnd) -> tuple[str, ...]:
    return tail(run.node_log(f"node{end.index}"))


def from_failure(run: RunDir, failure: Mapping[str, Any]) -> Culprit:
    cause = str(failure["cause"])
    return Culprit(
        rank=failure["rank"],
        node=failure["node"],
        cause=f"out of memory: {cause}" if OUT_OF_MEMORY.search(cause) else cause,
        log_tail=tail(run.rank_log(failure["rank"])),
        usage=failure["usage"],
    )


# ----------------------------------------------------------------------
# Workers that are stopped, and ranks that make no progress.


def stopped_cause(limit_s: float) -> str:
    """Return why a worker that was stopped for `limit_s` is given up."""
    return f"it was frozen (SIGSTOP) for {limit_s:g} s (cluster.heartbeat_timeout_s)"


def describe_waits(seen: Mapping[int, RankPosition], seconds: float) -> str:
    """Describe a run in which every rank waits for others.

    >>> waits = {0: RankPosition(waits="9 s at the boundary of update 3"),
    ...          1: RankPosition(waits="8 s at micro-step 1 of 2 of update 4")}
    >>> describe_waits(waits, 8.0)[:70]
    'all ranks have waited for each other for 8 s, so no rank was behind: r'
    """
    each = [
        f"rank {rank} waited {position.waits or position.at}"
        for rank, position in sorted(seen.items())
    ]
    return (
        f"all ranks have waited for each other for {seconds:.0f} s, so no rank was behind: "
        f"{_some(each)}. A link between them is cut, or they did not call the same collectives"
    )


def describe_idle_programs(seen: Mapping[int, RankPosition], seconds: float) -> str:
    """Describe a program of which no rank does anything, by the stacks of its ranks.

    >>> describe_idle_programs({0: RankPosition(at="in wait (train.py, line 3)")}, 20.0)[:56]
    'for 20 s no rank has used a processor or written anythin'
    """
    late = next(
        (position.where for position in seen.values() if position.where == NOT_OPENED), NOT_JOINED
    )
    each = [
        f"rank {rank} is {position.at}{late * (position.where == late)}"
        for rank, position in sorted(seen.items())
    ]
    return (
        f"for {seconds:.0f} s no rank has used a processor or written anything: {_some(each)}. "
        "Ranks that wait for one another in different collectives wait for ever; a lock, a mount "
        "or a licence may still come. Their logs have the stacks"
    )


def late_rank(seen: Mapping[int, RankPosition]) -> int:
    """Return the rank of an idle program that is to blame: the one that has not opened the port
    where the ranks meet, else the first that has not joined the others, else the first.
    """
    return min(seen, key=lambda rank: ((NOT_OPENED, NOT_JOINED, "").index(seen[rank].where), rank))


def _some(sentences: Sequence[str]) -> str:
    more = len(sentences) - MOST_NAMED
    return "; ".join(sentences[:MOST_NAMED]) + f"; and {more} more" * (more > 0)


def add_position(culprit: Culprit, seen: RankPosition, log: Path, log_bytes: int) -> Culprit:
    """Add where a culprit is: the stack that it wrote on request, else its last report.

    Args:
        log_bytes: size of its log at the request.
    """
    stack: list[Frame] = []
    with contextlib.suppress(OSError), log.open("rb") as file:  # no log: see `tail`
        file.seek(log_bytes)
        stack = of_main_thread(file.read(DUMP_BYTES).decode(errors="replace"))
    cause = culprit.cause
    if stack:
        cause += f"; it is {describe_stack(stack)}"
    elif seen.at:
        cause += f"; it was last seen {seen.at}"
    lines = as_lines(stack) or seen.stack_lines() or tail(log)
    return replace(culprit, cause=cause, log_tail=tuple(lines))
