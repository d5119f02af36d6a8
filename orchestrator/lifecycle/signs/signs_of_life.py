"""A rank's signs of life, and its own judgement of whether it still gets anywhere.

A thread sends a line a second to whoever watches this node (`node_watch.py`), and looks where the
main thread stands. What follows is the same everywhere:

| the main thread | then |
|---|---|
| waits for other ranks | nothing: who waits is never at fault |
| stands at one place for `notice_s`, or three times what was usual | it is said, with its stack |
| and neither it nor its children use a processor for `hang_s` | the rank fails, as one that hangs |
| stands for `notice_s`, and one of its children is stopped (SIGSTOP) | the same, at once |

The places are those of the loop: a micro-step (data and forward and backward), a boundary, what
comes after it. Marking one costs an assignment; no system call is made on the main thread.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.engine.common import waiting
from orchestrator.lifecycle.signs.node_watch import (
    AT_WORK,
    BEAT_S,
    LINK_VARIABLE,
    processor_s,
    state_of,
)
from orchestrator.run_warnings import warn

USUAL = 3.0
LOOKS = 4
"""How often processes are looked at during `notice_s`, once a place has lasted that long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """After how long a rank that stands still is spoken of, and after how long it is given up.

    Attributes:
        notice_s: nothing below this is mentioned.
        most_s: it is mentioned at the latest after this, whatever was usual.
        hang_s: for how long neither the rank nor its children may leave the processors unused.
    """

    notice_s: float
    most_s: float
    hang_s: float


class Standstill:
    """For how long the main thread has stood at one place, by what a thread sees every second.

    Attributes:
        told: it was said that it stands where it stands now.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._since = self._stood = self._longest = 0.0
        self.told = False
        self._due = self._at_work = 0.0
        self._used_s: float | None = None

    def look(self, now: float, since: float, *, waits: bool) -> str:
        """What is to be said: "behind", "moves", or nothing.

        Args:
            since: when the main thread came to its present place, or its last wait there ended.
            waits: whether it waits for other ranks.
        """
        if since != self._since or waits:
            self._longest = max(self._longest, self._stood)
            self._since, self._stood = since, 0.0
            before, self.told = self.told, False
            self._used_s, self._due = None, since + self._patience.notice_s
            return "moves" if before else ""
        self._stood = now - since
        limit = max(self._patience.notice_s, USUAL * self._longest)
        if self.told or self._stood <= min(limit, self._patience.most_s):
            return ""
        self.told = True
        return "behind"

    def due(self, now: float) -> bool:
        """Whether it has stood so long that it is time to look at processes."""
        if not self._stood or now < self._due:
            return False
        self._due = now + min(self._patience.hang_s, self._patience.notice_s) / LOOKS
        return True

    def hangs(self, now: float, used_s: float) -> bool:
        """Whether it has left the processors unused for `hang_s`.

        Args:
            used_s: processor time of the process and its children so far.
        """
        before, elapsed = self._used_s, max(BEAT_S, now - self._at_work)
        if before is None or used_s - before > AT_WORK * elapsed:
            self._used_s, self._at_work = used_s, now
        return now - self._at_work > self._patience.hang_s


def descendants(pid: int) -> list[int]:
    """Children of a process, and theirs: loader workers, compilers."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(word) for word in path.read_text(encoding="ascii").split()]
        except (FileNotFoundError, ProcessLookupError):  # that thread ended in this moment
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def link_to_supervisor() -> socket.socket | None:
    """The socket that the supervisor of a pretended node gave to this process, if one did."""
    number = os.environ.pop(LINK_VARIABLE, None)
    if number is None:
        return None
    link = socket.socket(fileno=int(number))
    link.set_inheritable(False)
    return link


