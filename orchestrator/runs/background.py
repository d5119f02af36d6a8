"""Runs that are submitted and left alone: place them, say how to find them again, follow on demand.

The launcher holds nothing of such a run. What it prints here, any shell can see later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.config.schema import Config
from orchestrator.errors import ClusterError, RunFolderError
from orchestrator.report.terminal import command, say
from orchestrator.run_folder.rundir import RunDir
from orchestrator.clusters.api import State
from orchestrator.outcome.run_result import Ended
from orchestrator.runs.interrupts import Interrupts
from orchestrator.runs.console import Manner
from orchestrator.runs.new_folder import new_folder
from orchestrator.clusters.slurm.cluster import SlurmCluster
from orchestrator.clusters.slurm.admission.checks import Verdict, too_slow
from orchestrator.scheduler.jobs import queued
from orchestrator.clusters.slurm.trust import client_of
from orchestrator.clusters.slurm.watch import read_handle
from orchestrator.lifecycle.fence import read_newest


def cluster_of(config: Config, manner: Manner) -> SlurmCluster:
    return SlurmCluster(config, tell=lambda sentence: say(manner.console, sentence, "yellow"))


def check(config: Config, run: RunDir, manner: Manner) -> Verdict:
    """Ask the scheduler before anything is written. Raises `ConfigError`, `ClusterError`."""
    cluster = cluster_of(config, manner)
    verdict = cluster.check(cluster.request(config, run.path, 0))
    _warn(config, verdict, manner)
    return verdict


def _warn(config: Config, verdict: Verdict, manner: Manner) -> None:
    for warning in filter(None, (*verdict.warnings, too_slow(config, verdict.grace_s))):
        say(manner.console, f"warning: {warning}", "yellow", prose=True)


def describe(config: Config) -> dict[str, Any]:
    """What would be submitted, word by word, and what the scheduler says of it."""
    cluster = SlurmCluster(config)
    request = cluster.request(config, new_folder(config), 0)
    warning: str | None = None
    try:
        verdict = cluster.check(request)
        answer, refused = verdict.words, False
        told = [*verdict.warnings, too_slow(config, verdict.grace_s)]
        warning = "; ".join(filter(None, told)) or None
    except ClusterError as error:
        answer, refused = str(error), True
    return {**request.details, "scheduler": answer, "refused": refused, "warning": warning}


def place(
    config: Config,
    run: RunDir,
    manner: Manner,
    interrupts: Interrupts,
    verdict: Verdict,
    attempt: int = 0,
) -> Ended:
    """Queue the run and return, or follow it when `run.watch` says so."""
    notice = {"preempt_grace_s": verdict.preempt_grace_s, "kill_wait_s": verdict.kill_wait_s}
    run.write_own(run.submission, {**run.read_submission(), **notice})
    run.cancel.unlink(missing_ok=True)
    run.result.unlink(missing_ok=True)
    cluster = cluster_of(config, manner)
    handle = cluster.submit(cluster.request(config, run.path, attempt))
    if not manner.quiet:
        say(manner.console, f"job {handle.job_id} is queued", "bold green")
        say(manner.console, f"run folder: {run.path}")
        for verb, hint in (("status", ""), ("logs", " -f"), ("cancel", "")):
            say(manner.console, f"  {command(verb, run.path)}{hint}")
    if not config.run.watch:
        return Ended(run=run, state=State.PENDING, exit_code=0)
    from orchestrator.runs.follow import follow

    return follow(handle, run, manner, interrupts)


def resume(
    config: Config,
    run: RunDir,
    manner: Manner,
    interrupts: Interrupts,
    note: Callable[[int], None],
) -> Ended:
    """Queue a run again, to go on from its newest checkpoint, with the code as it is now.

    Args:
        note: called with the attempt's number once nothing stands against it any more.
    """
    attempt = max(run.attempts_made(), read_newest(run.newest_attempt) + 1)
    cluster = cluster_of(config, manner)
    verdict = cluster.check(cluster.request(config, run.path, attempt))
    _warn(config, verdict, manner)
    note(attempt)
    return place(config, run, manner, interrupts, verdict, attempt)


def refuse_while_queued(run: RunDir) -> None:
    """Raises `RunFolderError` while the run's job is queued or running."""
    handle = read_handle(run)
    job_id = str(handle["job_id"])
    job = queued(client_of(run, handle.get("slurm_conf")), [job_id]).get(job_id)
    if job is not None and job.alive:
        raise RunFolderError(
            f"{run.path} is in progress (job {job_id}, {job.state.lower()}); to stop it first: "
            f"{command('cancel', run.path)}"
        )
