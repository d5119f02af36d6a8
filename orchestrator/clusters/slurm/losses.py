"""Ranks of a step that are gone while the others go on, and ends that nobody survives.

With `run.survive` srun ends nobody, whoever is gone (surviving.md). What it would do otherwise
a process beside it does, on the batch script's node: it reads what srun says of each rank's end, as
the launcher of simulated nodes hears it from them (`agent/coordinator.py`). What was taken away
is a loss; all else is a failure, and ends the step. So is any end before the training began.
"""

from __future__ import annotations

import math
import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path

from orchestrator.agent.root_cause import WORDLESS
from orchestrator.clusters.slurm.root_cause import read_said, silent_end, survived
from orchestrator.errors import EXIT_FINISHED, OrchestratorError, describe_status
from orchestrator.lifecycle.prctl import die_with
from orchestrator.lifecycle.signs.last_word import all_wordless
from orchestrator.lifecycle.signs.script_life import beat
from orchestrator.lifecycle.stopping.departure import NODE_FAILURE
from orchestrator.lifecycle.survival.record import GenerationRecord
from orchestrator.rundir.folder import RunDir
from orchestrator.slurm_client import STOP_SIGNALS, task_ends
from orchestrator.trainer.failure import failure_of, write_failure

LOOK_S = 0.5
GRACE_S = 1.0  # for those that a failed rank leaves behind, to write down what they saw
SAID_S = 10.0  # within which srun says how a rank ended, if its code was not 0
END_S = 10.0  # for all ranks to end, once the run's end stands; some may be gone with their node
SECONDARY_S = 60.0  # longer than who lost a peer looks for the cause
WAYS = ((signal.SIGUSR2, 2.0), (signal.SIGTERM, END_S), (signal.SIGKILL, math.inf))
"""How srun is ended, and how long each may take: ranks that hear USR2 end with the one that failed;
of TERM srun ends them, and waits on where a node does not answer."""


class Step:
    """What ended in an attempt's step so far."""

    def __init__(self, run: RunDir, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self._record = GenerationRecord(run.attempt(attempt))
        self._wordless_at: dict[int, float] = {}

    def note_failures(self, now: float) -> None:
        """Write down the first failure, where its rank could not do it itself."""
        run, attempt = self._run, self._attempt
        if self.patience_s() == GRACE_S:
            return
        said = read_said(run, attempt)
        ends, began = task_ends(said), self._record.begun
        known = {failure["rank"] for failure in run.failures(attempt)}
        for end in ends:
            if end.rank not in known and not (began and survived(end)):
                found = silent_end(run, end, run.nodes_of_ranks(attempt), said, began=began)
                self._note(end.rank, found.node, found.cause)
                return
        named = known.union(end.rank for end in ends)
        failed = set(NODE_FAILURE.findall(said))
        for rank, node in all_wordless(run, attempt):
            first = self._wordless_at.setdefault(rank, now)
            if rank not in named and node not in failed and now - first > SAID_S:
                self._note(rank, node, describe_status(EXIT_FINISHED) + WORDLESS)
                return

    def _note(self, rank: int, node: str, cause: str) -> None:
        failure = failure_of(rank, node, OrchestratorError(cause)) | {"traceback": ""}
        write_failure(self._run, self._attempt, failure)

    def patience_s(self) -> float | None:
        """For how long the step may still last; None while there is no end in sight."""
        run, attempt = self._run, self._attempt
        failures = run.failures(attempt)
        if any(not failure["secondary"] for failure in failures):
            return GRACE_S
        if run.result.exists() or run.departure(attempt).exists():
            return END_S
        return SECONDARY_S if failures else None


def stand_by(path: Path, attempt: int, pid: int) -> None:
    """Be the process beside srun, which is `pid`, to its end."""
    for number in (*STOP_SIGNALS, signal.SIGINT, signal.SIGHUP):  # meant for the ranks
        signal.signal(number, signal.SIG_IGN)
    die_with(os.getppid())
    try:
        srun = os.pidfd_open(pid)
    except ProcessLookupError:  # it has ended already
        return
    run = RunDir(path)
    step, ways, next_at = Step(run, attempt), iter(WAYS), None
    while not select.select([srun], [], [], LOOK_S)[0]:
        now = time.monotonic()
        _beat(run, attempt)
        step.note_failures(now)
        patience_s = step.patience_s()
        if next_at is None and patience_s is not None:
            next_at = now + patience_s
        if next_at is not None and now >= next_at:
            number, pause_s = next(ways)
            with suppress(ProcessLookupError):  # it has ended in this moment
                signal.pidfd_send_signal(srun, number)
            next_at = now + pause_s


def _beat(run: RunDir, attempt: int) -> None:
    try:
        beat(run, attempt)
    except OSError as error:  # a full disk: what else is done here needs none
        print(f"the batch script could not give a sign of life: {error}", flush=True)  # noqa: T201  # batch.log
