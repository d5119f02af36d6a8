"""One look at the queue for all that a user watches on this machine, and never more than four a
minute: watchers share the scheduler's answers through a file of the user's own, and with `status`.

Whoever is the first to need a newer answer asks; the others read it. How training goes stands in
the run folders, so nothing waits for these answers but the news that a job began or has ended.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.scheduler.client import Answer, Asked, SlurmClient

CALLS, WINDOW_S = 4, 60.0
APART_S = 2.0
LOOK_S = 1.0
GAPS_S = (3.0, 6.0, 12.0, 20.0)
STEADY_S, LATE_S, LATE_AFTER_S = 20.0, 60.0, 600.0
RETRY_S = 8.0
OTHERS_S = 2.0
JITTER = 0.25


class Pace:
    """When a look is due: soon after a change, then ever more rarely, at last once a minute.

    All watchers together keep the bound in `SharedQueue`; this only spreads them.

    Args:
        first_s: until the first look.
    """

    def __init__(
        self,
        first_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = lambda: random.uniform(-JITTER, JITTER),  # noqa: S311  # no secret
    ) -> None:
        self._clock, self._jitter = clock, jitter
        self.since = clock()
        self._looks = 0
        self._due = self.since + first_s

    @property
    def due(self) -> bool:
        return self._clock() >= self._due

    def changed(self) -> None:
        """Something happened that the scheduler will have news of."""
        self.since, self._looks = self._clock(), 0
        self._due = min(self._due, self.since + GAPS_S[0])

    def unanswered(self) -> None:
        """The scheduler is away: ask again before long, for people wait to hear that it is back."""
        self._due = self._clock() + RETRY_S * (1 + self._jitter())

    def looked(self) -> None:
        """There was an answer; the next is due later than this one was."""
        now = self._clock()
        gap = GAPS_S[self._looks] if self._looks < len(GAPS_S) else STEADY_S
        if now - self.since > LATE_AFTER_S:
            gap = LATE_S
        self._looks += 1
        self._due = now + gap * (1 + self._jitter())


def private_folder() -> Path:
    """A folder of this user's on this machine alone, for what its processes share; where somebody
    else has it, one for this process, which then shares with nobody.
    """
    own = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(own or tempfile.gettempdir()) / f"orchestrator-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
        if stat.S_ISDIR(facts.st_mode) and (facts.st_uid, facts.st_mode & 0o077) == (
            os.getuid(),
            0,
        ):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="orchestrator-"))


class SharedQueue:
    """The answers of one scheduler to one question, shared by all who ask it on this machine.

    Args:
        command: the question, the same for all that share it.
    """

    def __init__(
        self,
        client: SlurmClient,
        *command: str,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._command, self._clock = client, command, clock
        conf = client.environment("squeue").get("SLURM_CONF", "")
        name = hashlib.sha256("\0".join((conf, *command)).encode()).hexdigest()[:16]
        self._file = (folder or private_folder()) / f"queue-{name}.json"
        self._asked: Asked | None = None
        self._lock: int | None = None
        self._began, self._next = 0.0, 0.0

    def look(self, newer_than: float) -> tuple[float, Answer] | None:
        """The newest answer to a question asked after `newer_than`, and when that was; else None,
        and the question is asked as soon as it is our turn. Never waits. Times: time.monotonic().
        """
        now = self._clock()
        if self._asked is not None:
            return self._heard(newer_than)
        if now < self._next:
            return None
        self._next = now + LOOK_S
        known = self._read()
        if newer_than < known["asked"] <= now:
            return known["asked"], Answer(known["code"], known["out"], known["err"])
        if self._may_ask(known, now):
            self._ask()
        return None

    def now(self, newer_than: float) -> Answer:
        """An answer to a question asked after `newer_than` (time.monotonic()), for who cannot come
        back later: another's, where there is one, else ours, even beyond the bound. Who asks
        at this moment is waited for, but not for long: it may be stopped.

        Raises:
            SchedulerDown: nobody answers.
        """
        patience = self._clock() + OTHERS_S
        while True:
            known = self._read()
            if newer_than < known["asked"] <= self._clock():
                return Answer(known["code"], known["out"], known["err"])
            if self._take_turn() or self._clock() > patience:
                break
            time.sleep(OTHERS_S / 20)
        self._began = self._clock()
        try:
            answer = self._client.ask(*self._command)
            self._keep(answer)
        finally:
            self._release()
        return answer

    def close(self) -> None:
        if self._asked is not None:
            self._asked.forget()
        self._release()

    def _read(self) -> dict[str, Any]:
        try:
            return json.loads(self._file.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # nobody has asked yet
            return {"asked": -1.0, "calls": [], "code": 0, "out": "", "err": ""}

    @staticmethod
    def _may_ask(known: dict[str, Any], now: float) -> bool:
        # Times above `now` are from before this machine was started.
        calls = [t for t in known["calls"] if now - WINDOW_S < t <= now]
        return len(calls) < CALLS and (not calls or now - calls[-1] >= APART_S)

    def _take_turn(self) -> bool:
        lock = os.open(self._file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another is asking; its answer will be ours
            os.close(lock)
            return False
        self._lock = lock
        return True

    def _ask(self) -> None:
        if not self._take_turn():
            return
        self._began = self._clock()
        if not self._may_ask(self._read(), self._began):  # one that asked a moment ago
            self._release()
            return
        self._asked = self._client.start(*self._command)

    def _heard(self, newer_than: float) -> tuple[float, Answer] | None:
        answer = self._asked.answer() if self._asked is not None else None
        if answer is None:
            return None
        self._asked = None
        self._keep(answer)
        self._release()
        return (self._began, answer) if self._began > newer_than else None

    def _keep(self, answer: Answer) -> None:
        """Share the answer to the question that was asked at `_began`."""
        calls = [t for t in self._read()["calls"] if self._began - WINDOW_S < t <= self._began]
        text = json.dumps(
            {"asked": self._began, "calls": [*calls, self._began], "code": answer.code,
             "out": answer.out, "err": answer.err}
        )  # fmt: skip
        partial = self._file.with_suffix(f".{os.getpid()}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(self._file)

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
