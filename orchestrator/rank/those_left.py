"""A rank's word to those that survive with it, and what its job needs of them under a scheduler.

The batch script goes with its node, and ranks of other nodes survive that. Nobody would end the job
then, or hand it back to the queue, so the lowest of them does.
"""

from __future__ import annotations

from typing import Protocol

from orchestrator.errors import ClusterError
from orchestrator.lifecycle.signs.script_life import is_silent
from orchestrator.lifecycle.stopping.departure import (
    ask_for_requeue,
    first_to_leave,
    hand_back,
    left_now,
    scheduler,
)
from orchestrator.lifecycle.topology import Topology
from orchestrator.rundir.folder import RunDir


class Left(Protocol):
    """See `Survivors`. `place`: this rank's number among them, and how many they are."""

    place: tuple[int, int]

    @property
    def nodes_gone(self) -> set[int]: ...
    def end(self, word: str) -> None: ...


class ThoseLeft:
    """One rank's."""

    def __init__(self, run: RunDir, attempt: int, topology: Topology) -> None:
        self._run, self._attempt, self._topology = run, attempt, topology
        self._left: Left | None = None
        self._handed_back = False

    def begin(self, left: Left) -> None:
        """From now on losses are survived."""
        self._left = left

    @property
    def go_on(self) -> bool:
        """Whether losses are survived."""
        return self._left is not None

    def hear(self, word: str) -> None:
        """This rank's last word: without it they would go on without this rank."""
        if self._left is not None:
            self._left.end(word)

    @property
    def first_node_gone(self) -> bool:
        """Whether nobody is left on the node that the batch script is on, under a scheduler."""
        scheduled = self._topology.scheduled
        return scheduled and self._left is not None and 0 in self._left.nodes_gone

    def hand_back(self) -> None:
        """The job, to the queue."""
        self._handed_back = True
        hand_back(self._topology.job_id)

    def stand_in_for_script(self, *, timeout_s: float, requeue: bool) -> None:
        """On the lowest rank, at its end, where the script is gone: what it would do now. A job
        whose run has ended is cancelled, since nothing else ends it; any other begins again.

        Args:
            timeout_s: takes so long to find that out.
            requeue: whether the job may begin again.
        """
        leads = self._left is not None and self._left.place[0] == 0
        if self._handed_back or not leads or not self.first_node_gone:
            return
        if not is_silent(self._run, self._attempt, timeout_s):
            return
        print("the batch script went with its node; this rank does its part", flush=True)
        run, job = self._run, self._topology.job_id
        try:
            if run.read_result() is not None or run.cancel.exists() or not requeue:
                scheduler().must("scancel", job)
                return
            first_to_leave(run, self._attempt, left_now("its batch script went with its node"))
            ask_for_requeue(scheduler(), job)
        except ClusterError as error:
            print(f"error: {error}", flush=True)
