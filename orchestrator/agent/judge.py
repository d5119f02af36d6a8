"""The judge of life: does a rank make progress, and if not, what does it do?

Workers report what they do and wait for; programs are seen from outside. Their agent alone judges,
and the coordinator compares the ranks. docs/how-to/troubleshooting.md has the table of what
follows.

| standing | meaning | ended by us |
|---|---|---|
| moves | its position changed as recently as usual | never |
| waits | it waits for other ranks | once all ranks have waited for `hang_s` |
| declared | it saves, evaluates or prepares data, and says so | never |
| busy | it uses a processor, and its position is unusually old | never, unless a key asks for it |
| idle | nothing of it moves | after `hang_s` (a program: once all its ranks are idle) |
| done | a program's main thread has ended, not its process | once no thread woke for `exit_s` |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from orchestrator.agent.liveness import BEAT_S, RankPosition
from orchestrator.agent.processes import processor_s

WORKING_SHARE = 0.01
"""From this share of one processor on, a process is at work."""
WINDOW_S = 10.0
STALL_FACTOR = 3.0
"""A position is unusually old after this many times the longest stay at one so far."""
LATEST_NOTICE = 3.0
"""Multiple of the notice time after which a stay is reported whatever was usual."""
EXIT_S = 300.0
"""After which a program whose work is done, and which does not exit, is ended."""
OUTPUT_FACTOR, LEAST_OUTPUT_GAP_S = 5.0, 300.0
"""A program that computes without output is reported after so many times its longest gap between
two lines so far, and after no less than this.
"""


class Standing(StrEnum):
    """Activity of a rank whose position does not change; see the module."""

    MOVES = "moves"
    WAITS = "waits"
    DECLARED = "declared"
    BUSY = "busy"
    IDLE = "idle"
    DONE = "done"


class Work(NamedTuple):
    """Resources that processes have used: processor time, and bytes read and written."""

    processor_s: float
    io_bytes: int

    @classmethod
    def of(cls, pids: Iterable[int]) -> Work:
        """Return the work of processes; one that has ended counts nothing."""
        work_s, io_bytes = 0.0, 0
        for pid in pids:
            work_s += processor_s(pid)
            io_bytes += _io_bytes(Path(f"/proc/{pid}/io"))
        return cls(work_s, io_bytes)

    @classmethod
    def of_main_thread(cls) -> Work:
        """Return the work of this process; of its bytes those of the main thread, since the
        thread that observes reads files itself.
        """
        pid = os.getpid()
        return cls(processor_s(pid), _io_bytes(Path(f"/proc/{pid}/task/{pid}/io")))


def _io_bytes(path: Path) -> int:
    """Return the bytes that a process has read and written, pipes included, sockets not."""
    try:
        lines = path.read_text("ascii").splitlines()
    except OSError:  # it has ended, or the kernel keeps no account
        return 0
    values = dict(line.split(": ") for line in lines)
    return int(values["rchar"]) + int(values["wchar"])


class IdleTimer:
    """Time for which processes have neither used a processor nor moved bytes.

    Processor time counts within windows of `WINDOW_S`, so that a second of work after an hour of
    rest is work, and what heartbeats cost is not.
    """

    def __init__(self) -> None:
        self._work: Work | None = None
        self._sampled_at = self._moved_at = 0.0

    def reset(self) -> None:
        """Begin again with the next sample."""
        self._work = None

    def idle_s(self, now: float, work: Work) -> float:
        """Return for how long the processes, which have done `work` so far, have been idle."""
        before = self._work
        moved = (
            before is None
            or abs(work.processor_s - before.processor_s) > WORKING_SHARE * WINDOW_S
            or work.io_bytes != before.io_bytes
        )
        if moved:
            self._moved_at = now
        if moved or now - self._sampled_at >= WINDOW_S:
            self._work, self._sampled_at = work, now
        return now - self._moved_at


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Times of one rank's judge.

    Attributes:
        notice_s: no shorter stay at a position is reported.
        latest_s: a stay is reported after this at the latest, whatever was usual.
        hang_s: `cluster.hang_timeout_s`.
    """

    notice_s: float
    latest_s: float
    hang_s: float

    @property
    def exit_s(self) -> float:
        """For how long a program whose work is done may stay."""
        return min(EXIT_S, self.hang_s)

    @classmethod
    def of(
        cls, *, heartbeat_s: float, hang_s: float, join_s: float, collective_s: float | None
    ) -> Limits:
        """Derive the limits so that a stay is reported before any wait for it ends."""
        least_s = min(hang_s, join_s, join_s if collective_s is None else collective_s) / 2
        return cls(
            notice_s=min(heartbeat_s, least_s),
            latest_s=min(LATEST_NOTICE * heartbeat_s, least_s),
            hang_s=hang_s,
        )


