"""After srun, in the batch script: hand the job back to the queue, or say who failed.

It runs on the first node, outside any container, when all ranks have ended. The scheduler is asked
first what it thinks of the job: one that it has already taken back (requeued, cancelled) must not
be touched, and a script that outlived its slurmd must not speak for a restarted job.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from orchestrator.errors import EXIT_FINISHED
from orchestrator.rundir import RunDir, read_json, write_json
from orchestrator.submit.api import Culprit, State
from orchestrator.submit.ending import write_end
from orchestrator.submit.folder_status import recent_updates
from orchestrator.submit.restarts import rule
from orchestrator.submit.slurm_blame import blame_slurm
from orchestrator.submit.slurm_client import SchedulerDown, SlurmClient
from orchestrator.submit.slurm_jobs import shown
from orchestrator.worker.departure import ask_for_requeue, step_gone
from orchestrator.worker.fence import Fence

OURS = frozenset({"RUNNING", "COMPLETING"})
ASK_FOR_S = 300.0
LIMIT_NEAR_S = 150.0
FRUITLESS = 10
STOP_CODES = frozenset(128 + s for s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))


def _job(client: SlurmClient, job_id: str) -> dict[str, str]:
    """What the controller says of this job; waits for a controller that does not answer."""
    deadline = time.monotonic() + ASK_FOR_S
    pause = 1.0
    while True:
        try:
            return shown(client, job_id)
        except SchedulerDown:
            if time.monotonic() > deadline:
                raise
            time.sleep(pause)
            pause = min(2 * pause, 30.0)


def reason(job: dict[str, str], now: float) -> str | None:
    """Why the scheduler wanted the job to stop; None when it does not show."""
    if job.get("PreemptTime", "None") not in ("None", "N/A"):
        return "preempted"
    end = job.get("EndTime", "")
    if end.isdigit() and float(end) - now < LIMIT_NEAR_S and job.get("TimeLimit") != "UNLIMITED":
        return "near its time limit"
    return None


def settle(path: Path, attempt: int, code: int) -> None:
    """Finish what the ranks could not. Args: `code`: srun's exit code."""
    run = RunDir(path)
    if Fence(run.newest_attempt, attempt).superseded:
        return
    result = run.read_result()
    if result is not None and code == EXIT_FINISHED:
        return
    job_id = os.environ["SLURM_JOB_ID"]
    job = _job(SlurmClient(), job_id)
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    if job.get("JobState") not in OURS or job.get("Restarts", restarts) != restarts:
        return
    departure = read_json(run.departure(attempt)) or step_gone(run, attempt)
    stopped_early = code in STOP_CODES and not run.failures(attempt)
    requeue = job.get("Requeue") == "1"
    if run.cancel.exists() and (code == EXIT_FINISHED or stopped_early):
        write_end(run, State.STOPPED)
    elif stuck := _stuck(run, attempt):
        write_end(run, State.FAILED, Culprit(rank=None, node="batch", cause=stuck))
    elif requeue and (departure is not None or stopped_early):
        _requeue(run, attempt, departure or {"updates": None, "time": time.time()}, job, job_id)
    elif departure is not None and departure.get("node"):
        cause = "it stopped answering: the ranks there are gone, their step daemon with them"
        _failed(
            run, attempt, Culprit(rank=None, node=departure["node"], cause=cause), requeue, job_id
        )
    else:
        _failed(run, attempt, _culprit(run, attempt, code), requeue, job_id)


def _failed(run: RunDir, attempt: int, culprit: Culprit, requeue: bool, job_id: str) -> None:
    """Hand the job back where `run.max_restarts` allows; else write the end."""
    allowed = int(run.read_config()["run"].get("max_restarts", 0))
    first = int((read_json(run.handle) or {}).get("attempt", 0))
    most = allowed if requeue else 0
    ruling = rule(run, attempt, culprit, first=first, most=most)
    if ruling.again:
        ask_for_requeue(job_id)
    else:
        write_end(run, State.FAILED, culprit, remark=ruling.words)


def _requeue(
    run: RunDir, attempt: int, departure: dict[str, Any], job: dict[str, str], job_id: str
) -> None:
    why = reason(job, time.time()) or departure.get("why") or "stopped before it began"
    write_json(run.departure(attempt), {**departure, "why": why})
    ask_for_requeue(job_id)


def _stuck(run: RunDir, attempt: int) -> str | None:
    """A sentence when start after start has brought no update: requeueing would never end."""
    if attempt < FRUITLESS:
        return None
    notes = [read_json(run.restart(n)) or {} for n in range(attempt - FRUITLESS + 1, attempt + 1)]
    began_at = {note.get("resumed_from") for note in notes}
    done = recent_updates(run)[-1:]
    if len(began_at) > 1 or (done and done[0].get("attempt", 0) > attempt - FRUITLESS):
        return None
    return (
        f"{FRUITLESS} starts in a row were stopped before one update was done; give the job more "
        f"time (cluster.time_min), less notice (cluster.signal_ahead_s), or shorter updates "
        f"(accumulation.steps)"
    )


def _culprit(run: RunDir, attempt: int, code: int) -> Culprit:
    if code == EXIT_FINISHED:
        return Culprit(
            rank=None, node="batch", cause="all ranks ended in order, but none wrote a result"
        )
    return blame_slurm(run, attempt, _nodes_of_ranks(run), code)


def _nodes_of_ranks(run: RunDir) -> dict[int, str]:
    """Each rank's node by the scheduler's name; srun itself calls nodes by their host names."""
    from submitit.slurm.slurm import SlurmJobEnvironment

    nodes = SlurmJobEnvironment().hostnames
    ranks = int(run.read_plan().get("ranks") or 0)
    width = max(1, ranks // len(nodes))
    return {rank: nodes[rank // width] for rank in range(width * len(nodes))}
