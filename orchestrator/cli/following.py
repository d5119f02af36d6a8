"""The verbs that follow and stop runs: `status`, `attach`, `logs`, `cancel`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from orchestrator.cli.options import Json, Quiet, Verbose, print_json
from orchestrator.report.terminal import say


def status(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or a sweep's; none: all in runs/.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Say where runs stand: those that wait, run, or have ended, however and wherever they run."""
    del verbose
    from orchestrator.report.status_tables import points_wanted, print_run, print_status
    from orchestrator.runs.status import expand, losses_so_far, statuses

    asked = [path.absolute() for path in runs or []]
    found, sentences = statuses([] if _is_search_without_runs(asked) else expand(asked))
    console = Console()
    for sentence in sentences:
        say(Console(stderr=True), f"warning: {sentence}", "yellow")
    if as_json:
        rows = [status.to_json() for status in found]
        print_json(_with_trials(rows, asked[0]) if len(asked) == 1 else rows)
    elif len(asked) == 1 and [status.folder for status in found] == asked:
        print_run(found[0], losses_so_far(found[0], points_wanted(console)), console)
    elif found:
        print_status(found, console, Path.cwd())
    elif not asked:
        say(console, "there are no runs in runs/")
    if not as_json and len(asked) == 1:
        _show_search(asked[0], console)


def _is_search_without_runs(asked: list[Path]) -> bool:
    """Whether one search is asked about whose trials could not begin yet."""
    from orchestrator.rundir.folder import RunDir
    from orchestrator.rundir.status import find_runs

    if len(asked) != 1 or not RunDir(asked[0]).search.exists():
        return False
    return not find_runs(asked[0], waiting=True)


def _with_trials(rows: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The runs as values; where a folder is a search's, each with its trials."""
    from orchestrator.report.status_tables import search_of, with_trials

    search = search_of(folder)
    return with_trials(rows, search) if search else rows


def _show_search(folder: Path, console: Console) -> None:
    """The trials, where a folder is a search's."""
    from orchestrator.report.status_tables import print_search, search_of

    if found := search_of(folder):
        print_search(found, console)


def attach(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Show a run's live line again, to its end; Ctrl-C leaves the run alone."""
    from orchestrator.rundir.folder import RunDir
    from orchestrator.runs.attach import attach as show
    from orchestrator.runs.console import Manner

    manner = Manner(console=Console(), verbose=verbose, quiet=quiet)
    raise typer.Exit(show(RunDir(run.absolute()).existing(), manner).exit_code)


def logs(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    rank: Annotated[int | None, typer.Option(min=0, help="Whose; rank 0's by default.")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Until the run ends.")] = False,
    lines: Annotated[
        int | None, typer.Option("-n", "--lines", min=0, help="Its last lines only.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Print a rank's log."""
    del verbose
    from orchestrator.rundir.folder import RunDir
    from orchestrator.runs import logs as of_run

    folder = RunDir(run.absolute()).existing()
    if follow:
        for text in of_run.follow(folder, rank, lines):
            sys.stdout.write(text)
            sys.stdout.flush()
        return
    for text in of_run.text_of(of_run.log_of(folder, rank), lines):
        sys.stdout.write(text)


def cancel(
    run: Annotated[Path, typer.Argument(help="A run folder, or a sweep's: all its points.")],
    now: Annotated[bool, typer.Option("--now", help="At once, without a checkpoint.")] = False,
    verbose: Verbose = False,
) -> None:
    """Stop a run for good: all ranks together at the next update boundary, with a checkpoint; a
    program by its signal.
    """
    del verbose
    from orchestrator.rundir.folder import RunDir
    from orchestrator.rundir.status import find_runs
    from orchestrator.runs import cancelling

    folder = RunDir(run.absolute())
    if find_runs(folder.path, waiting=True) == [folder.path]:
        say(Console(), cancelling.cancel(folder, now=now))
        return
    for sentence in cancelling.cancel_sweep(folder.path, now=now):
        say(Console(), sentence)
