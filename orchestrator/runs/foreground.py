"""Runs that this process holds: every rank is its child, and they end together.

What is drawn while one waits is imported here and not by `start`: a submission does without.
"""

from __future__ import annotations

from orchestrator.clusters.api import POLL_S, Culprit, Handle, State
from orchestrator.config.program import is_program
from orchestrator.errors import EXIT_INTERRUPTED, UsageError
from orchestrator.plugins import CLUSTERS
from orchestrator.report.run_tables import print_closing
from orchestrator.report.terminal import say
from orchestrator.rundir.metrics import read_metrics
from orchestrator.rundir.outcome import (
    EXIT_CODES,
    Ended,
    Ruling,
    describe_culprit,
    describe_stop,
    end_of,
    rule,
)
from orchestrator.runs.ready import Ready
from orchestrator.runs.showing import Showing

NO_RESULT = Culprit(
    rank=None, node="launcher", cause="all ranks ended in order, but none wrote a result"
)


def hold(ready: Ready) -> Ended:
    """Train it from the newest checkpoint, if there is one, shown to its end; after failures as
    `outcome.restart_policy` rules. Nothing is left running, whatever is raised.
    """
    run, manner, interrupts = ready.run, ready.manner, ready.interrupts
    while True:
        number = run.begin_attempt()
        state, interrupted, culprit = _attempt(ready, number)
        ruling = Ruling(again=False)
        if culprit is not None and state is State.FAILED and not interrupts.count:
            most = ready.config.run.max_restarts
            ruling = rule(run, number, culprit, first=ready.attempt, most=most)
        if culprit is None or not ruling.again:
            break
        if not manner.quiet:
            say(manner.console, describe_culprit(culprit.to_json()), "bold red")
            say(manner.console, ruling.words, "yellow")
    if interrupted:
        cause = "interrupted twice: every process was ended at once"
        culprit = Culprit(rank=None, node="launcher", cause=cause)
    result = run.read_result() or {}
    if state is State.FAILED or not result:  # rank 0 could not write it
        result = end_of(run, state, culprit, remark=ruling.words)
        try:
            run.write_own(run.result, result)
        except OSError as error:
            say(manner.console, f"{run.result} cannot be written: {error.strerror}", "bold red")
    code = EXIT_INTERRUPTED if interrupted else EXIT_CODES[state]
    if culprit is not None and culprit.usage and not run.metrics.exists():
        raise UsageError(culprit.cause)
    if not manner.quiet or state is State.FAILED:
        print_closing(
            result, read_metrics(run.metrics), run.path, manner.console, plan=run.read_plan()
        )
    return Ended(run=run, state=state, exit_code=code, culprit=culprit)


def _attempt(ready: Ready, number: int) -> tuple[State, bool, Culprit | None]:
    """One attempt to its end: how it ended, whether at once by request, and by whose fault."""
    with CLUSTERS.told(ready.config.cluster.kind, "to start the ranks"):
        handle = ready.cluster.submit(ready.cluster.request(ready.run.path, number))
    try:
        with Showing(ready.run, ready.manner) as showing:
            state, interrupted = _follow(handle, showing, ready)
    except BaseException:
        handle.kill()
        raise
    if state is State.FINISHED and not _said_so(ready):
        return State.FAILED, interrupted, NO_RESULT
    return state, interrupted, handle.culprit


def _said_so(ready: Ready) -> bool:
    """Whether rank 0 wrote down that the training is over. Of a program nobody does."""
    result = ready.run.read_result() or {}
    return is_program(ready.config.job) or result.get("state") == State.FINISHED.value


def _follow(handle: Handle, showing: Showing, ready: Ready) -> tuple[State, bool]:
    """Show the run to its end: one interrupt asks it to stop, a second ends it at once."""
    interrupts, asked = ready.interrupts, False
    while True:
        state = handle.poll(POLL_S)
        showing.look(ended=state.ended)
        if state.ended:
            return state, False
        if interrupts.count and not asked:
            asked = True
            handle.stop()
            say(
                ready.manner.console,
                f"the run {describe_stop(ready.run)}; once more ends every process at once",
                "yellow",
            )
        if interrupts.count > 1:
            handle.kill()
            return State.FAILED, True
