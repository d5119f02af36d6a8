"""After srun, in the batch script: hand the job back to the queue, or say who failed.

It runs on the first node, outside any container, when all ranks have ended. The scheduler is asked
first what it thinks of the job: one that it has already taken back (requeued, cancelled) must not
be touched, and a script that outlived its slurmd must not speak for a restarted job. Where the
script was killed itself, `settle.py` does the same later.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.clusters.api import Culprit, State
from orchestrator.clusters.slurm.root_cause import (
    KILLED,
    blame_slurm,
    srun_ended,
    stopped_only,
)
from orchestrator.clusters.slurm.watch import CAUSES
from orchestrator.config.program import is_program
from orchestrator.config.schema import SIGNAL_AHEAD_S
from orchestrator.errors import EXIT_FINISHED
from orchestrator.lifecycle.signs.last_word import ended_with, wordless
from orchestrator.lifecycle.signs.node_watch import STOPPED
from orchestrator.lifecycle.stopping.deadline import reason
from orchestrator.lifecycle.stopping.departure import ask_for_requeue, step_gone
from orchestrator.rundir.checkpoints import Fence
from orchestrator.rundir.files import read_json, write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import rule, write_end
from orchestrator.rundir.status import recent_updates
from orchestrator.scheduler.client import SchedulerDown, SlurmClient
from orchestrator.scheduler.environment import own_job_id
from orchestrator.scheduler.jobs import Standing, standing
from orchestrator.scheduler.srun_words import STOP_CODES

OURS = frozenset({"RUNNING", "COMPLETING"})
LONGEST_PAUSE_S = 30.0
FRUITLESS = 10


def ask_job(client: SlurmClient, job_id: str) -> Standing | None:
    """What the controller says of this job. Waits for as long as it does not answer: without it
    nobody else could use these nodes either, and what is known would be lost.
    """
    pause = 1.0
    while True:
        try:
            return standing(client, job_id)
        except SchedulerDown as error:
            print(f"{error}; asking again in {pause:g} s", flush=True)  # noqa: T201  # batch.log
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)


def cancelled_by_scheduler() -> Culprit:
    return Culprit(rank=None, node="scheduler", cause=CAUSES["CANCELLED"])


def finish(
    path: Path, attempt: int, code: int, told: str, again: Callable[[], None] | None = None
) -> bool:
    """Finish what the ranks could not.

    Args:
        code: srun's exit code.
        told: the first signal that the batch script got, or "".
        again: has the run start again, where its job is not its own; None: the job is requeued.

    Returns:
        Whether it starts again.
    """
    run = RunDir(path)
    if Fence(run.newest_attempt, attempt).is_stale or run.read_result() is not None:
        return False
    job_id = own_job_id(os.environ)
    job = ask_job(SlurmClient(), job_id)
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    departure = run.read(run.departure(attempt))
    if departure and job and job.restarts == restarts + 1:  # taken back while the ranks left
        _note(run, attempt, departure, job, restarts)
    if job is None or job.restarts != restarts or job.state not in OURS | {"CANCELLED"}:
        return False
    if job.cancelled or (again is not None and _ended_alone(run)):
        write_end(run, State.STOPPED, cancelled_by_scheduler())
        return False
    departure = departure or step_gone(run, attempt)
    if departure is None and (why := _cut_short(run, attempt, code, told)):
        departure = {"why": why, "updates": None, "time": time.time()}
    return conclude(
        run,
        attempt,
        code,
        job,
        departure=departure,
        culprit=lambda: culprit_of(run, attempt, code),
        again=again or (lambda: ask_for_requeue(SlurmClient(), job_id)),
    )


def _ended_alone(run: RunDir) -> bool:
    """Whether a person had its step ended at once, and not its job."""
    return (read_json(run.cancel) or {}).get("how") == "now"


def _cut_short(run: RunDir, attempt: int, code: int, told: str) -> str | None:
    """What stopped an attempt, although no rank failed and none left in order; None otherwise."""
    if run.failures(attempt) or code not in {*STOP_CODES, KILLED}:
        return None
    if code in STOP_CODES and stopped_only(run, attempt):
        return f"its batch script was sent SIG{told}" if told else "stopped before it began"
    # A signal to all finds ranks that have no handler yet, and the notice after it ends some, too.
    if told and (code == KILLED or srun_ended(run, attempt)):
        return f"its batch script was sent SIG{told}"
    return srun_ended(run, attempt)


def conclude(
    run: RunDir,
    attempt: int,
    code: int,
    job: Standing,
    *,
    departure: dict[str, Any] | None,
    culprit: Callable[[], Culprit],
    again: Callable[[], None],
) -> bool:
    """Start the run again, or write its end, by what its attempt left.

    Args:
        departure: the note of an attempt that left in order, that was told to stop before it
            could, or whose node fell silent.
        culprit: finds who is to blame for a failure.
        again: hands the job back to the queue.

    Returns:
        Whether it starts again.
    """
    if run.cancel.exists() and (departure is not None or code == EXIT_FINISHED):
        write_end(run, State.STOPPED)
        return False
    program = is_program(run.read_config()["job"])
    if departure is None and program and code == EXIT_FINISHED and not wordless(run, attempt):
        # nobody of its ranks could know that all of them had
        write_end(run, State.STOPPED if ended_with(run, attempt, STOPPED) else State.FINISHED)
        return False
    if not program and (stuck := _stuck(run, attempt)):
        write_end(run, State.FAILED, Culprit(rank=None, node="batch", cause=stuck))
        return False
    if job.requeue and departure is not None:
        _note(run, attempt, departure, job, job.restarts)
        again()
        return True
    found = culprit()
    if departure is not None and departure.get("node"):
        cause = "it stopped answering: the ranks there are gone, their step daemon with them"
        found = Culprit(rank=None, node=departure["node"], cause=cause)
    allowed = int(run.read_config()["run"].get("max_restarts", 0))
    first = int((run.read_handle() or {}).get("attempt", 0))
    ruling = rule(run, attempt, found, first=first, most=allowed if job.requeue else 0)
    if ruling.again:
        again()
    else:
        write_end(run, State.FAILED, found, remark=ruling.words)
    return ruling.again


def _note(
    run: RunDir, attempt: int, departure: dict[str, Any], job: Standing, restarts: int
) -> None:
    """Why the attempt left, where the scheduler knows that better than its ranks."""
    why = departure.get("why")
    if not departure.get("node"):  # a silent node needs no other reason
        ahead_s = run.read_config()["cluster"].get("signal_ahead_s") or SIGNAL_AHEAD_S
        why = reason(job, time.time(), float(ahead_s), restarts) or why
    write_json(run.departure(attempt), {**departure, "why": why})


def _stuck(run: RunDir, attempt: int) -> str | None:
    """A sentence when start after start has brought no update: requeueing would never end."""
    if attempt < FRUITLESS:
        return None
    notes = [run.read(run.restart(n)) or {} for n in range(attempt - FRUITLESS + 1, attempt + 1)]
    began_at = {note.get("resumed_from") for note in notes}
    done = recent_updates(run)[-1:]
    if len(began_at) > 1 or (done and done[0].get("attempt", 0) > attempt - FRUITLESS):
        return None
    return (
        f"{FRUITLESS} starts in a row were stopped before one update was done; give the job more "
        f"time (cluster.time_min), less notice (cluster.signal_ahead_s), or shorter updates "
        f"(accumulation.steps)"
    )


def culprit_of(run: RunDir, attempt: int, code: int) -> Culprit:
    if code == EXIT_FINISHED and wordless(run, attempt) is None:
        return Culprit(
            rank=None, node="batch", cause="all ranks ended in order, but none wrote a result"
        )
    return blame_slurm(run, attempt, run.nodes_of_ranks(attempt), code)