class Life:
    """One rank's. `begin` first of all, `say` as the last word.

    Args:
        log: name of the file that this rank's output goes to.
        link: to whoever watches; None when nobody does.
        on_hang: called from the thread, with a sentence and the stack, when this rank hangs; it
            ends the process.
        on_behind: called from the thread when this rank is behind, with what is told of it, and
            with None when it moves on.
    """

    def __init__(
        self,
        log: str,
        link: socket.socket | None,
        on_hang: Callable[[str, str], None],
        on_behind: Callable[[dict[str, Any] | None], None] = lambda _: None,
    ) -> None:
        self._on_behind = on_behind
        self._beside: Callable[[], None] = lambda: None
        self._log, self._link, self._on_hang = log, link, on_hang
        self._place: tuple[float, str, tuple[int, ...], bool] = (time.monotonic(), "", (), False)
        self._main = threading.main_thread().ident
        self._standstill: Standstill | None = None
        self._sending = threading.Lock()
        self._over = threading.Event()

    def begin(self) -> Life:
        """Start. From now on SIGQUIT writes the stacks of all threads to the log, whatever holds
        the interpreter.
        """
        faulthandler.register(signal.SIGQUIT, file=sys.stderr, all_threads=True)
        self.at("the start (imports, the job's own)")
        if self._link is not None:
            os.register_at_fork(after_in_child=self._link.close)
        self._send({})
        threading.Thread(target=self._live, name="life", daemon=True).start()
        return self

    def expect(self, patience: Patience, beside: Callable[[], None] = lambda: None) -> None:
        """Judge from now on. `beside` is called every beat: a look at another rank."""
        self._beside = beside
        self._standstill = Standstill(patience)

    def at(self, words: str, *numbers: int, waits: bool = False) -> None:
        """The main thread is at a place. `words` has a `%d` for each number.

        Args:
            waits: it may wait for others there without marking it (accelerators' collectives do).
        """
        self._place = (time.monotonic(), words, numbers, waits)

    def say(self, word: str, failure: dict[str, Any] | None = None) -> None:
        """The last word: how this rank ended. Without it, it counts as lost."""
        self._over.set()
        self._send({"word": word, "failure": failure})

    def tell_behind(self, said: dict[str, Any] | None) -> None:
        """Tell whoever watches that this rank is behind, or (None) no more."""
        self._send({"behind": said})

    def _send(self, message: dict[str, Any]) -> None:
        if self._link is None:
            return
        with self._sending:
            try:
                self._link.sendall(json.dumps(message).encode() + b"\n")
            except OSError as error:
                self._link = None
                print(f"warning: nobody listens to this rank: {error}", flush=True)

    def _live(self) -> None:
        while not self._over.wait(BEAT_S):
            self._send({})
            self._beside()
            if self._standstill is not None:
                self._look(self._standstill)

    def _look(self, standstill: Standstill) -> None:
        now = time.monotonic()
        came, words, numbers, may_wait = self._place
        where = words % numbers
        since = max(came, waiting.last_ended())
        news = standstill.look(now, since, waits=may_wait or waiting.waits())
        if news == "moves":
            self._send({"behind": None})
            self._on_behind(None)
            print("note: it moves on", flush=True)
        elif news == "behind":
            at, stack = self._stack()
            warn(
                f"it has stood at {where} for {now - since:.0f} s, {at}; logs/{self._log} has its "
                f"stack",
                kind=f"standing at {words}",
            )
            print(stack, flush=True)
        if standstill.told:
            at, stack = self._stack()
            message = {"where": where, "since": since, "at": at, "stack": stack.splitlines()}
            self._send({"behind": message})
            if news == "behind":
                self._on_behind(message)
        if standstill.due(now):
            self._perhaps_hangs(standstill, where, now - since)

    def _perhaps_hangs(self, standstill: Standstill, where: str, stood_s: float) -> None:
        children = descendants(os.getpid())
        stopped = [pid for pid in children if state_of(pid) == "T"]
        used_s = sum(map(processor_s, [os.getpid(), *children]))
        if not standstill.hangs(time.monotonic(), used_s) and not stopped:
            return
        at, stack = self._stack()
        why = "without using a processor (cluster.hang_timeout_s)"
        if stopped:
            why = f"and its child process {stopped[0]} is stopped (SIGSTOP)"
        self._on_hang(f"it hangs: it has been at {where} for {stood_s:.0f} s {why}; {at}", stack)

    def _stack(self) -> tuple[str, str]:
        """Where the main thread is: its innermost place in words, and all of its stack."""
        frame = sys._current_frames().get(self._main or 0)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # it has no public name
        stack = traceback.extract_stack(frame)
        last = stack[-1]
        at = f"in {last.name} ({last.filename}, line {last.lineno})"
        return at, "".join(stack.format()).rstrip()
