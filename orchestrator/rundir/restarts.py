"""The restart policy of a run: which restarts are granted, after which pause; what is no progress.

Those that start a run's attempts (`runs/follow.py`, `clusters/slurm/finalize.py`) ask here. A
restart that is granted is recorded once, in the attempt's decision.json, before any part of it is
carried out: to repeat the end of an attempt after an error is to carry out what was decided. That
file has one writer, the process that decides; departure.json is of the ranks and their agents.
"""

from __future__ import annotations

import builtins
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from orchestrator.rundir.files import read_json, write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import read_progress, recent_records, updates_of
from orchestrator.rundir.outcome import Culprit, departure_note, describe_culprit
from orchestrator.units import format_seconds, plural

FRUITLESS = 10
"""Starts in a row without progress, after which the run ends."""
PROGRAM_LEAST_S = 60.0
"""A program that ran for so long may have made progress."""
QUICK_FAILURE_S = 60.0
"""A start that ran for so long before it failed is followed by the next without a pause."""
FREE_RESTARTS = 2
"""Restarts after failures without progress that follow at once; each later pause is twice as long
as the one before."""
FIRST_PAUSE_S, MOST_PAUSE_S = 30.0, 600.0


class RestartKind(Enum):
    """How the next attempt starts: by the launcher, by a requeue, or by srun in the allocation."""

    LAUNCHER = "launcher"
    REQUEUE = "requeue"
    NEW_SRUN = "new srun"


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartDecision:
    """The decision on another attempt.

    Attributes:
        message: which one begins, or why none, if remarkable.
        number: of the restart, from 1.
        note: of the failure, for `record_restart`; {} without a restart.
    """

    restarts: bool
    message: str = ""
    number: int = 0
    note: Mapping[str, Any] = field(default_factory=dict[str, Any])


def read_departure(run: RunDir, attempt: int) -> dict[str, Any] | None:
    """Return why another attempt follows this one: the decision, else the note that its ranks left;
    None if neither exists.
    """
    return read_json(run.decision(attempt)) or read_json(run.departure(attempt))


def record_restart(
    run: RunDir, attempt: int, note: Mapping[str, Any], kind: RestartKind
) -> dict[str, Any]:
    """Record that a restart follows an attempt; return the record, which has `note`'s keys.

    Args:
        note: a departure note; of a failed attempt also `failed`, and `pause` if the restart waits.
    """
    record = {**note, "kind": kind.value}
    write_json(run.decision(attempt), record)
    return record


NUMBER = re.compile(
    r"0x[0-9a-f]+|\d[\d.]* ?(?:[KMGT]i?B|bytes)\b|\b(?:process|pid\(?s?\)?)\W*\d+", re.IGNORECASE
)
"""A size, a process id or an address in memory: no start repeats them. Others may name a host."""


def _is_same_error(error: str, earlier: str) -> bool:
    """Return whether two attempts raised the same: the type, and the text but for sizes, process
    ids and addresses in memory.

    An `OSError`, or one on a URL, comes from outside, and its numbers may name another file, host
    or port, so another start may get further.

    >>> memory = "OutOfMemoryError: CUDA out of memory. Tried to allocate {}; process {} has {}"
    >>> _is_same_error(memory.format("2.00 GiB", 41, "9 MiB"), memory.format("512 MiB", 7, "1 GiB"))
    True
    >>> _is_same_error("ConnectionError: no 10.0.0.1:80", "ConnectionError: no 10.0.0.2:80")
    False
    >>> _is_same_error("ClientError: no answer of node17", "ClientError: no answer of node23")
    False
    """
    kind = getattr(builtins, error.partition(":")[0].rpartition(".")[2], None)
    if "://" in error or (isinstance(kind, type) and issubclass(kind, OSError)):
        return error == earlier
    return NUMBER.sub("", error) == NUMBER.sub("", earlier)


def grant_restart(
    run: RunDir, attempt: int, culprit: Culprit, *, first: int, most: int
) -> RestartDecision:
    """Grant a failed run another start, or refuse it; `record_restart` is to follow.

    The launcher (local) or the scheduler (SLURM) starts it. A start that a person asked for gives
    a new allowance; preemption, time limits and lost nodes are no failures of the run.

    Args:
        first: the attempt that a person asked for; those after it were restarts or requeues.
        most: `run.max_restarts`.
    """
    if most == 0 or culprit.usage or run.cancel.exists():
        return RestartDecision(restarts=False)
    earlier: list[dict[str, Any]] = [
        departure["failed"]
        for number in range(first, attempt)
        if (departure := read_departure(run, number)) and departure.get("failed")
    ]
    progress = read_progress(run.progress(attempt))
    update = progress.update if progress else -1
    program = bool(run.read_plan().get("program"))
    raised: str | None = None  # stays so if a process, a node or a peer was lost
    if culprit.hangs:
        raised = "hung"
        if program:  # which may record what it has done
            done = updates_of(recent_records(run.metrics))[-1:]
            update = done[0]["update"] if done else -1
    elif not program:  # whose progress is unknown: its next start may get further
        own = [f for f in run.failures(attempt) if f["rank"] == culprit.rank and not f["secondary"]]
        raised = str(own[0]["cause"]) if own else None
    before = earlier[-1]["raised"] if earlier else None
    same = raised is not None and before is not None and _is_same_error(raised, before)
    if same and update <= earlier[-1]["update"]:  # without an update in between
        where = f"in update {update}" if update >= 0 else "before the first update"
        did = "hung" if culprit.hangs else "raised the same"
        message = (
            f"not started again: attempt {earlier[-1]['attempt']} {did} {where}, so another start "
            f"would only repeat it"
        )
        return RestartDecision(restarts=False, message=message)
    if len(earlier) >= most:
        times = plural(len(earlier), "time")
        message = f"not started again: that was done {times} already (run.max_restarts={most})"
        return RestartDecision(restarts=False, message=message)
    why = describe_culprit(culprit.to_json()).split("\n", maxsplit=1)[0]
    failed = {"attempt": attempt, "update": update, "raised": raised}
    begins = "starts the program again" if program else "begins from the newest checkpoint"
    number = len(earlier) + 1
    message = (
        f"attempt {attempt + 1} {begins} (restart {number} of {most} that run.max_restarts allows)"
    )
    note = {**departure_note(why), "failed": failed}
    return RestartDecision(restarts=True, message=message, number=number, note=note)