class WorkerJudge:
    """Judge of one worker, by its reports and by its processes' work.

    Attributes:
        standing: by the latest observation.
        idle_s: for how long nothing of it has moved, if it is idle.
        stood_s: for how long it has been at its position, or has waited.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits, self._idle = limits, IdleTimer()
        self._longest_s = 0.0
        self.standing = Standing.MOVES
        self.idle_s = self.stood_s = 0.0

    def observe(
        self, now: float, position: RankPosition, age_s: float, work: Callable[[], Work]
    ) -> Standing:
        """Judge once a second. Return the standing.

        Args:
            position: the worker's latest report.
            age_s: of the report. A worker that waits for others sends reports; one that sends none
                holds Python's interpreter, so it computes.
            work: of the worker and its children; called only where it matters.
        """
        limits = self._limits
        if position.waited_s and age_s < 2 * BEAT_S:
            self._move()
            self.stood_s = position.waited_s + age_s
            waits = self.stood_s >= limits.notice_s
            self.standing = Standing.WAITS if waits else Standing.MOVES
            return self.standing
        stood_s = position.stood_s + age_s
        if stood_s < self.stood_s or self.standing is Standing.WAITS:
            self._move()
        self.stood_s = stood_s
        usual_s = max(limits.notice_s, STALL_FACTOR * self._longest_s)
        if stood_s < limits.notice_s:
            self.standing = Standing.MOVES
            return self.standing
        self.idle_s = self._idle.idle_s(now, work())
        if position.declared:
            self._idle.reset()
            self.idle_s = 0.0
        if stood_s <= min(usual_s, limits.latest_s):
            self.standing = Standing.MOVES
        elif position.declared:
            self.standing = Standing.DECLARED
        else:
            idle = self.idle_s >= limits.notice_s
            self.standing = Standing.IDLE if idle else Standing.BUSY
        return self.standing

    @property
    def hangs(self) -> bool:
        """Return whether nothing of it has moved for so long that it counts as hanging."""
        return self.standing is Standing.IDLE and self.idle_s > self._limits.hang_s

    def _move(self) -> None:
        if self.standing is not Standing.WAITS:
            self._longest_s = max(self._longest_s, self.stood_s)
        self._idle.reset()
        self.idle_s = self.stood_s = 0.0


class ProgramJudge:
    """Judge of one rank of a program, from outside: its output, reports, and processes' work.

    Attributes:
        standing, idle_s: as of `WorkerJudge`. A program has no position: it is idle, busy for
            unusually long without output, or moves.
        stood_s: for how long it has been idle, or without output.
    """

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits, self._idle = limits, IdleTimer()
        self._output: tuple[int, ...] = ()
        self._output_at, self._longest_gap_s = now, 0.0
        self._has_output = False
        self._waits, self._waited_at = -1, now
        self.standing = Standing.MOVES
        self.idle_s = self.stood_s = self._exit_idle_s = 0.0

    def observe(
        self, now: float, output: tuple[int, ...], work: Work, *, done: bool, waits: int = 0
    ) -> Standing:
        """Judge once a second. Return the standing.

        Args:
            output: sizes of the files that the program writes: its log, its record.
            done: the main thread has ended, by the latest stack; counts while nothing moves.
            waits: how often its other threads have begun to wait (`processes.waits_of`). While they
                do, a program that is done is not ended: one may send the results somewhere.
        """
        if waits != self._waits or not done:
            self._waits, self._waited_at = waits, now
        if output != self._output:
            if self._has_output:
                self._longest_gap_s = max(self._longest_gap_s, now - self._output_at)
            self._has_output = self._has_output or bool(self._output)
            self._output, self._output_at = output, now
            self._idle.reset()
        self.idle_s = self.stood_s = self._idle.idle_s(now, work)
        self._exit_idle_s = min(self.idle_s, now - self._waited_at)
        gap_s = now - self._output_at
        unusual_s = max(LEAST_OUTPUT_GAP_S, OUTPUT_FACTOR * self._longest_gap_s)
        if self.idle_s >= self._limits.notice_s:
            self.standing = Standing.DONE if done else Standing.IDLE
        elif self._has_output and gap_s > unusual_s:
            self.standing, self.stood_s = Standing.BUSY, gap_s
        else:
            self.standing = Standing.MOVES
        return self.standing

    @property
    def stays(self) -> bool:
        """Return whether its work is done, and it has not exited for so long that it is ended."""
        return self.standing is Standing.DONE and self._exit_idle_s > self._limits.exit_s
