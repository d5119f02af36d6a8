"""SLURM runs ended for good, by a person: one question and at most two scancel for any number."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from orchestrator.clusters.api import State
from orchestrator.clusters.slurm.queue.elements import is_element
from orchestrator.clusters.slurm.queue.packing.cancel import end_parts, of_whole_jobs
from orchestrator.clusters.slurm.queue.packing.members import is_over, is_packed_in
from orchestrator.clusters.slurm.trust import client_of
from orchestrator.errors import ClusterError
from orchestrator.rundir.files import read_json, write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import describe_stop, write_end
from orchestrator.scheduler.client import SlurmClient
from orchestrator.scheduler.jobs import Job, queued

CANCEL_S, LOOK_S = 5.0, 0.2
UNSENT = "nothing was sent"
IS_OVER = ("invalid job id", "already completing or completed")


def cancel_all(runs: Sequence[RunDir], *, now: bool) -> dict[Path, str]:
    """Stop runs at their next boundaries, or at once; those that wait leave the queue.

    Returns:
        What happens to each, without those that are over: "is cancelled; …".

    Raises:
        ClusterError: the scheduler is silent, or refuses. No run counts as cancelled then.
    """
    clusters: dict[str | None, list[tuple[RunDir, str]]] = {}
    for run in runs:
        handle = run.read_handle()
        if handle is not None:
            clusters.setdefault(handle.get("slurm_conf"), []).append((run, str(handle["job_id"])))
    found: dict[Path, str] = {}
    for conf, members in clusters.items():
        [*_, client] = [client_of(run, conf) for run, _ in members]
        found |= _cancel(client, members, now=now)
    return found


def _cancel(
    client: SlurmClient, members: Sequence[tuple[RunDir, str]], *, now: bool
) -> dict[Path, str]:
    """Those of one cluster."""
    jobs = queued(client, [job_id for _, job_id in members])
    found: dict[Path, str] = {}
    ends: dict[RunDir, Job] = {}
    stops: dict[RunDir, Job] = {}
    for run, job_id in members:
        job = jobs.get(job_id)
        if job is None or not job.alive or is_over(run):
            continue
        if not is_ours(run, job):
            found[run.path] = (
                f"which {run.handle} names, is not this run's: it runs {job.command}; {UNSENT}"
            )
            continue
        (ends if now or job.waiting else stops)[run] = job
    end(client, {run: job.id for run, job in ends.items()})
    stop(client, {run: job.id for run, job in stops.items()})
    _await_the_end(client, {run: job for run, job in ends.items() if job.waiting})
    for run in ends:
        found[run.path] = "is cancelled; resume goes on from what was saved"
    for run, job in stops.items():
        still = f"; until then, {job.standstill}" if job.standstill else ""
        found[run.path] = f"{describe_stop(run)}{still}; --now ends it at once"
    return found


def end(client: SlurmClient, jobs: Mapping[RunDir, str]) -> None:
    """End jobs at once, queued or running; what follows their last checkpoints is lost."""
    _send(client, jobs, "now")


def stop(client: SlurmClient, jobs: Mapping[RunDir, str]) -> None:
    """Ask all ranks of each job to stop, each in its way; see `describe_stop`."""
    _send(client, jobs, "stop", "--signal=USR2")


def _send(client: SlurmClient, jobs: Mapping[RunDir, str], how: str, *flags: str) -> None:
    if not jobs:
        return
    with contextlib.ExitStack() as marks:
        for run in jobs:
            marks.enter_context(_marked_cancelled(run, how))
        whole = of_whole_jobs(jobs)
        end_parts(client, {run: job for run, job in jobs.items() if job not in whole}, *flags)
        if not whole:
            return
        answer = client.ask("scancel", *flags, *sorted(whole))
        # of many, some may have ended in this moment: they are over, and the others heard it
        lines = [line for line in answer.words.lower().splitlines() if line.strip()]
        over = [line for line in lines if any(words in line for words in IS_OVER)]
        if answer.code and not (len(whole) > 1 and lines == over):
            raise ClusterError(f"scancel: {answer.words}")


@contextlib.contextmanager
def _marked_cancelled(run: RunDir, how: str) -> Generator[None]:
    """What makes the ranks end rather than depart: written before they get any signal, and
    taken back when the signal could not be sent, for then the run was not cancelled.
    """
    before = read_json(run.cancel)
    write_json(run.cancel, {"how": how, "time": time.time()})
    try:
        yield
    except ClusterError:
        if before is None:
            run.cancel.unlink(missing_ok=True)
        raise


def is_ours(run: RunDir, job: Job) -> bool:
    """Whether a job's batch script, as the scheduler knows it, is one in this run's folder."""
    script = Path(os.path.realpath(job.command))
    own = script.is_relative_to(os.path.realpath(run.submitit))
    return own or is_element(run.path, script, job.id) or is_packed_in(run, script, job.id)


def _await_the_end(client: SlurmClient, jobs: Mapping[RunDir, Job]) -> None:
    """Jobs that have not begun end at once, and have no batch script to say so."""
    left = dict(jobs)
    deadline = time.monotonic() + CANCEL_S
    while left and time.monotonic() < deadline:
        known = queued(client, [job.id for job in left.values()])
        for run, job in list(left.items()):
            if run.result.exists():  # its job waits on, for others
                del left[run]
            elif job.id not in known or not known[job.id].alive:
                write_end(run, State.STOPPED)
                del left[run]
        if left:
            time.sleep(LOOK_S)
