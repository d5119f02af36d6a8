"""`python -m orchestrator VERB`: look at plans and runs, and go on with them.

The verbs read the run folder alone, so they work from another shell and days later. None of them
imports a framework.
"""

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import typer
from rich.console import Console

from orchestrator.cli.completion import complete_overrides
from orchestrator.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    OrchestratorError,
    RunFolderError,
    plainly_said,
    standing_somewhere,
    unreadable,
)
from orchestrator.report.terminal import say, say_error, while_somebody_reads

app = typer.Typer(
    help="Plan, follow, compare and resume runs. To start one: python -m orchestrator launch",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
WITH_PROGRAM = ("run", "launch", "plan")
Verb = TypeVar("Verb", bound=Callable[..., Any])
Json = Annotated[bool, typer.Option("--json", help="Print data instead of a table.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="More detail; tracebacks.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Only errors.")]


def verb(**settings: Any) -> Callable[[Verb], Verb]:
    """Register a verb whose errors become one message and an exit code."""

    def register(function: Verb) -> Verb:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                standing_somewhere()
                return function(*args, **kwargs)
            except BrokenPipeError:
                raise
            except (OrchestratorError, OSError) as error:
                told = error if isinstance(error, OrchestratorError) else unreadable(error)
                if kwargs.get("verbose") and not plainly_said(told):
                    traceback.print_exception(error)  # the sentence and the exit code stay
                say_error(told, Console(stderr=True))
                raise typer.Exit(told.exit_code) from error

        app.command(**settings)(guarded)
        return cast("Verb", guarded)

    return register


_program: list[str] = []


def _after_dashes() -> list[str]:
    """`--` and the program that stands after it on our command line; empty without."""
    return list(_program)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


@app.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
def launch(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="KEY=VALUE, -m, …", autocompletion=complete_overrides),
    ] = None,
) -> None:
    """Start a run, or with -m a sweep of runs; the same as python -m orchestrator.launch."""
    from orchestrator.launch import main as start

    raise typer.Exit(start([*(arguments or []), *_after_dashes()]))


@app.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
def run(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]... -- PROGRAM [ARGUMENT]...", autocompletion=complete_overrides
        ),
    ] = None,
) -> None:
    """Start a training program as it is, as in: run cluster.nodes=2 -- train.py --lr 0.1."""
    from orchestrator.launch import main as start

    raise typer.Exit(start([*(arguments or []), *(_after_dashes() or ["--"])]))


@verb(context_settings={"ignore_unknown_options": False})
def plan(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="As for launch.", autocompletion=complete_overrides),
    ] = None,
    config_dir: Annotated[
        str | None, typer.Option("--config-dir", "-cd", help="Folder of your own configs.")
    ] = None,
    config_name: Annotated[
        str, typer.Option("--config-name", "-cn", help="Your own primary configuration in it.")
    ] = "config",
    multirun: Annotated[
        bool, typer.Option("--multirun", "-m", help="A sweep: the plan of each of its points.")
    ] = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Print who would compute what, without starting anything."""
    del verbose
    from orchestrator.cli.application import show_plan
    from orchestrator.compose.command_line import CommandLine, check_overrides, program_overrides

    given = tuple(overrides or ())
    if program := _after_dashes():
        given += program_overrides(program[1:], beside=given)
    check_overrides(given)
    line = CommandLine(
        overrides=given, config_dir=config_dir, config_name=config_name, multirun=multirun
    )
    show_plan(line, Console(), as_json=as_json)


@verb()
def resume(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="KEY=VALUE: more updates, other nodes, another cluster, …"),
    ] = None,
    config_dir: Annotated[str | None, typer.Option(help="Folder of your own configs.")] = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Go on with a run from its newest sound checkpoint, to the same bits.

    What is given after the run may change where and for how long it trains, never its numbers.
    """
    from orchestrator.runs.console import Manner
    from orchestrator.runs.start import resumed

    manner = Manner(console=Console(), verbose=verbose, quiet=quiet)
    with resumed(run.absolute(), manner, overrides or [], config_dir) as place:
        ended = place()
    raise typer.Exit(ended.exit_code)


