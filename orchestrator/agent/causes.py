"""Causes of an attempt's end: what ended, was lost, failed or hung; and the outcome that follows.

| fact | kept as | counts as a cause |
|---|---|---|
| a hang, or a standstill | the culprit | first of all, unless a rank had ended before |
| an end that the others do not survive | an end | by `find_root_cause`, with the failure records |
| a loss that the others survive | a loss | if no worker remained to report the attempt's end |
| a worker's own report of its failure | a failure | no; it explains the rank's end |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from orchestrator.agent.judge import Standing
from orchestrator.agent.liveness import FINISHED, STOPPED
from orchestrator.agent.node_spec import NodeSpec
from orchestrator.agent.root_cause import (
    AbnormalEnd,
    Straggler,
    add_position,
    add_waits,
    find_root_cause,
)
from orchestrator.agent.worker_state import WorkerState
from orchestrator.rundir.files import read_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.generations import candidate_causes
from orchestrator.rundir.outcome import Culprit, State

Stalled = Literal["stopped", "asleep"]
"""A process stands still for no fault of its code: by a signal, or asleep in the kernel."""


class Causes:
    """Causes of one attempt's end, as far as they are known.

    Attributes:
        culprit: of a hang or a standstill.
    """

    def __init__(self, spec: NodeSpec) -> None:
        self._spec, self._run = spec, RunDir(spec.run)
        self._ends: list[AbnormalEnd] = []
        self._losses: list[tuple[AbnormalEnd, list[int]]] = []
        self._failures: list[dict[str, Any]] = []
        self._stalled: Stalled | None = None  # why the culprit's code is not at fault
        self.culprit: Culprit | None = None

    # ------------------------------------------------------------------ facts

    def add_failure(self, failure: dict[str, Any]) -> None:
        self._failures.append(failure)

    def add_end(self, end: AbnormalEnd) -> None:
        self._ends.append(end)

    def add_loss(self, end: AbnormalEnd, members: list[int]) -> None:
        self._losses.append((end, members))

    def forget_losses(self, members: set[int]) -> None:
        """Forget the losses of these members, which live."""
        losses = [
            (end, [member for member in lost if member not in members])
            for end, lost in self._losses
        ]
        self._losses = [(end, lost) for end, lost in losses if lost]

    def blame(self, culprit: Culprit, stalled: Stalled | None = None) -> None:
        self.culprit, self._stalled = culprit, stalled

    # ------------------------------------------------------------------ what follows

    @property
    def is_known(self) -> bool:
        """Return whether the attempt fails already: what hangs after that is an effect of it."""
        return self.culprit is not None or bool(self._ends)

    @property
    def replicas_differ(self) -> bool:
        return any(failure.get("replicas_differ") for failure in self._failures)

    @property
    def are_secondary(self) -> bool:
        """Return whether all that failed so far only lost a peer."""
        secondary = {failure["rank"] for failure in self._failures if failure["secondary"]}
        return all(end.rank in secondary for end in self._ends)

    def describe_losses(self, members: set[int]) -> list[str]:
        """Describe how these members were lost."""
        reasons = [end.describe() for end, lost in self._losses if not members.isdisjoint(lost)]
        return list(dict.fromkeys(reasons))

    def outcome(
        self, workers: Mapping[int, WorkerState], survived: Sequence[list[int]]
    ) -> dict[str, Any]:
        """Return the outcome of the attempt, whose workers have ended, as its file has it.

        Args:
            workers: by rank.
            survived: `GenerationRecord.losses`.
        """
        state, culprit = self._decide(workers, survived)
        lost: str | None = None  # described if it is not the job's fault: a scheduler restarts it
        if culprit is not None and culprit.rank is None:
            lost = f"node {culprit.node} stopped answering"
        elif culprit is not None and self._is_bad_luck():
            lost = f"rank {culprit.rank} on {culprit.node}: {culprit.cause}"
        return {
            "state": state.value,
            "culprit": culprit
            and culprit.to_json() | {"usage": culprit.usage, "hangs": culprit.hangs},
            "lost": lost,
            "stalled": self._stalled,
        }

    def _decide(
        self, workers: Mapping[int, WorkerState], survived: Sequence[list[int]]
    ) -> tuple[State, Culprit | None]:
        """Return state and culprit: finished only if every worker said so."""
        final_states = {worker.final_state for worker in workers.values()} - {None}
        culprit = self.culprit or self._root_cause(workers, survived)
        if culprit is not None:
            culprit = describe_hang(culprit, workers, self._run)
        if culprit is not None or not final_states <= {FINISHED, STOPPED} or not final_states:
            return State.FAILED, culprit
        return (State.STOPPED if STOPPED in final_states else State.FINISHED), None

    def _root_cause(
        self, workers: Mapping[int, WorkerState], survived: Sequence[list[int]]
    ) -> Culprit | None:
        """Return the culprit among ends and losses; None without one."""
        ends = [*self._ends, *candidate_causes(self._losses, survived)]
        all_lost = all(worker.final_state is None for worker in workers.values())
        # Losses that were survived are causes only where no worker remained to report the end.
        if not ends or not (self._ends or all_lost):
            return None
        behind = [
            Straggler(
                rank=worker.rank,
                node=self._spec.name_of(self._spec.node_of(worker.rank)),
                seen=worker.seen,
            )
            for worker in workers.values()
            if worker.standing in (Standing.BUSY, Standing.IDLE, Standing.DECLARED)
        ]
        known = {failure["rank"] for failure in self._failures}
        records = [*self._run.failures(self._spec.attempt, known), *self._failures]
        finished = [worker.rank for worker in workers.values() if worker.final_state == FINISHED]
        return find_root_cause(self._run, records, ends, behind, finished)

    def _is_bad_luck(self) -> bool:
        """Return whether the culprit stood still for no fault of the job. A rank that sleeps in the
        kernel twice in a row does so because of what it does; a signal comes from outside.
        """
        if self._stalled != "asleep" or not self._spec.attempt:
            return self._stalled is not None
        before = read_json(self._run.outcome(self._spec.attempt - 1)) or {}
        return before.get("stalled") != "asleep"


# ----------------------------------------------------------------------
# Ranks that hang.


def hanging_culprit(
    spec: NodeSpec, rank: int, cause: str, lines: Iterable[str], *, complete: bool = False
) -> Culprit:
    """Return the culprit for a rank that hangs.

    Args:
        lines: of its stack or log.
    """
    return Culprit(
        rank=rank,
        node=spec.name_of(spec.node_of(rank)),
        cause=cause,
        log_tail=tuple(lines),
        hangs=True,
        complete=complete,
    )


def await_stack(worker: WorkerState, run: RunDir) -> None:
    """Note where in its log the stack will be that the worker writes before it is killed, so that
    `describe_hang` completes its cause by it.
    """
    worker.log_bytes = 0
    with contextlib.suppress(OSError):  # it may have no log
        worker.log_bytes = run.rank_log(worker.rank).stat().st_size


def describe_hang(culprit: Culprit, workers: Mapping[int, WorkerState], run: RunDir) -> Culprit:
    """Add where a hanging culprit is, and what the others wait for."""
    if culprit.complete or not culprit.hangs:
        return culprit
    if culprit.rank is not None:
        worker = workers[culprit.rank]
        if worker.log_bytes is not None:
            log_file = run.rank_log(worker.rank)
            culprit = add_position(culprit, worker.seen, log_file, worker.log_bytes)
    return add_waits(culprit, {worker.rank: worker.seen.waits for worker in workers.values()})
