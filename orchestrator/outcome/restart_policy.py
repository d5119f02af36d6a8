"""Whether a run that failed starts again by itself: `run.max_restarts`, and what speaks against it.

The same rule everywhere; who starts it again is the launcher (local) or the scheduler, which is
handed the job back (SLURM). A start that a person asked for gives a new allowance, and what the
scheduler takes and gives back (preemption, time limits, lost nodes) is no failure of the run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from orchestrator.lifecycle.signs.progress import read_progress
from orchestrator.outcome.run_state import Culprit
from orchestrator.report.tables.closing_table import describe_culprit
from orchestrator.report.units import plural
from orchestrator.run_folder.rundir import RunDir, write_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Ruling:
    """`again`: the next attempt begins. `words`: which one it is, or why not; empty: nothing to
    say.
    """

    again: bool
    words: str = ""


def rule(run: RunDir, attempt: int, culprit: Culprit, *, first: int, most: int) -> Ruling:
    """What follows from the failure of `attempt`; a restart is noted in the attempt's folder.

    Args:
        first: the attempt that a person asked for; those after it were restarts or requeues.
        most: `run.max_restarts`.
    """
    if most == 0 or culprit.usage or run.cancel.exists():
        return Ruling(again=False)
    earlier: list[dict[str, Any]] = [
        departure["failed"]
        for number in range(first, attempt)
        if (departure := run.read(run.departure(number))) and departure.get("failed")
    ]
    place = read_progress(run.progress(attempt))
    program = bool(run.read_plan().get("program"))
    failed = {
        "attempt": attempt,
        "update": place.update if place else -1,
        # What a program did before it failed, nobody knows: its next start may come further.
        "raised": None if program else _raised(run, attempt, culprit),
    }
    if earlier and _repeated(earlier[-1], failed):
        where = f"in update {failed['update']}" if place else "before the first update"
        words = (
            f"not started again: attempt {earlier[-1]['attempt']} raised the same {where}, so "
            f"another start would only repeat it"
        )
        return Ruling(again=False, words=words)
    if len(earlier) >= most:
        times = plural(len(earlier), "time")
        words = f"not started again: that was done {times} already (run.max_restarts={most})"
        return Ruling(again=False, words=words)
    why = describe_culprit(culprit.to_json()).split("\n", maxsplit=1)[0]
    departure = {"why": why, "updates": None, "time": time.time(), "failed": failed}
    write_json(run.departure(attempt), departure)
    begins = "starts the program again" if program else "begins from the newest checkpoint"
    words = (
        f"attempt {attempt + 1} {begins} (restart {len(earlier) + 1} of "
        f"{most} that run.max_restarts allows)"
    )
    return Ruling(again=True, words=words)


def _repeated(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether an exception came back without an update between: the next start would raise it."""
    same = now["raised"] is not None and now["raised"] == before["raised"]
    return same and now["update"] <= before["update"]


def _raised(run: RunDir, attempt: int, culprit: Culprit) -> str | None:
    """The exception behind a failure; None when a process, a node or a peer just went away."""
    found = [f for f in run.failures(attempt) if f["rank"] == culprit.rank and not f["secondary"]]
    return str(found[0]["cause"]) if found else None