@verb()
def status(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or a sweep's; none: all in runs/.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Say where runs stand: those that wait, run, or have ended, however and wherever they run."""
    del verbose
    from orchestrator.report.tables.run_view import points_wanted, print_run
    from orchestrator.report.tables.status_table import print_status
    from orchestrator.runs.status import expand, losses_so_far, statuses

    asked = [path.absolute() for path in runs or []]
    found, sentences = statuses(expand(asked))
    console = Console()
    for sentence in sentences:
        say(Console(stderr=True), f"warning: {sentence}", "yellow")
    if as_json:
        _print_json([status.to_json() for status in found])
    elif len(asked) == 1 and [status.folder for status in found] == asked:
        print_run(found[0], losses_so_far(found[0], points_wanted(console)), console)
    elif found:
        print_status(found, console, Path.cwd())
    else:
        say(console, "there are no runs in runs/")


@verb()
def attach(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Show a run's live line again, to its end; Ctrl-C leaves the run alone."""
    from orchestrator.run_folder.rundir import RunDir
    from orchestrator.runs.attach import attach as show
    from orchestrator.runs.console import Manner

    manner = Manner(console=Console(), verbose=verbose, quiet=quiet)
    raise typer.Exit(show(RunDir(run.absolute()).existing(), manner).exit_code)


@verb()
def logs(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    rank: Annotated[int | None, typer.Option(min=0, help="Whose; rank 0's by default.")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Until the run ends.")] = False,
    verbose: Verbose = False,
) -> None:
    """Print a rank's log."""
    del verbose
    from orchestrator.run_folder.rundir import RunDir
    from orchestrator.runs import control

    folder = RunDir(run.absolute()).existing()
    if follow:
        for text in control.follow(folder, rank):
            sys.stdout.write(text)
            sys.stdout.flush()
        return
    for text in control.text_of(control.log_of(folder, rank)):
        sys.stdout.write(text)


@verb()
def cancel(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    now: Annotated[bool, typer.Option("--now", help="At once, without a checkpoint.")] = False,
    verbose: Verbose = False,
) -> None:
    """Stop a run for good: all ranks together at the next update boundary, with a checkpoint."""
    del verbose
    from orchestrator.run_folder.rundir import RunDir
    from orchestrator.runs import control

    say(Console(), control.cancel(RunDir(run.absolute()).existing(), now=now))


def final_weights(run: Path) -> Path:
    """The file of a run's newest weights. Raises `RunFolderError` when there is none, or when it is
    not as it was written: what is left of it would be compared as if it were the run's.
    """
    from orchestrator.lifecycle.checkpoint import WEIGHTS, complete, load
    from orchestrator.run_folder.rundir import RunDir

    if run.is_file():
        return run
    folder = RunDir(run).existing()
    saved = complete(folder.checkpoints)
    if not saved:
        raise RunFolderError(f"{run} has no weights yet: no checkpoint was written")
    return load(saved[-1], folder.identity).folder / WEIGHTS


@verb()
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
    from orchestrator.report.tables.compare_table import print_comparison
    from orchestrator.report.tables.computed_with import differing
    from orchestrator.run_folder.rundir import RunDir

    found = comparing.compare(final_weights(a), final_weights(b))
    if as_json:
        _print_json(found.as_dict())
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


@verb()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder, or a sweep's.")],
    form: Annotated[
        str, typer.Option("--format", help="html (a page), md, csv, json or png.")
    ] = "html",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="A file; a page's is RUN/report.html.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Answer on loopback, fresh while runs go on.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="For --serve; 0: any.")] = 0,
    verbose: Verbose = False,
) -> None:
    """Write a page about a run or a sweep: curves, time, memory, what differs, how to repeat it."""
    del verbose
    from orchestrator.page.report import serve_report, write_report

    if serve:
        serve_report(run.absolute(), port, Console())
        return
    write_report(run.absolute(), form, output, Console())


def main() -> None:
    """The verbs, as `python -m orchestrator` and as the console script `orchestrator`."""
    script = Path(sys.argv[0]).name == "orchestrator"
    given = sys.argv[1:]
    if "--" in given and given[0] in WITH_PROGRAM:  # typer would take the dashes away
        _program[:] = given[given.index("--") :]
        given = given[: given.index("--")]
    try:
        with while_somebody_reads():
            app(given, prog_name="orchestrator" if script else "python -m orchestrator")
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
