"""The verbs that follow runs and read results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from orchestrator.errors import EXIT_FAILED, RunFolderError
from orchestrator.report.terminal import say

Json = Annotated[bool, typer.Option("--json", help="Print data instead of a table.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="More detail; tracebacks.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Only errors.")]


def print_json(value: Any) -> None:
    """Print JSON to standard output."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def new(
    folder: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    verbose: Verbose = False,
) -> None:
    """Write a small project of your own: a job, its configuration, a test."""
    del verbose
    from orchestrator.cli.new import write_project

    made = write_project(folder)
    say(Console(), f"{made} is written; its README.md says what to type", prose=True)


def status(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or a sweep's; none: all in runs/.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Print the states of runs: waiting, running or ended, on any cluster."""
    del verbose
    from orchestrator.cli.status import expand, statuses
    from orchestrator.report import status_tables as tables
    from orchestrator.rundir.status import find_runs

    asked = [path.absolute() for path in runs or []]
    search = tables.search_of(asked[0]) if len(asked) == 1 else None
    unbegun = search is not None and not find_runs(asked[0], waiting=True)
    found, sentences = statuses([] if unbegun else expand(asked))
    console = Console()
    for sentence in sentences:
        say(Console(stderr=True), f"warning: {sentence}", "yellow")
    if as_json:
        rows = [status.to_json() for status in found]
        print_json(tables.with_trials(rows, search) if search else rows)
        return
    if len(asked) == 1 and [status.folder for status in found] == asked:
        tables.print_run(found[0], console)
    elif found:
        tables.print_status(found, console, Path.cwd())
    elif not asked:
        say(console, "there are no runs in runs/")
    if search is not None:
        tables.print_search(search, console)


def attach(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Show a run's live line again, to its end; Ctrl-C leaves the run alone."""
    from orchestrator.cli.follow import OutputOptions
    from orchestrator.cli.follow import attach as show
    from orchestrator.rundir.folder import RunDir

    output = OutputOptions(console=Console(), verbose=verbose, quiet=quiet)
    raise typer.Exit(show(RunDir(run.absolute()).existing(), output).exit_code)


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
    from orchestrator.cli import status as of_run
    from orchestrator.rundir.folder import RunDir

    folder = RunDir(run.absolute()).existing()
    if follow:
        for text in of_run.follow_log(folder, rank, lines):
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
    from orchestrator.cli import status as cancelling
    from orchestrator.rundir.folder import RunDir
    from orchestrator.rundir.status import find_runs

    folder = RunDir(run.absolute())
    if find_runs(folder.path, waiting=True) == [folder.path]:
        say(Console(), cancelling.cancel(folder, now=now))
        return
    for sentence in cancelling.cancel_sweep(folder.path, now=now):
        say(Console(), sentence)


def final_weights(run: Path) -> Path:
    """Return the file of a run's newest weights. Raises `RunFolderError` if there is none, or if it
    is damaged.
    """
    from orchestrator.rundir.checkpoints import WEIGHTS, complete, load
    from orchestrator.rundir.folder import RunDir

    if run.is_file():
        return run
    folder = RunDir(run).existing()
    saved = complete(folder.checkpoints)
    if not saved:
        if folder.read_plan().get("program"):
            raise RunFolderError(
                f"{run} is a program's, which saves its weights its own way (in {run}/checkpoints, "
                "if anywhere here); compare takes them as a safetensors file"
            )
        raise RunFolderError(f"{run} has no weights yet: no checkpoint was written")
    return load(saved[-1], folder.identity).folder / WEIGHTS


def compare(
    a: Annotated[Path, typer.Argument(help="A run folder, or a safetensors file.")],
    b: Annotated[Path, typer.Argument(help="The reference: differences are relative to it.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="Tensor by tensor.")] = False,
    at_most: Annotated[
        float | None, typer.Option(min=0.0, help="Exit with 1 when the difference is larger.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Print the largest relative difference between the final weights of two runs."""
    del verbose
    from orchestrator.report import compare as comparing
    from orchestrator.report.compare import differing, print_comparison
    from orchestrator.rundir.folder import RunDir

    found = comparing.compare(final_weights(a), final_weights(b))
    if as_json:
        print_json(found.as_dict())
    else:
        print_comparison(found, Console(), tensors=tensors)
        unlike = differing(RunDir(a).read_environment(), RunDir(b).read_environment())
        for name, values in unlike.items():
            say(Console(), f"computed with another {name}: {values}", "yellow")
    if at_most is not None and not found.max_relative_difference <= at_most:
        say(
            Console(stderr=True),
            f"error: the largest relative difference is {found.max_relative_difference:.3e}, more "
            f"than --at-most {at_most:g}",
            "bold red",
        )
        raise typer.Exit(EXIT_FAILED)


def report(
    run: Annotated[Path, typer.Argument(help="A run folder, or a sweep's.")],
    form: Annotated[str, typer.Option("--format", help="html (a page), csv or json.")] = "html",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="A file; a page's is RUN/report.html.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Write a page about a run or a sweep: curves, time, memory, what differs, how to repeat it."""
    del verbose
    from orchestrator.report.page import write_report

    write_report(run.absolute(), form, output, Console())
