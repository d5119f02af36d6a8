"""A worker process, from its environment to its exit status, for jobs and for programs.

Each worker is a fork of its node's agent, which gives it SLURM's variables.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.agent.liveness import EVICTED, FAILED, FINISHED, STOPPED
from orchestrator.agent.processes import began_at
from orchestrator.agent.rank_log import send_output_to
from orchestrator.agent.topology import BATCH_PID_VARIABLE, Topology, interface_variables
from orchestrator.config.schema import Config
from orchestrator.engine.common.waiting import declared
from orchestrator.errors import (
    EVICTED_RANK,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    Evicted,
    Excluded,
    NonFiniteError,
    OrchestratorError,
    PeerLost,
    RanksMissing,
    ReplicasDiffer,
    StopRequested,
    Unrecoverable,
    UsageError,
    WrongResult,
)
from orchestrator.rundir.checkpoints import Fence
from orchestrator.rundir.files import await_disk_space
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import State, failure_record, note_departure, write_failure
from orchestrator.rundir.warnings import warn, warn_into
from orchestrator.trainer.agent_link import AgentLink
from orchestrator.trainer.failure import describe, hide_own_frames, short_traceback
from orchestrator.trainer.stop import GracePeriods, StopFlag

log = logging.getLogger(__name__)

MOST_OF_TRACEBACK = 64 * 1024
FINAL_STATES = {EXIT_FINISHED: FINISHED, EXIT_STOPPED: STOPPED, EVICTED_RANK: EVICTED}


def write_patiently(write: Callable[[], None]) -> None:
    """Write how an attempt ended once there is space on the disk: else it would end as failed."""
    with declared("it waits for space on the disk", brief=True):
        await_disk_space(write, warn)


def run_in_worker(path: Path, attempt: int, body: Callable[[WorkerProcess], int]) -> int:
    """Run `body` as this worker; return its exit status. Errors are recorded, not raised.

    Args:
        body: trains, and returns the exit status; or executes a program.
    """
    run, topology = RunDir(path), Topology.from_env(os.environ)
    if topology.scheduled:
        os.environ.update(interface_variables(os.environ, topology.address))
    send_output_to(run.rank_log(topology.rank), f"{topology.node} rank {topology.rank}")
    warn_into(run.warnings(attempt, topology.node_index), topology.rank)
    worker, code = WorkerProcess(run, attempt, topology), EXIT_FAILED
    try:
        try:
            code = body(worker)
        except StopRequested:
            worker.depart(None)
            code = EXIT_STOPPED
    except BaseException as error:  # noqa: BLE001  # all ranks learn what ended this one
        code = worker.fail(error)
    finally:
        final_state = FINAL_STATES.get(code, FAILED)
        if final_state != EVICTED:  # another rank writes on
            worker.close_tracker(State(final_state))
        worker.link.send_end(final_state, worker.failure)
    return code


class WorkerProcess:
    """This process as its agent and the run folder see it.

    Attributes:
        close_tracker: called at the end, however the run ended.
    """

    def __init__(self, run: RunDir, attempt: int, topology: Topology) -> None:
        self.run, self.attempt, self.topology = run, attempt, topology
        self.stop = StopFlag()
        self.link = AgentLink(self._note_stop)
        self.fence = Fence(run.newest_attempt, attempt)
        self.failure: dict[str, Any] | None = None
        self._failed: tuple[BaseException, int] | None = None  # and the exit status
        self.close_tracker: Callable[[State], None] = lambda _: None
        self._requeue, self._ahead_s = False, 0

    def begin(self, config: Config) -> None:
        """Publish this attempt.

        Raises:
            StaleAttempt: a newer attempt has begun.
        """
        cluster = config.cluster
        self._requeue = cluster.requeue is not False and cluster.allocation == "new"
        self._ahead_s = cluster.signal_ahead_s
        if self.topology.scheduled and self.topology.rank == 0:
            self.fence.publish()

    # ------------------------------------------------------------------ stops

    def _note_stop(self, name: str) -> None:
        self.stop.set(signal.Signals[name])
        log.info("%s; all ranks stop after the same update", self.stop.description)
        self._note_deferral()

    def _note_deferral(self) -> None:
        if self.stop.times and not self.stop.requested:
            log.info("the notice of the time limit is long: they train on until the limit is near")

    @property
    def grace(self) -> GracePeriods | None:
        """Return the times that a stop leaves; None if the scheduler does not restart the run."""
        if not self._requeue:
            return None
        pid = os.environ.get(BATCH_PID_VARIABLE)
        # The batch script, as old as the job, is a process of the first node.
        job_began = began_at(int(pid)) if pid is not None and not self.topology.node_index else None
        return GracePeriods.read(self.run.read_submission(), self._ahead_s, job_began)

    def defer_notice(self) -> None:
        """Train on after a notice that takes half of the time limit or more, till the end is near.

        Rank 0 decides when it is (`LeaveInTime`).
        """
        grace = self.grace if self.topology.scheduled else None
        self.stop.defers = grace is not None and grace.end_s is not None
        self._note_deferral()

    @property
    def restarts(self) -> bool:
        """Return whether the scheduler restarts the run after a stop."""
        return self.topology.scheduled and self._requeue and not self.run.cancel.exists()

    def depart(self, updates: int | None) -> bool:
        """Note after a stop that the run continues later; return whether it does.

        Args:
            updates: completed; None if this worker cannot know, and another one's note stays.
        """
        if not self.restarts:
            return False
        self.fence.check()
        if updates is not None or not self.run.departure(self.attempt).exists():
            why = self.stop.description
            write_patiently(lambda: note_departure(self.run, self.attempt, why, updates))
        return True

    def why_for_good(self) -> str | None:
        """Return why a stop ends the run for good; None if a person asked for its end."""
        queued = self.topology.scheduled and not self.run.read_submission().get("attended")
        if not queued or self.run.cancel.exists():
            return None
        return f"{self.stop.description}; with cluster.requeue=false it does not start again"

    # ------------------------------------------------------------------ the end

    def fail(self, error: BaseException) -> int:
        """Record what ended this worker, for people and other ranks; return the exit status."""
        if self._failed is None or self._failed[0] is not error:
            self._failed = error, self._record(error)
        return self._failed[1]

    def _record(self, error: BaseException) -> int:
        if isinstance(error, Unrecoverable) and error.nodes and self.restarts:
            from submitit.slurm.slurm import SlurmJobEnvironment

            hosts = list(SlurmJobEnvironment().hostnames)
            names = [hosts[n] if n < len(hosts) else f"number {n}" for n in error.nodes]
            why = f"node{'s' * (len(names) > 1)} {', '.join(names)} went away; {error}"
            write_patiently(lambda: note_departure(self.run, self.attempt, why))
            return EXIT_STOPPED
        if not isinstance(error, OrchestratorError):
            hide_own_frames(error)
            sys.stderr.write(short_traceback(error))  # the failure's record has the whole one
        else:
            print(f"error: {error}", file=sys.stderr)
        rank = self.topology.rank
        others = isinstance(error, ReplicasDiffer | WrongResult) and rank not in error.ranks
        self.failure = failure_record(
            rank,
            self.topology.node,
            describe(error),
            secondary=others or isinstance(error, PeerLost | RanksMissing),
            usage=isinstance(error, UsageError),
            replicas_differ=isinstance(error, ReplicasDiffer),
            excluded=isinstance(error, Excluded),
            non_finite=isinstance(error, NonFiniteError),
            traceback="".join(traceback.format_exception(error))[-MOST_OF_TRACEBACK:],
        )
        if not isinstance(error, Evicted):  # the others continue
            write_failure(self.run, self.attempt, self.failure)
        return error.exit_code if isinstance(error, OrchestratorError) else EXIT_FAILED
