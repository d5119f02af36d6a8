"""Follow a run that goes on without us, from any shell: an interrupt ends the showing alone."""

from __future__ import annotations

from orchestrator.clusters.api import POLL_S, Handle, State
from orchestrator.errors import EXIT_INTERRUPTED, EXIT_USAGE
from orchestrator.report.run_tables import print_closing
from orchestrator.report.terminal import command, say
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import read_metrics
from orchestrator.rundir.outcome import EXIT_CODES, Ended, end_of
from orchestrator.runs.console import Manner
from orchestrator.runs.found_again import handle_of
from orchestrator.runs.interrupts import Interrupts
from orchestrator.runs.showing import Showing

RECENT_BYTES = 32 * 1024  # what the pace is taken from


def attach(run: RunDir, manner: Manner) -> Ended:
    """Show a run that somebody started. Nothing is written, nothing is ended.

    Returns:
        How the run ended, with its own exit code; or, when the showing was interrupted, 130.
    """
    with Interrupts() as interrupts:
        return follow(handle_of(run), run, manner, interrupts, recent=RECENT_BYTES)


def follow(
    handle: Handle, run: RunDir, manner: Manner, interrupts: Interrupts, *, recent: int = 0
) -> Ended:
    """Show a run to its end; an interrupt only ends the showing.

    Args:
        recent: of what earlier attempts or hours wrote, so many bytes are shown, too.
    """
    state = handle.poll(0.0)
    if not state.ended:
        with Showing(run, manner, recent=recent) as showing:
            while not state.ended and not interrupts.count:
                state = handle.poll(POLL_S)
                showing.look(ended=state.ended)
                for sentence in () if manner.quiet else handle.news():
                    say(manner.console, sentence, "yellow", prose=True)
    handle.close()
    if not state.ended:
        say(
            manner.console,
            f"detached; {handle.title} goes on: {command('status', run.path)}",
            "yellow",
        )
        return Ended(run=run, state=state, exit_code=EXIT_INTERRUPTED)
    code = EXIT_CODES.get(state, EXIT_USAGE)
    result = run.read_result()
    if result is None and handle.culprit is None:
        lost = f"{run.path} has ended without a result: its launcher is gone"
        say(manner.console, lost, "bold red")
        say(manner.console, f"to go on from here: {command('resume', run.path)}", "bold")
        return Ended(run=run, state=state, exit_code=code)
    result = result or end_of(run, state, handle.culprit)
    if not manner.quiet or state is State.FAILED:
        history = read_metrics(run.metrics)
        print_closing(result, history, run.path, manner.console, plan=run.read_plan())
    return Ended(run=run, state=state, exit_code=code)
