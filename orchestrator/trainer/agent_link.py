"""A worker's link to its agent: heartbeats with its position, stops, membership.

A thread sends a line a second to the node's agent: where the main thread is, whether it waits for
other ranks, what it has declared to do (`engine/common/waiting.py`), and its stack. The agent
judges (`agent/judge.py`); the worker judges nothing.

The positions are those of the loop: a micro-step (data, forward and backward), a boundary, and what
follows it. Marking one costs an assignment; the main thread makes no system call. Each line holds
the position, so that it is known even after the rank cannot report any more (`RankPosition`).

A worker asks nothing of other workers. It reports when it is ready to train, when it waits at a
boundary for newcomers, and when it ends; and it receives each new generation (`survival.py`),
whatever its main thread does.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.agent.liveness import BEAT_S, LINK_VARIABLE, RankPosition
from orchestrator.agent.stacks import describe_stack, install_stack_handler, main_stack
from orchestrator.client.loop import Callback, CompletedUpdate
from orchestrator.engine.common import waiting
from orchestrator.errors import PeerLost

log = logging.getLogger(__name__)

SAVER_S = 60.0
"""Longer than the coordinator takes to choose the rank that saves, even if another takes over."""


class AgentLink:
    """Link of one worker to its agent. Call `send_end` at the end.

    Args:
        on_stop: called with the name of each stop signal that the agent received.

    Attributes:
        saves_on_failure: this worker can save its last boundary's state if another one fails.
        run_failed: another worker failed, and the run ends.
        on_run_failed: called then, from the thread that receives messages.
        on_message: called with each message, from the thread that receives them.
        on_beat: called once a second, from the thread that sends heartbeats.
    """

    def __init__(self, on_stop: Callable[[str], None]) -> None:
        self._on_stop = on_stop
        self._socket = socket.socket(fileno=int(os.environ.pop(LINK_VARIABLE)))
        self._socket.set_inheritable(False)
        os.register_at_fork(after_in_child=self._socket.close)
        self._sending = threading.Lock()
        self._broken = False
        self._ended = threading.Event()
        self.on_message: Callable[[Mapping[str, Any]], None] = lambda _: None
        self.on_beat: Callable[[], None] = lambda: None
        self._position: tuple[float, str, tuple[int, ...]] = (0.0, "", ())
        self.saves_on_failure = self.run_failed = False
        self.on_run_failed: Callable[[], None] = lambda: None
        self._saver: int | None = None
        self._saver_chosen = threading.Event()
        install_stack_handler()
        waiting.note_standstill(None)  # from now on the coordinator says when all ranks wait
        waiting.call_at_changes(self._report)
        self.mark("the start (imports, the job's own)")
        self._report()  # it may be stopped within a second
        for name, run in (("heartbeat", self._send_heartbeats), ("agent", self._receive)):
            threading.Thread(target=run, name=name, daemon=True).start()

    # ------------------------------------------------------------------ messages

    def send_event(self, event: str, **values: Any) -> None:
        """Send the agent an event for the coordinator."""
        self._send({"event": event, **values})

    def await_saver(self, updates: int, *, failed: bool = False) -> int | None:
        """Return the rank that the coordinator chooses to save the last boundary of a failed run;
        None if no choice comes.

        Args:
            updates: that this rank has completed. It has left its window for good.
            failed: because of its own code; another rank is chosen, if one can.
        """
        self.send_event("save_ready", updates=updates, failed=failed)
        with waiting.for_others("the choice of the rank that saves"):
            self._saver_chosen.wait(SAVER_S)
        return self._saver

    def become_program(self, **facts: Any) -> None:
        """Announce that this process executes a program now, and send nothing more by itself.

        Args:
            facts: see `agent.programs.RankProgram`.
        """
        self._ended.set()
        self._send({"program": facts})

    def send_end(self, final_state: str, failure: dict[str, Any] | None) -> None:
        """Report how this rank ended. Without this message, it counts as lost."""
        self._ended.set()
        self._send({"final_state": final_state, "failure": failure})

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            if self._broken:
                return
            try:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError as error:
                self._broken = True
                log.warning("this rank's agent does not answer: %s", error)

    def _receive(self) -> None:
        with self._socket.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                if "stop" in message:
                    self._on_stop(message["stop"])
                if "failed" in message:
                    self.run_failed = True
                    self.send_event("can_save", able=self.saves_on_failure)
                    self.on_run_failed()
                if "saver" in message:
                    self._saver = message["saver"]
                    self._saver_chosen.set()
                if "standstill_s" in message:
                    waiting.note_standstill(message["standstill_s"])
                self.on_message(message)

    # ------------------------------------------------------------------ progress

    def mark(self, position: str, *numbers: int) -> None:
        """Mark where the main thread is. `position` has a `%d` for each number."""
        self._position = (time.monotonic(), position, numbers)

    def _send_heartbeats(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._report()
            self.on_beat()

    def _report(self) -> None:
        if not self._ended.is_set():
            self._send({"seen": self._seen().to_json()})

    def _seen(self) -> RankPosition:
        now, (came, position, numbers) = time.monotonic(), self._position
        where, stack, waits, waited_s = position % numbers, tuple(main_stack()), "", 0.0
        if (wait := waiting.under_way()) is not None and now - wait[0] >= BEAT_S:
            waits = f"{now - wait[0]:.0f} s at {where}" + (f", for {wait[1]}" if wait[1] else "")
            if waiting.waits():  # not one that failed, whose failure this rank handles now
                waited_s = now - wait[0]
        return RankPosition(
            at=f"at {where}, {describe_stack(stack)}",
            where=where,
            waits=waits,
            waited_s=waited_s,
            declared=waiting.declared_activity(),
            stack=stack,
            stood_s=now - max(came, waiting.last_ended()),
        )


class PositionMarks(Callback):
    """Mark each position of the loop, on every rank; leave the loop when another worker failed."""

    def __init__(self, link: AgentLink) -> None:
        self._link = link

    def on_micro_step(self, update: int, done: int, steps: int) -> None:
        if self._link.run_failed:
            raise PeerLost("another rank failed")
        if done < steps:
            self._link.mark("micro-step %d of %d of update %d", done + 1, steps, update + 1)
        else:
            self._link.mark("the boundary of update %d", update + 1)

    def on_held_out_piece(self, done: int) -> None:
        if self._link.run_failed:
            raise PeerLost("another rank failed")
        self._link.mark("piece %d of its held-out data", done + 1)

    def on_boundary(self, done: CompletedUpdate) -> None:
        after = done.window.update + 1
        self._link.mark("what follows update %d (records, evaluation, checkpoint)", after)
