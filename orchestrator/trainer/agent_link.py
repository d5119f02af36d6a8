"""A rank's signs of life, and its own judgement of whether it makes progress.

A thread sends a line a second to the node's agent (`agent/liveness.py`) and checks where the main
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
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.agent.liveness import BEAT_S, LINK_VARIABLE, Patience, Seen, Standstill
from orchestrator.agent.processes import asleep_in, descendants, processor_s, state_of
from orchestrator.agent.stacks import (
    answer_when_asked,
    as_lines,
    describe_processes,
    in_words,
    main_stack,
)
from orchestrator.engine.common import waiting
from orchestrator.errors import Evicted
from orchestrator.rundir.warnings import warn


def link_to_agent() -> socket.socket | None:
    """Return the socket that the agent of this node gave to this process, if one did."""
    number = os.environ.pop(LINK_VARIABLE, None)
    if number is None:
        return None
    link = socket.socket(fileno=int(number))
    link.set_inheritable(False)
    return link


class AgentLink:
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

    def begin(self) -> AgentLink:
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


# ----------------------------------------------------------------------
# A worker's membership in its run: the current generation, as the worker's agent sends it.
#
# The agents watch the workers and each other, and their coordinator decides the next generation. A
# worker asks nothing of other workers: it reports when it is ready to train, when it waits at a
# boundary for newcomers, and when it ends; and it receives each new generation, whatever its main
# thread does.
#

LOOK_S = 0.2
Members = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """Members that train together. `noticed`: monotonic time at which this worker received it."""

    number: int
    members: Members
    noticed: float


class Membership:
    """Membership of one worker.

    Args:
        life: the worker's link to its agent.
        me: its number among the members (`members.py`).
        silence_s: how long the agents take to find a silent node.
    """

    def __init__(self, life: AgentLink, me: int, silence_s: float) -> None:
        self._life, self._me, self._silence_s = life, me, silence_s
        self._changed = threading.Condition()
        self._latest = self._taken = self._kept = Generation(-1, (), time.monotonic())
        self._left = False
        self._received = 0.0
        self._interrupt: Callable[[], None] = lambda: None
        self.asked = False
        life.on_message(self._take)
        life.on_beat(self._end_unresponsive)

    def _take(self, message: Mapping[str, Any]) -> None:
        """Handle a message, from the thread that reads the link."""
        newer = None
        with self._changed:
            if message.get("generation", -1) > self._latest.number:
                newer = Generation(
                    message["generation"], tuple(message["members"]), time.monotonic()
                )
                self._latest, self._received, self.asked = newer, time.monotonic(), False
            self._left = self._left or message.get("left", False)
            self.asked = message.get("newcomers", self.asked)
            self._changed.notify_all()
        if newer is not None and newer.number > 0:
            self._interrupt()  # the main thread may wait for a lost worker

    @property
    def latest(self) -> Generation:
        """Return the newest generation that this worker has received."""
        return self._latest

    def begin(self, code: Mapping[str, str]) -> Generation:
        """Report that this worker is ready to train; wait for the first generation. Collective.

        Args:
            code: digests of the job's own modules, by name.
        """
        self._life.send_event("begins", code=dict(code))
        with self._changed:
            while self._latest.number < 0:
                self._changed.wait(LOOK_S)
            self._taken = self._latest
        return self._latest

    def join(self, stopped: Callable[[], bool]) -> Generation:
        """Ask to join, and wait for the generation that includes this worker.

        Raises:
            Evicted: the run ends, or is asked to stop, before that.
        """
        print("note: this rank asks to be let in", flush=True)  # goes to the rank's log
        self._life.send_event("joins")
        with self._changed:
            while self._me not in self._latest.members:
                if self._left:
                    raise Evicted("the run came to its end before this rank was let in")
                if stopped():
                    raise Evicted("the run is to stop, and this rank was not let in yet")
                self._changed.wait(LOOK_S)
            self._taken = self._latest
        return self._latest

    def ready(self, generation: int, updates: int) -> None:
        """Mark this worker ready at the boundary of `generation`, where it waits for newcomers."""
        self._life.send_event("ready", generation=generation, updates=updates)

    def await_newer(self, than: int, timeout_s: float) -> Generation | None:
        """Wait for a generation after `than`; return None at the timeout, or if none will come."""
        until = time.monotonic() + max(timeout_s, 3 * self._silence_s)
        with self._changed:
            while self._latest.number <= than and not self._left:
                if (left_s := until - time.monotonic()) <= 0:
                    break
                self._changed.wait(left_s)
            self._taken = self._latest
        return self._taken if self._taken.number > than else None

    def on_news(self, interrupt: Callable[[], None]) -> None:
        """Call `interrupt`, from another thread, when there is a newer generation."""
        self._interrupt = interrupt

    def end(self, word: str) -> None:
        """Report that this worker ends, in order or because it failed: no generation follows."""
        self._life.send_event("leaving", word=word)

    def _end_unresponsive(self) -> None:
        """End this process if its main thread does not return from an interrupted collective.

        gloo can lose a send whose connection breaks as it begins, and the others would wait. The
        only remaining worker holds the run's only state, so it waits for the collective's timeout.
        """
        wait = waiting.under_way() if waiting.waits() else None
        if wait is None or self._taken is self._latest or self._kept is self._latest:
            return
        since, words = wait
        late = time.monotonic() - self._received > self._silence_s
        if not words or not late or since > self._received:
            return
        message = (
            f"it did not come back from {words}, which was broken off {self._silence_s:g} s ago"
        )
        if len(self._latest.members) == 1:
            self._kept = self._latest
            warn(f"{message}; nobody else is left, so cluster.collective_timeout_s is waited out")
            return
        try:
            warn(f"{message}; it is ended, and the others go on without it")
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
