"""A rank's signs of life, and its own judgement of whether it makes progress.

A thread sends a line a second to the node's agent (`node_watch.py`) and checks where the main
thread is. The reaction is the same everywhere:

| the main thread | then |
|---|---|
| waits for other ranks | nothing: a waiting rank is never at fault |
| is at one place for `notice_s`, or three times the usual time | it is reported, with its stack |
| and neither it nor its children use a processor for `hang_s` | the rank fails as hanging |
| is at one place for `notice_s`, with a stopped child (SIGSTOP) | the same, at once |

The places are those of the loop: a micro-step (data, forward and backward), a boundary, and what
follows it. Marking one costs an assignment; the main thread makes no system call. Each line holds
the place, so that it is known even after the rank cannot report any more (`Seen`).
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrator.engine.common import waiting
from orchestrator.lifecycle.signs.node_watch import BEAT_S, LINK_VARIABLE, Seen
from orchestrator.lifecycle.signs.processes import asleep_in, descendants, processor_s, state_of
from orchestrator.lifecycle.signs.stacks import (
    answer_when_asked,
    as_lines,
    describe_processes,
    in_words,
    main_stack,
)
from orchestrator.lifecycle.signs.standstill import Patience, Standstill
from orchestrator.rundir.warnings import warn


def link_to_agent() -> socket.socket | None:
    """Return the socket that the agent of this node gave to this process, if one did."""
    number = os.environ.pop(LINK_VARIABLE, None)
    if number is None:
        return None
    link = socket.socket(fileno=int(number))
    link.set_inheritable(False)
    return link


class Life:
    """Signs of life of one rank. Call `begin` first and `say` at the end.

    Args:
        log: this rank's log, in the run folder's `logs`.
        link: to the agent; None without one.
        on_hang: called from the thread, with a sentence and the stack, when this rank hangs; it
            ends the process.
    """

    def __init__(
        self,
        log: Path,
        link: socket.socket | None,
        on_hang: Callable[[str, str], None],
    ) -> None:
        self._log, self._link, self._on_hang = log, link, on_hang
        folder = next(folder for folder in log.parents if folder.name == "logs")
        self._shown = log.relative_to(folder.parent)
        self._place: tuple[float, str, tuple[int, ...], bool] = (time.monotonic(), "", (), False)
        self._standstill: Standstill | None = None
        self._sending = threading.Lock()
        self._over = threading.Event()
        self._on_message: list[Callable[[dict[str, Any]], None]] = []
        self._on_beat: list[Callable[[], None]] = []

    @property
    def has_agent(self) -> bool:
        """Return whether an agent of ours watches and commands this process."""
        return self._link is not None

    def on_message(self, take: Callable[[dict[str, Any]], None]) -> None:
        """Call `take`, from the reading thread, with each message of the agent."""
        self._on_message.append(take)

    def on_beat(self, look: Callable[[], None]) -> None:
        """Call `look` once a second, from the heartbeat thread."""
        self._on_beat.append(look)

    def send_event(self, event: str, **values: Any) -> None:
        """Send the agent an event for the coordinator."""
        self._send({"event": event, **values})

    def _read(self, link: socket.socket) -> None:
        with link.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                for take in self._on_message:
                    take(message)

    def begin(self) -> Life:
        """Start the heartbeat. SIGQUIT now writes all threads' stacks to the log.

        This works even while code holds the interpreter.
        """
        answer_when_asked()
        self.at("the start (imports, the job's own)")
        if self._link is not None:
            os.register_at_fork(after_in_child=self._link.close)
        self._send({})
        threading.Thread(target=self._live, name="life", daemon=True).start()
        if self._link is not None:
            reading = threading.Thread(
                target=self._read, args=(self._link,), name="agent", daemon=True
            )
            reading.start()
        return self

    def expect(self, patience: Patience) -> None:
        """Start judging progress."""
        self._standstill = Standstill(patience)

    def at(self, words: str, *numbers: int, waits: bool = False) -> None:
        """Mark where the main thread is. `words` has a `%d` for each number.

        Args:
            waits: it may wait for others there without marking it (accelerators' collectives do).
        """
        self._place = (time.monotonic(), words, numbers, waits)

    def say(self, word: str, failure: dict[str, Any] | None = None) -> None:
        """Send the final message: how this rank ended. Without it, the rank counts as lost."""
        self._over.set()
        self._send({"word": word, "failure": failure})

    def tell_behind(self, said: dict[str, Any] | None) -> None:
        """Report that this rank is behind, or (None) no longer."""
        self._send({"behind": said})

    def _send(self, message: dict[str, Any]) -> None:
        if self._link is None:
            return
        with self._sending:
            try:
                self._link.sendall(json.dumps(message).encode() + b"\n")
            except OSError as error:
                self._link = None
                print(f"warning: this rank's agent does not listen: {error}", flush=True)

    def _live(self) -> None:
        while not self._over.wait(BEAT_S):
            if self._link is not None:
                self._send({"seen": asdict(self.seen())})
            for look in self._on_beat:
                look()
            if self._standstill is not None:
                self._look(self._standstill)

    def seen(self) -> Seen:
        """Return where this rank is. Callable from any thread."""
        now, (came, words, numbers, may_wait) = time.monotonic(), self._place
        where, stack, waits = words % numbers, tuple(main_stack()), ""
        wait = waiting.under_way() or ((came, "") if may_wait and numbers else None)
        if wait is not None and now - wait[0] >= BEAT_S:
            waits = f"{now - wait[0]:.0f} s at {where}" + (f", for {wait[1]}" if wait[1] else "")
        return Seen(at=f"at {where}, {in_words(stack)}", waits=waits, stack=stack)

    def _look(self, standstill: Standstill) -> None:
        now = time.monotonic()
        came, words, numbers, may_wait = self._place
        where = words % numbers
        since = max(came, waiting.last_ended())
        news = standstill.look(now, since, waits=may_wait or waiting.waits())
        if news == "moves":
            self._send({"behind": None})
            print("note: it moves on", flush=True)
        if standstill.reported:
            stack = main_stack()
            at, lines = in_words(stack), as_lines(stack)
            message = {"where": where, "since": since, "at": at, "stack": lines}
            self._send({"behind": message})
            if news == "behind":
                print("\n".join(lines), flush=True)
                warn(
                    f"it has stood at {where} for {now - since:.0f} s, {at}{self._beside_it()}; "
                    f"{self._shown} has its stack",
                    kind=f"standing at {words}",
                )
        if standstill.due(now):
            self._perhaps_hangs(standstill, where, now - since)

    def _perhaps_hangs(self, standstill: Standstill, where: str, stood_s: float) -> None:
        children = descendants(os.getpid())
        stopped = [pid for pid in children if state_of(pid) == "T"]
        used_s = sum(map(processor_s, [os.getpid(), *children]))
        if not standstill.hangs(time.monotonic(), used_s) and not stopped:
            return
        why = "without using a processor (cluster.hang_timeout_s)"
        if stopped:
            why = f"and its child process {stopped[0]} is stopped (SIGSTOP)"
        elif kernel := asleep_in(os.getpid()):
            why += f", asleep in {kernel}: a disk or a file system does not answer"
        stack = main_stack()
        sentence = f"it hangs: it has been at {where} for {stood_s:.0f} s {why}; {in_words(stack)}"
        self._on_hang(sentence + self._beside_it(), "\n".join(as_lines(stack)))

    def _beside_it(self) -> str:
        """Describe where this rank's loader processes are, if it has any."""
        return describe_processes(descendants(os.getpid()), self._log)
