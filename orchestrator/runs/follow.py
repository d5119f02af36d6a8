"""Follow a submitted run, from any shell: an interrupt ends the showing, never the run."""

from __future__ import annotations

import time

from orchestrator.errors import EXIT_INTERRUPTED, EXIT_USAGE
from orchestrator.report.tables.closing_table import print_closing
from orchestrator.report.metrics import Tail, read_metrics
from orchestrator.report.live.progress import Progress
from orchestrator.report.terminal import command, say
from orchestrator.run_warnings import NewWarnings
from orchestrator.run_folder.rundir import RunDir
from orchestrator.clusters.api import POLL_S, State
from orchestrator.outcome.run_result import EXIT_CODES, Ended, end_of
from orchestrator.runs.interrupts import Interrupts
from orchestrator.runs.console import Manner
from orchestrator.clusters.slurm.watch import SlurmHandle
from orchestrator.lifecycle.signs.progress import read_progress


def follow(
    handle: SlurmHandle, run: RunDir, manner: Manner, interrupts: Interrupts, recent: int = 0
) -> Ended:
    """Show the run to its end; an interrupt only ends the showing.

    Args:
        recent: of what earlier attempts or hours wrote, so many bytes are shown, too.
    """
    tail = Tail(run.metrics)
    tail.skip_to_the_end(recent)
    news = _News(run, manner)
    plan = run.read_plan()
    attempt, warned = -1, NewWarnings(run.path)
    if isinstance(run.read_config()["cluster"]["nodes"], dict):
        plan.pop("ranks")  # of the most nodes; the scheduler may give fewer
    with Progress(plan, manner.console, manner.quiet, manner.verbose) as progress:
        while True:
            state = handle.poll(POLL_S)
            place_ = read_progress(run.progress(handle.attempt))
            if attempt != handle.attempt:
                attempt = handle.attempt
                warned = NewWarnings(run.attempt(attempt), already=plan.get("warnings") or ())
            progress.update(
                tail.rest() if state.ended else tail.read(),
                (place_.done, place_.steps) if place_ else None,
                warned.read(now=state.ended),
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
    result = run.read_result() or end_of(run, state, handle.culprit)
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
        still = f": {job.standstill}" if job.standstill else ""
        sentence = f"job {job.id} is {job.state.lower()} {where}{restarts}".strip() + still
        key = f"{job.state} {job.nodes} {handle.attempt}"
        if key != self._said:
            self._said = key
            self._say(sentence)

    def _say(self, sentence: str) -> None:
        say(self._manner.console, sentence, "yellow", prose=True)
