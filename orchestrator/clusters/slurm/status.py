"""Status of SLURM runs: one squeue call per cluster, and one sacct call for forgotten jobs.

Without an answer, a run that has no recorded end is unknown.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from orchestrator.clusters.slurm.diagnosis import diagnose, recorded_end
from orchestrator.clusters.slurm.finalize import finalize_ended_job
from orchestrator.clusters.slurm.handle import is_of_another
from orchestrator.clusters.slurm.scheduler import (
    ScheduledJob,
    SlurmClient,
    accounted_ends,
    jobs_of_user,
    queued,
)
from orchestrator.clusters.slurm.submission import ARRAYS
from orchestrator.clusters.slurm.trust import client_of
from orchestrator.errors import ClusterError
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import name_of_culprit
from orchestrator.rundir.status import (
    DAMAGE,
    ENDED_STATES,
    UNREADABLE,
    RunStatus,
    from_folder,
    has_begun,
    mark_unknown,
    status_or_damage,
)

NO_ANSWER = "the scheduler gave no answer"


def update_statuses(runs: Sequence[RunDir], statuses: dict[Path, RunStatus]) -> Iterator[str]:
    """Fill in the schedulers' status of these runs; yield sentences about missing answers."""
    clusters: dict[str | None, list[RunDir]] = {}
    for run in runs:
        clusters.setdefault((run.read_handle() or {}).get("slurm_conf"), []).append(run)
    for conf, members in clusters.items():
        try:
            client = client_of(members[0], conf)
            ids = {str(statuses[run.path].job_id) for run in members}
            if any(run.handle.stat().st_uid != os.getuid() for run in members):
                jobs = queued(client, sorted(ids))
            else:  # a long list of ids would not fit a command line; a user's own jobs need none
                own = jobs_of_user(client, os.getuid())
                jobs = {job_id: job for job_id, job in own.items() if job_id in ids}
                yield from _second_jobs(members, own, statuses)
        except ClusterError as error:
            yield str(error)
            mark_unknown(members, statuses, NO_ANSWER)
        else:
            yield from _query(client, jobs, members, statuses)


def _second_jobs(
    runs: Sequence[RunDir], jobs: Mapping[str, ScheduledJob], statuses: Mapping[Path, RunStatus]
) -> Iterator[str]:
    """Yield a sentence for each run with a live job besides the recorded one: a lost answer of
    sbatch, or a person, has made two.

    Args:
        jobs: all of the user, by squeue.
    """
    by_folder: defaultdict[str, list[ScheduledJob]] = defaultdict(list)
    for job in jobs.values():
        if (job.at_work or job.waiting) and job.command.startswith("/"):
            by_folder[os.path.dirname(job.command)].append(job)  # noqa: PTH120  # of thousands
    for run in runs:
        own = str(statuses[run.path].job_id)
        for folder, name in ((run.submitit, ""), (run.path.parent / ARRAYS, run.path.name)):
            for job in by_folder[str(folder.absolute())]:
                number, _, element = job.id.partition("_")
                if element == name and number != own.partition("_")[0]:
                    yield (
                        f"{run.path}: job {job.id} was queued from its script, too, and trains "
                        f"only if job {own} is over; `scancel {job.id}` ends it"
                    )


