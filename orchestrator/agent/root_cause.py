"""Who failed first, and why: from the exit statuses, what the ranks wrote down, and their logs."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.errors import EXIT_FINISHED, EXIT_STOPPED, describe_status
from orchestrator.rundir.files import read_end
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import Culprit

TAIL_LINES = 30
TAIL_BYTES = 64 * 1024
MOST_NAMED = 4
WORDLESS = " before its training had ended: something in it ended the process (os._exit, say)"
IN_A_CIRCLE = "A link between them is cut, or they did not call the same collectives"
TAKEN_AWAY = frozenset({signal.SIGKILL, signal.SIGTERM})
"""How a process ends that somebody took away, the kernel for want of memory included. All other
ends are the work of the job's own code (an exception, a bad pointer), and would come back."""
MEMORY = "more accumulation.steps make the micro-batches smaller"
OUT_OF_MEMORY = re.compile(
    r"^MemoryError|OutOfMemoryError|out of memory|cannot allocate memory", re.IGNORECASE
)
LAST_WORD = "error: "
"""How the log of a rank ends whose main thread was stuck in the framework and could not fail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """A rank, or a whole node (rank None), that ended as it should not.

    Attributes:
        time: by a clock that all ends share.
        log: of the node.
        status: as of `subprocess`; 0 of a rank that ended without its last word.
        out_of_memory: the kernel killed processes of the node for want of memory meanwhile.
    """

    time: float
    node: str
    log: Path
    rank: int | None
    status: int
    out_of_memory: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Behind:
    """A rank that had not come to where others waited. `since`: when it came where it stood."""

    since: float
    node: str
    rank: int
    where: str
    at: str
    stack: tuple[str, ...] = ()


def behind_of(rank: int, node: str, said: Mapping[str, Any]) -> Behind:
    """From what the rank said of itself; see `lifecycle/signs/signs_of_life.py`."""
    return Behind(
        rank=rank,
        node=node,
        since=said["since"],
        where=said["where"],
        at=said["at"],
        stack=tuple(said["stack"]),
    )


def tail(path: Path, lines: int = TAIL_LINES) -> tuple[str, ...]:
    """Return the last lines of a text file; none when there is no such file."""
    try:
        text = read_end(path, TAIL_BYTES).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ()
    return tuple(text.splitlines()[-lines:])


def blame(
    run: RunDir,
    told: Sequence[Mapping[str, Any]],
    ends: Sequence[End],
    behind: Sequence[Behind] = (),
    finished: Sequence[int] = (),
) -> Culprit:
    """Return the culprit of a failed attempt: never a rank that only waited for another.

    Args:
        told: what failing ranks said of their failures.
        ends: who was seen to end, at least one.
        behind: who stood still meanwhile.
        finished: ranks that had done their part.

    A rank that was killed, or left without a word, wrote nothing; its peers fail an instant later
    because of it, and so do those of one that hangs, at their time-out. Those failures are marked
    secondary. So the first that ended is blamed, unless its own failure is secondary, and another's
    is not: one that failed of itself, else one that ended without a word, else one that is behind.
    """
    failures = {f["rank"]: f for f in told}
    ordered = sorted(ends, key=lambda end: end.time)
    first = ordered[0]
    own = None if first.rank is None else failures.get(first.rank)
    wordless = [end for end in ordered if end.rank not in failures and not _gave_up(run, end)]
    primary = [failure for failure in failures.values() if not failure["secondary"]]
    if own is not None and not own["secondary"]:
        return from_failure(run, own)
    if primary and first not in wordless:
        return from_failure(run, min(primary, key=lambda f: f["time"]))
    if wordless:
        return _of_end(run, wordless[0])
    if behind:
        return of_behind(run, min(behind, key=lambda one: one.since))
    if own is None:
        return _of_end(run, first)
    return replace(beside_finished(from_failure(run, own), finished), hangs=not finished)


def told_with_waits(culprit: Culprit, waits: Mapping[int, str]) -> Culprit:
    """One that hangs, with what another waited for; where it waited itself, nobody was behind.

    Args:
        waits: of ranks: for how long, where and for what; "" of one that did not wait.

    >>> hung = Culprit(rank=1, node="node0", cause="it hangs", hangs=True)
    >>> told_with_waits(hung, {0: "9 s at the boundary of update 3", 2: "", 3: "8 s at …"}).cause
    'it hangs; rank 0 waited for it 9 s at the boundary of update 3, and so did 1 more'
    >>> told_with_waits(hung, {0: "9 s for bucket 1", 1: "9 s for bucket 2"}).cause[:60]
    'it hangs; no rank was behind: rank 0 waited 9 s for bucket 1'
    """
    waited = {rank: told for rank, told in sorted(waits.items()) if told}
    if not culprit.hangs or not waited:
        return culprit
    first, more = next(iter(waited)), len(waited) - 1
    told = f"rank {first} waited for it {waited[first]}" + f", and so did {more} more" * (more > 0)
    if culprit.rank in waited:
        each = [f"rank {rank} waited {said}" for rank, said in waited.items()][:MOST_NAMED]
        told = f"no rank was behind: {'; '.join(each)}. {IN_A_CIRCLE}"
    return replace(culprit, cause=f"{culprit.cause}; {told}")


def beside_finished(culprit: Culprit, finished: Sequence[int]) -> Culprit:
    """One that lost a peer, where ranks that had done their part are the only ones that can be."""
    if not finished:
        return culprit
    named = ", ".join(map(str, sorted(finished)[:MOST_NAMED]))
    more = f" and {len(finished) - MOST_NAMED} others" if len(finished) > MOST_NAMED else ""
    told = f"{culprit.cause}; rank {named}{more} had ended before, with exit code 0"
    return replace(culprit, cause=told)


def _gave_up(run: RunDir, end: End) -> bool:
    """Whether a rank's last line says that it lost a peer while it was stuck in the framework."""
    last = () if end.rank is None else tail(run.rank_log(end.rank), 1)
    return bool(last) and last[0].startswith(LAST_WORD)


