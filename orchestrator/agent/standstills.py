"""Standstills: ranks that make no progress, judged together; warnings of them, and their limits.

`judge.py` judges each rank alone. A rank that computes, saves, evaluates or prepares data is waited
for.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.agent.judge import Standing
from orchestrator.agent.liveness import BEAT_S, LEAST_SILENCE_S
from orchestrator.agent.node_spec import NodeSpec
from orchestrator.agent.root_cause import describe_idle_programs, describe_waits, late_rank
from orchestrator.agent.worker_state import WorkerState
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir

STALL_S = 300.0
"""After which `notify` sends a message about a run that makes no progress."""
NEWS_S = LEAST_SILENCE_S + BEAT_S
"""From a late agent's first heartbeat until its news of its ranks has come."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The finding about ranks that make no progress.

    Attributes:
        informs: all workers are to learn for how long all of them have waited, `standstill_s`: that
            begins, or ends (None). The limits of their waits count only then
            (`engine/common/waiting.py`).
        warning: of a standstill that begins; the workers' stacks go to their logs.
        blamed: a rank that is to be ended, for `cause`; `ends_run`: and the attempt with it, since
            no rank makes progress any more.
    """

    informs: bool = False
    standstill_s: float | None = None
    warning: str | None = None
    blamed: WorkerState | None = None
    cause: str = ""
    ends_run: bool = False


def reset_waits(workers: Iterable[WorkerState], now: float) -> None:
    """Measure all waits from now: a rank has ended or is lost, or a generation begins. What the
    others waited for before has come, or will not come.
    """
    for worker in workers:
        # A program's wait looks like idleness.
        if worker.standing is Standing.WAITS or (
            worker.program and worker.standing is Standing.IDLE
        ):
            worker.stands_since = now


class Standstills:
    """The ranks of one attempt that make no progress."""

    def __init__(self, spec: NodeSpec) -> None:
        self._spec = spec
        self._stands: set[int] = set()  # ranks that make no progress
        self._reported = self._stall_written = False
        self._standstill_announced = False  # that all of them wait
        self._ended = False  # a rank's process has ended since the latest check
        self._unheard_at = -math.inf  # when an agent of a live rank was late last
        self._pauses_since: float | None = None  # verdicts have waited for late agents

    @property
    def may_be_due(self) -> bool:
        """Return whether `check` may find something."""
        return bool(self._stands) or self._standstill_announced

    def announce_again(self) -> None:
        """Inform all workers once more at the next check, of a standstill that has not ended."""
        self._standstill_announced = False

    def forget(self, rank: int) -> None:
        """Forget a process of this rank that another one has followed."""
        self._stands.discard(rank)

    def note_end(self, rank: int) -> None:
        """Note that a rank's process has ended. Those that have waited for it, maybe for hours, may
        not have reported yet that it came: the next check measures their waits anew.
        """
        self.forget(rank)
        self._ended = self._ended or bool(self._stands)

    def note(self, worker: WorkerState, event: Mapping[str, Any], now: float) -> None:
        """Note what an agent reports of a worker that makes no progress, or makes it again."""
        standing = Standing(event["standing"])
        worker.program = event["program"]
        # A node that was suspended may report more seconds than it was awake.
        seconds = min(event["seconds"], self._spec.limits.notice_s)
        if standing is not worker.standing:
            worker.standing, worker.stands_since = standing, now - seconds
        if standing is Standing.MOVES:
            self._stands.discard(worker.rank)
            if not self._stands:
                self._stall_written = self._reported = False
        else:
            self._stands.add(worker.rank)

    def check(
        self,
        now: float,
        alive: Sequence[WorkerState],
        *,
        over: bool,
        unheard: Collection[int] = (),
    ) -> Finding:
        """Find a run in which no rank makes progress, and one in which none ever can.

        Args:
            alive: the live members. None of them waits for a replacement, nor is its wait to be let
                in one for a collective.
            over: a worker has ended, so the others may wait for what never comes.
            unheard: ranks whose agents have not been heard lately, and may have news of them.
        """
        if self._ended:
            self._ended = False
            reset_waits(alive, now)
        if self._pauses(now, any(worker.rank in unheard for worker in alive)):
            informs, self._standstill_announced = self._standstill_announced, False
            return Finding(informs=informs)
        standing = [worker for worker in alive if worker.rank in self._stands]
        waiting = [worker for worker in standing if worker.standing is Standing.WAITS]
        idle = [
            worker for worker in standing if worker.program and worker.standing is Standing.IDLE
        ]
        all_wait = bool(waiting) and len(waiting) == len(alive)
        all_idle = bool(idle) and len(idle) == len(alive)
        informs = all_wait != self._standstill_announced
        self._standstill_announced = all_wait
        standstill_s = now - max(worker.stands_since for worker in alive) if all_wait else None
        self._notify_of_stall(now, standing, everyone=all_wait or all_idle)
        if not (all_wait or all_idle):
            self._reported = False
            blamed, cause = self._find_vain_wait(now, waiting, alive, over=over)
            return Finding(informs=informs, standstill_s=standstill_s, blamed=blamed, cause=cause)
        key, limit_s = "hang", self._spec.hang_s
        if all_wait and self._spec.collective_s is not None and self._spec.collective_s < limit_s:
            key, limit_s = "collective", self._spec.collective_s
        seconds = now - max(worker.stands_since for worker in alive)
        if seconds < self._spec.limits.notice_s:  # their waits count anew (`reset_waits`)
            return Finding(informs=informs, standstill_s=standstill_s)
        describe = describe_waits if all_wait else describe_idle_programs
        seen = {worker.rank: worker.seen for worker in alive}
        # No other rank waits for it: a program may wait for the outside world.
        alone = all_idle and len(alive) == 1
        warning: str | None = None
        if not self._reported:
            self._reported = True
            ends = f"; the run is ended after {limit_s:g} s of this (cluster.{key}_timeout_s)"
            warning = describe(seen, seconds) + ends * (not alone)
        blamed, cause = None, ""
        if seconds >= limit_s and not alone:
            late = late_rank(seen) if all_idle else alive[0].rank
            blamed = next(worker for worker in alive if worker.rank == late)
            cause = f"it hangs: {describe(seen, seconds)} (cluster.{key}_timeout_s)"
        return Finding(
            informs=informs,
            standstill_s=standstill_s,
            warning=warning,
            blamed=blamed,
            cause=cause,
            ends_run=blamed is not None,
        )

    def _pauses(self, now: float, is_unheard: bool) -> bool:
        """Return whether verdicts wait for news, since an agent of a live rank is late. Where one
        or another always is, as of many on a slow file system, they do not wait for ever.
        """
        if is_unheard:
            self._unheard_at = now
        if now - self._unheard_at >= NEWS_S:
            self._pauses_since = None
            return False
        if self._pauses_since is None:
            self._pauses_since = now
        return now - self._pauses_since < self._spec.hang_s

    def _find_vain_wait(
        self, now: float, waiting: list[WorkerState], alive: Sequence[WorkerState], *, over: bool
    ) -> tuple[WorkerState | None, str]:
        """Return a rank that computes while others wait for it, if a key asks for its end; and the
        cause.
        """
        limit_s = self._spec.collective_s
        if limit_s is None or not waiting or over:
            return None, ""
        others = [worker for worker in alive if worker.standing is not Standing.WAITS]
        if not all(worker.standing in (Standing.BUSY, Standing.IDLE) for worker in others):
            # The limit pauses: one of the others makes progress, or saves, or prepares data.
            for worker in waiting:
                worker.stands_since = max(worker.stands_since, now - self._spec.limits.notice_s)
            return None, ""
        first = min(waiting, key=lambda worker: worker.stands_since)
        if now - first.stands_since < limit_s:
            return None, ""
        blamed = min(others, key=lambda worker: worker.stands_since)
        return blamed, (
            f"the others waited in vain (cluster.collective_timeout_s={limit_s:g}): it was still "
            f"{blamed.seen.at}"
        )

    def _notify_of_stall(self, now: float, standing: list[WorkerState], *, everyone: bool) -> None:
        """Write down, once, that a rank has made no progress for long, for `notify`."""
        stalled = [
            worker
            for worker in standing
            if worker.standing is not Standing.WAITS and not worker.program
        ]
        own = (Standing.BUSY, Standing.DECLARED)
        stalled += [worker for worker in standing if worker.program and worker.standing in own]
        if everyone:
            stalled = standing
        if not stalled:
            self._stall_written = False
            return
        after_s = min(STALL_S, self._spec.hang_s / 2)  # before the limit ends the run
        first = min(stalled, key=lambda worker: worker.stands_since)
        if self._stall_written or now - first.stands_since < after_s:
            return
        seconds = now - first.stands_since
        text = f"rank {first.rank} has made no progress for {seconds:.0f} s: it is {first.seen.at}"
        if everyone:
            describe = describe_idle_programs if first.program else describe_waits
            text = describe({worker.rank: worker.seen for worker in stalled}, seconds)
        # On a full disk at a later look: that must keep no standstill from its end.
        with contextlib.suppress(OSError):
            stall = RunDir(self._spec.run).stall(self._spec.attempt)
            write_json(stall, {"time": time.time(), "text": text})
            self._stall_written = True
