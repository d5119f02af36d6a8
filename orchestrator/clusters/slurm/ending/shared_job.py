"""The end of a job that runs shared: back to the queue for those that are to start again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from orchestrator.clusters.slurm.ending.after_srun import OURS, ask_job, conclude, culprit_of
from orchestrator.clusters.slurm.root_cause import KILLED
from orchestrator.lifecycle.stopping.departure import ask_for_requeue, left_now
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import State, write_end
from orchestrator.scheduler.client import SlurmClient
from orchestrator.scheduler.environment import own_job_id


def start_again(sweep: Path, first: int, again: Sequence[str], killed: Sequence[str]) -> None:
    """Hand the job back to the queue, unless the scheduler has done so, or nobody needs it.

    Args:
        first: the attempt that the job's first start was.
        again: the runs that are to start again, as their own scripts found.
        killed: those whose scripts were killed, and could not find out.
    """
    client, job_id = SlurmClient(), own_job_id(os.environ)
    job = ask_job(client, job_id)
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    if job is None or job.restarts != restarts or job.state not in OURS or job.cancelled:
        return
    attempt, wanted = first + restarts, False
    for run in [RunDir(sweep / name) for name in again]:
        if run.cancel.exists() and run.read_result() is None:  # while it waited for the others
            write_end(run, State.STOPPED)
        wanted |= run.read_result() is None
    for run in [RunDir(sweep / name) for name in killed]:
        wanted |= run.read_result() is None and conclude(
            run,
            attempt,
            KILLED,
            job,
            departure=run.read(run.departure(attempt)) or left_now("its batch script was killed"),
            culprit=lambda run=run: culprit_of(run, attempt, KILLED),
            again=lambda: None,
        )
    if wanted:
        ask_for_requeue(client, job_id)