def _query(
    client: SlurmClient,
    jobs: dict[str, ScheduledJob],
    runs: list[RunDir],
    statuses: dict[Path, RunStatus],
) -> Iterator[str]:
    """Fill in the status of one cluster's runs; finalize attempts that have ended.

    Args:
        jobs: as squeue knows them, which count whatever happens to sacct; that is asked for the
            others.
    """
    still = {
        str(statuses[run.path].job_id)
        for run in runs
        if statuses[run.path].state not in ENDED_STATES
    }
    gone = sorted(still - jobs.keys())
    silent = False
    try:
        jobs |= accounted_ends(client, gone) if gone else {}
    except ClusterError as error:
        yield str(error)
        silent = True
        forgotten = [run for run in runs if str(statuses[run.path].job_id) not in jobs]
        mark_unknown(forgotten, statuses, NO_ANSWER)
    for run in runs:
        status = statuses[run.path]
        job = jobs.get(str(status.job_id))
        try:
            foreign = job is not None and is_of_another(client, run, job)
        except (ClusterError, *DAMAGE) as error:  # one run hides no other
            yield f"{run.path}: {error}"
            mark_unknown([run], statuses, str(error))
            continue
        if job is not None and foreign:
            if status.state not in ENDED_STATES:
                reason = (
                    f"the run's job has ended without a result; job {job.id}, which "
                    f"{run.handle} names, is another one now and runs {job.command}"
                )
                yield from _end_without_job(run, statuses, reason)
            continue
        if job is None:
            if status.state not in ENDED_STATES and not silent:
                reason = f"job {status.job_id} has left the queue without a result"
                if "_" in str(status.job_id) and not run.attempts_made():
                    reason += (
                        "; SLURM forgets elements of arrays that are cancelled while they wait"
                    )
                yield from _end_without_job(run, statuses, reason)
            continue
        if not job.alive and status.state not in ENDED_STATES:
            try:
                sentence = finalize_ended_job(run, job)
            except DAMAGE as error:  # the scheduler is silent again, or the folder is damaged
                yield f"{run.path}: {error}"
            else:
                if sentence is not None:
                    yield sentence
                    job = replace(job, state="REQUEUED")
                status = statuses[run.path] = status_or_damage(run, partial(from_folder, run))
        if status.state not in UNREADABLE:
            statuses[run.path] = status_or_damage(run, partial(with_job, run, status, job))


def _end_without_job(run: RunDir, statuses: dict[Path, RunStatus], reason: str) -> Iterator[str]:
    """Fill in the status of a run whose job the scheduler does not know: by its result, if that
    came after the first reading; as its records end it, and that is written then; else lost, for
    this reason.
    """
    status = statuses[run.path]
    try:
        list(run.path.iterdir())  # a network file system then looks for a result once more
        if run.read_result() is None and recorded_end(run) is not None:
            try:
                finalize_ended_job(run, ScheduledJob(id=str(status.job_id), state="GONE"))
            except DAMAGE as error:  # a full disk, say: the recorded end holds, written or not
                yield f"{run.path}: {error}"
        if run.read_result() is not None:
            statuses[run.path] = status_or_damage(run, partial(from_folder, run))
            return
        end = recorded_end(run)  # which only the run's owner writes down
    except DAMAGE as error:  # the folder is damaged
        yield f"{run.path}: {error}"
        end = None
    if end is None:
        statuses[run.path] = replace(status, state="lost", reason=reason)
    else:
        statuses[run.path] = replace(status, state=end.value, reason=None, boundary_age_s=None)


def with_job(run: RunDir, status: RunStatus, job: ScheduledJob) -> RunStatus:
    """Merge the folder's status and the scheduler's; a live job's is the later."""
    status = replace(status, nodes=job.nodes)
    ended = status.state in ENDED_STATES
    if ended and not job.alive:
        cancelled = status.state == "stopped" and job.state == "CANCELLED"
        return replace(status, state="cancelled") if cancelled else status
    if not job.alive:
        state, culprit = diagnose(run, job)
        if culprit is None:
            return replace(status, state=state.value, boundary_age_s=None)
        name = "cancelled" if job.state == "CANCELLED" else state.value
        who = name_of_culprit(culprit.to_json())
        return replace(status, state=name, reason=culprit.cause, culprit=who, boundary_age_s=None)
    if ended and job.waiting:
        reason = (
            f"job {job.id} was queued once more after the run's end ({job.reason}), to end at once"
        )
        if job.held:
            reason = f"{reason}, or by `scancel {job.id}`"
        return replace(status, state="ending", reason=reason, culprit=None)
    if job.waiting:
        paused = status.reason if job.reason == "BeginTime" else None
        reason = paused or job.waits_for
        return replace(status, state="pending", reason=reason, boundary_age_s=None)
    name = "running" if has_begun(run, status) else "starting"
    if ended or job.state == "COMPLETING":
        name = "ending"
    reason = job.suspended_by or status.reason
    return replace(status, state=name, reason=reason, time_left_s=job.time_left_s)