def pause_before(run: RunDir, attempt: int, number: int) -> dict[str, Any] | None:
    """Return until when the restart after a failed attempt waits, and why; None if it follows at
    once.

    Each start has its price on a cluster (its prolog on every node), and one that fails at once
    probably fails again. So restarts follow ever more slowly, but none is refused: what a start
    needs (a licence server, say) may come back after hours.

    Args:
        number: of the restart.
    """
    lives_s = _lives_of_quick_failures(run, attempt)
    doublings = len(lives_s) - FREE_RESTARTS - 1
    if doublings < 0:
        return None
    pause_s = min(FIRST_PAUSE_S * 2.0 ** min(doublings, 30), MOST_PAUSE_S)
    within_s = max(1, math.ceil(max(lives_s)))
    why = f"it failed {len(lives_s)} times within {within_s} s of its start"
    return {"restart": number, "until": time.time() + pause_s, "why": why}


def left_of_pause_s(record: Mapping[str, Any]) -> float:
    """Return for how many seconds a recorded restart still waits."""
    pause: Mapping[str, Any] | None = record.get("pause")
    return max(0.0, pause["until"] - time.time()) if pause else 0.0


def describe_pause(run: RunDir) -> str | None:
    """Return when and why the run's next restart follows; None if none is waited for."""
    record = read_departure(run, run.latest_attempt) or {}
    left_s = left_of_pause_s(record)
    if not left_s:
        return None
    pause: Mapping[str, Any] = record["pause"]
    return f"restart {pause['restart']} in {format_seconds(math.ceil(left_s))}: {pause['why']}"


def count_fruitless(run: RunDir, attempt: int, *, program: bool) -> int:
    """Return how many starts in a row, up to this one, made no progress since a person asked.

    The progress of a program that reports none is not known: it counts if it ran for some time.
    """
    first = int((run.read_handle() or {}).get("attempt", 0))
    newest_done = _newest_fruitful(run)
    began_at: set[object] = set()
    for number in range(attempt, first - 1, -1):
        if program:
            fruitful = number <= newest_done or _ran_s(run, number) >= PROGRAM_LEAST_S
        else:
            # A start whose srun died has no note. The first one begins at no checkpoint.
            note = read_json(run.restart(number)) or ({} if number else {"resumed_from": None})
            began_at |= {note["resumed_from"]} if "resumed_from" in note else set()
            # Two starts at different checkpoints: one was saved in between.
            fruitful = number <= newest_done or len(began_at) > 1
        if fruitful:
            return attempt - number
    return attempt - first + 1


def _newest_fruitful(run: RunDir) -> int:
    """Return the newest attempt that has recorded an update; -1 without one."""
    done = updates_of(recent_records(run.metrics))[-1:]
    return done[0].get("attempt", 0) if done else -1


def _lives_of_quick_failures(run: RunDir, attempt: int) -> list[float]:
    """Return for how many seconds the starts in a row ran, up to this one, which has failed, that
    failed at once and without an update. One that was preempted or lost a node is none of them.
    """
    first = int((run.read_handle() or {}).get("attempt", 0))
    newest_done = _newest_fruitful(run)
    lives_s: list[float] = []
    for number in range(attempt, max(first - 1, newest_done), -1):
        failed = number == attempt or (read_departure(run, number) or {}).get("failed")
        if not failed or (life_s := _ran_s(run, number)) >= QUICK_FAILURE_S:
            break
        lives_s.append(life_s)
    return lives_s


def _ran_s(run: RunDir, attempt: int) -> float:
    """Return for how long an attempt's first node ran; 0 if it did not begin."""
    began = read_json(run.node_ranks(attempt, 0))
    if began is None:
        return 0.0
    # Both times are of the first node's clock, not of the file server's.
    ended_at = (read_departure(run, attempt) or {}).get("time", time.time())
    return float(ended_at) - float(began["time"])
