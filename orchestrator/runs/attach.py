"""Show a run's live line again, from any shell: to its end, or until an interrupt."""

from __future__ import annotations

import time

from orchestrator.errors import EXIT_FAILED, EXIT_INTERRUPTED
from orchestrator.report.tables.closing_table import print_closing
from orchestrator.report.metrics import Tail, read_metrics
from orchestrator.report.live.progress import Progress
from orchestrator.report.terminal import command, say
from orchestrator.run_warnings import NewWarnings
from orchestrator.run_folder.rundir import RunDir
from orchestrator.clusters.api import POLL_S, State
from orchestrator.outcome.run_result import EXIT_CODES, Ended
from orchestrator.outcome.folder_status import is_held
from orchestrator.runs.interrupts import Interrupts
from orchestrator.runs.console import Manner
from orchestrator.lifecycle.signs.progress import read_progress

RECENT_BYTES = 32 * 1024  # what the pace is taken from


def attach(run: RunDir, manner: Manner) -> Ended:
    """Show a run that somebody started. Nothing is written, nothing is ended.

    Returns:
        How the run ended, with its own exit code; or, when the showing was interrupted, 130.
    """
    with Interrupts() as interrupts:
        if run.handle.exists():
            from orchestrator.runs.follow import follow
            from orchestrator.clusters.slurm.watch import SlurmHandle

            return follow(SlurmHandle(run), run, manner, interrupts, RECENT_BYTES)
        if is_held(run) and not _show(run, manner, interrupts):
            goes_on = f"detached; the run goes on: {command('status', run.path)}"
            say(manner.console, goes_on, "yellow")
            return Ended(run=run, state=State.RUNNING, exit_code=EXIT_INTERRUPTED)
    result = run.read_result()
    if result is None:
        lost = f"{run.path} has ended without a result: its launcher is gone"
        say(manner.console, lost, "bold red")
        say(manner.console, f"to go on from here: {command('resume', run.path)}", "bold")
        return Ended(run=run, state=State.FAILED, exit_code=EXIT_FAILED)
    print_closing(result, read_metrics(run.metrics), run.path, manner.console, plan=run.read_plan())
    state = State(result["state"])
    return Ended(run=run, state=state, exit_code=EXIT_CODES[state])


def _show(run: RunDir, manner: Manner, interrupts: Interrupts) -> bool:
    """Show a local run while its launcher holds it; False when an interrupt came first."""
    plan = run.read_plan()
    tail = Tail(run.metrics)
    tail.skip_to_the_end(but=RECENT_BYTES)
    attempt, warned = -1, NewWarnings(run.path)
    with Progress(plan, manner.console, manner.quiet, manner.verbose) as progress:
        while not interrupts.count:
            held = is_held(run)
            if attempt != run.attempts_made() - 1:
                attempt = run.attempts_made() - 1
                warned = NewWarnings(run.attempt(attempt), already=plan.get("warnings") or ())
            place = read_progress(run.progress(attempt))
            micro = (place.done, place.steps) if place else None
            records = tail.read() if held else [*tail.read(), *tail.rest()]
            progress.update(records, micro, warned.read(now=not held))
            if not held:
                return True
            time.sleep(POLL_S)
    return False
