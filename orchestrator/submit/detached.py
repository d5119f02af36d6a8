"""Runs that are submitted and left alone: place them, say how to find them again, follow on demand.

The launcher holds nothing of such a run. What it prints here, any shell can see later.
"""

from __future__ import annotations

import time
from typing import Any

from orchestrator.config import Config
from orchestrator.errors import EXIT_INTERRUPTED, EXIT_USAGE, ClusterError, RunFolderError
from orchestrator.report.closing import print_closing
from orchestrator.report.metrics import Tail, read_metrics
from orchestrator.report.progress import Progress
from orchestrator.report.terminal import command, say
from orchestrator.rundir import RunDir, read_json, write_json
from orchestrator.submit.api import State
from orchestrator.submit.interrupts import Interrupts
from orchestrator.submit.manner import Manner
from orchestrator.submit.run import EXIT_CODES, POLL_S, Ended, new_folder
from orchestrator.submit.slurm import SlurmCluster
from orchestrator.submit.slurm_checks import Verdict, too_slow
from orchestrator.submit.slurm_client import SlurmClient
from orchestrator.submit.slurm_jobs import queued
from orchestrator.submit.slurm_watch import SlurmHandle, read_handle
from orchestrator.worker.fence import read_newest
from orchestrator.worker.progress import read_progress


def cluster_of(config: Config, manner: Manner) -> SlurmCluster:
    return SlurmCluster(config, tell=lambda sentence: say(manner.console, sentence, "yellow"))


def check(config: Config, run: RunDir, manner: Manner) -> Verdict:
    """Ask the scheduler before anything is written. Raises `ConfigError`, `ClusterError`."""
    cluster = cluster_of(config, manner)
    verdict = cluster.check(cluster.request(config, run.path, 0))
    warning = too_slow(config, verdict.grace_s)
    if warning:
        say(manner.console, f"warning: {warning}", "yellow", prose=True)
    return verdict


def describe(config: Config) -> dict[str, Any]:
    """What would be submitted, word by word, and what the scheduler says of it."""
    cluster = SlurmCluster(config)
    request = cluster.request(config, new_folder(config), 0)
    warning: str | None = None
    try:
        verdict = cluster.check(request)
        answer, refused, warning = verdict.words, False, too_slow(config, verdict.grace_s)
    except ClusterError as error:
        answer, refused = str(error), True
    return {**request.details, "scheduler": answer, "refused": refused, "warning": warning}


def place(config: Config, run: RunDir, manner: Manner, verdict: Verdict, attempt: int = 0) -> Ended:
    """Queue the run and return, or follow it when `run.watch` says so."""
    submission: dict[str, Any] = read_json(run.submission) or {}
    write_json(run.submission, {**submission, "grace_s": verdict.grace_s})
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
    with Interrupts() as interrupts:
        return follow(handle, run, manner, interrupts)


def resume(config: Config, run: RunDir, manner: Manner) -> Ended:
    """Queue a run again, to go on from its newest checkpoint, with the code as it is now."""
    if run.handle.exists():
        refuse_while_queued(run)
    attempt = max(run.attempts_made(), read_newest(run.newest_attempt) + 1)
    cluster = cluster_of(config, manner)
    verdict = cluster.check(cluster.request(config, run.path, attempt))
    return place(config, run, manner, verdict, attempt)


def refuse_while_queued(run: RunDir) -> None:
    """Raises `RunFolderError` while the run's job is queued or running."""
    handle = read_handle(run)
    job_id = str(handle["job_id"])
    job = queued(SlurmClient(handle["slurm_conf"]), [job_id]).get(job_id)
    if job is not None and job.alive:
        raise RunFolderError(
            f"{run.path} is in progress (job {job_id}, {job.state.lower()}); to stop it first: "
            f"{command('cancel', run.path)}"
        )


def follow(handle: SlurmHandle, run: RunDir, manner: Manner, interrupts: Interrupts) -> Ended:
    """Show the run to its end; an interrupt only ends the showing."""
    tail = Tail(run.metrics)
    news = _News(run, manner)
    plan = run.read_plan()
    with Progress(plan, manner.console, manner.quiet, manner.verbose) as progress:
        while True:
            state = handle.poll(POLL_S)
            place_ = read_progress(run.progress(handle.attempt))
            progress.update(
                tail.rest() if state.ended else tail.read(),
                (place_.done, place_.steps) if place_ else None,
            )
            news.tell(handle)
            if state.ended or interrupts.count:
                break
    handle.close()
    if not state.ended:
        say(
            manner.console,
            f"detached; job {handle.job_id} goes on: {command('status', run.path)}",
            "yellow",
        )
        return Ended(run=run, state=state, exit_code=EXIT_INTERRUPTED)
    result = run.read_result() or {}
    if not manner.quiet or state is State.FAILED:
        print_closing(result, read_metrics(run.metrics), run.path, manner.console, plan=plan)
    return Ended(run=run, state=state, exit_code=EXIT_CODES.get(state, EXIT_USAGE))


class _News:
    """Says, once each, what the progress line does not show."""

    def __init__(self, run: RunDir, manner: Manner) -> None:
        self._run, self._manner = run, manner
        self._said: str | None = None
        self._silent = False
        self._waited = 0.0

    def tell(self, handle: SlurmHandle) -> None:
        if self._manner.quiet:
            return
        if handle.silent_since is not None and not self._silent:
            self._silent, self._waited = True, time.monotonic()
            self._say(
                f"the scheduler has not answered since {handle.silent_since:%H:%M:%S}; the job is "
                f"not affected, and it is asked again and again"
            )
        elif self._silent and handle.silent_since is None:
            self._silent = False
            self._say(f"the scheduler answers again, {time.monotonic() - self._waited:.0f} s later")
        job = handle.job
        if job is None or not job.alive:
            return
        where = f"on {job.nodes}" if job.nodes else (f"({job.reason})" if job.reason else "")
        restarts = f", attempt {handle.attempt + 1}" if handle.attempt else ""
        sentence = f"job {job.id} is {job.state.lower()} {where}{restarts}".strip()
        key = f"{job.state} {job.nodes} {handle.attempt}"
        if key != self._said:
            self._said = key
            self._say(sentence)

    def _say(self, sentence: str) -> None:
        say(self._manner.console, sentence, "yellow", prose=True)