def _of_end(run: RunDir, end: End) -> Culprit:
    if end.rank is None:
        cause = f"the node went away: its agent was {describe_status(end.status)}"
        return Culprit(rank=None, node=end.node, cause=cause, log_tail=tail(end.log))
    log = tail(run.rank_log(end.rank)) or tail(end.log)
    cause = describe_status(end.status)
    if end.out_of_memory and -end.status == signal.SIGKILL:
        cause = f"out of memory, killed by the kernel ({cause}); {MEMORY}"
    elif end.status in (EXIT_FINISHED, EXIT_STOPPED):
        cause += WORDLESS
    elif end.status > 0 and log and log[-1].startswith(LAST_WORD):  # it could say no more than that
        cause = log[-1].removeprefix(LAST_WORD)
    return Culprit(rank=end.rank, node=end.node, cause=cause, log_tail=log)


def of_behind(run: RunDir, one: Behind) -> Culprit:
    """Blame a rank for which the others waited in vain."""
    cause = f"the others waited in vain: it was still at {one.where}, {one.at}"
    log = tail(run.rank_log(one.rank))
    log = one.stack or log
    return Culprit(rank=one.rank, node=one.node, cause=cause, log_tail=log, hangs=True)


def from_failure(run: RunDir, failure: Mapping[str, Any]) -> Culprit:
    cause = str(failure["cause"])
    return Culprit(
        rank=failure["rank"],
        node=failure["node"],
        cause=f"out of memory: {cause}" if OUT_OF_MEMORY.search(cause) else cause,
        log_tail=tail(run.rank_log(failure["rank"])),
        usage=failure["usage"],
        hangs=failure.get("hangs", False),
    )
