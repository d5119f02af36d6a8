"""Runs that this process holds: every rank is its child, and they end together.

What is drawn while one waits is imported here and not by `run`: a submission does without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.config.schema import Config
from orchestrator.errors import EXIT_INTERRUPTED, UsageError
from orchestrator.report.tables.closing_table import describe_culprit, print_closing
from orchestrator.report.metrics import Tail, read_metrics
from orchestrator.report.live.progress import Progress
from orchestrator.report.terminal import say
from orchestrator.run_warnings import NewWarnings
from orchestrator.run_folder.rundir import RunDir
from orchestrator.clusters.api import POLL_S, Culprit, Handle, State
from orchestrator.outcome.run_result import EXIT_CODES, Ended, end_of
from orchestrator.runs.interrupts import Interrupts
from orchestrator.clusters.local.cluster import LocalCluster
from orchestrator.runs.console import Manner
from orchestrator.outcome.restart_policy import Ruling, rule
from orchestrator.lifecycle.signs.progress import read_progress


def check(config: Config, run: RunDir, manner: Manner) -> None:
    """Nothing: what can be said of a run on this machine was said of its configuration."""


def place(
    config: Config, run: RunDir, manner: Manner, interrupts: Interrupts, verdict: None
) -> Ended:
    """Train it, shown to its end. Nothing is left running, whatever is raised."""
    del verdict
    return resume(config, run, manner, interrupts, lambda _: None)


def resume(
    config: Config,
    run: RunDir,
    manner: Manner,
    interrupts: Interrupts,
    note: Callable[[int], None],
) -> Ended:
    """Go on from the newest checkpoint, if there is one; after failures as `outcome.restart_policy` rules.

    Args:
        note: called with the attempt's number once nothing stands against it any more.
    """
    first = run.attempts_made()
    note(first)
    plan = run.read_plan()
    run.result.unlink(missing_ok=True)
    run.cancel.unlink(missing_ok=True)
    while True:
        number = run.begin_attempt()
        state, interrupted, culprit = _attempt(config, run, number, plan, manner, interrupts)
        ruling = Ruling(again=False)
        if culprit is not None and state is State.FAILED and not interrupts.count:
            ruling = rule(run, number, culprit, first=first, most=config.run.max_restarts)
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


def _attempt(
    config: Config,
    run: RunDir,
    number: int,
    plan: dict[str, Any],
    manner: Manner,
    interrupts: Interrupts,
) -> tuple[State, bool, Culprit | None]:
    """One attempt to its end: how it ended, whether at once by request, and by whose fault."""
    tail = Tail(run.metrics)
    tail.skip_to_the_end()  # what earlier attempts wrote is not news
    cluster = LocalCluster()
    handle = cluster.submit(cluster.request(config, run.path, number))
    try:
        with Progress(plan, manner.console, manner.quiet, manner.verbose) as progress:
            state, interrupted = _follow(
                handle, run, number, tail, plan, progress, interrupts, manner
            )
    except BaseException:
        handle.kill()
        raise
    return state, interrupted, handle.culprit


def _follow(
    handle: Handle,
    run: RunDir,
    number: int,
    tail: Tail,
    plan: dict[str, Any],
    progress: Progress,
    interrupts: Interrupts,
    manner: Manner,
) -> tuple[State, bool]:
    """Show the run to its end: one interrupt stops it at a boundary, a second ends it at once."""
    asked = False
    warned = NewWarnings(run.attempt(number), already=run.read_plan().get("warnings") or ())
    while True:
        state = handle.poll(POLL_S)
        place = read_progress(run.progress(number))
        records = tail.rest() if state.ended else tail.read()
        if records and plan.get("dataset_samples") is None:
            plan.update(run.read_plan())  # by now the workers know the data set, and so the length
        micro = (place.done, place.steps) if place else None
        progress.update(records, micro, warned.read(now=state.ended))
        if state.ended:
            return state, False
        if interrupts.count and not asked:
            asked = True
            handle.stop()
            say(
                manner.console,
                "stopping at the next update boundary, with a checkpoint; "
                "once more ends every process at once",
                "yellow",
            )
        if interrupts.count > 1:
            handle.kill()
            return State.FAILED, True
