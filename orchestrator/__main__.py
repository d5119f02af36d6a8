"""`python -m orchestrator VERB`: look at plans and runs, and go on with them.

The verbs read the run folder alone, so they work from another shell and days later. None of them
imports a framework.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import typer
from rich.console import Console

from orchestrator.cli import following, health, rehearsal, results
from orchestrator.cli.completion import complete_overrides
from orchestrator.cli.options import Json, Quiet, Verbose
from orchestrator.errors import (
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    OrchestratorError,
    plainly_said,
    standing_somewhere,
    unreadable,
)
from orchestrator.report.terminal import say_error, while_somebody_reads

app = typer.Typer(
    pretty_exceptions_enable=False,
)
WITH_PROGRAM = ("run", "launch", "plan")
EXIT_CODES = (
    "Exit codes: 0 done, or the run finished; 1 the run failed, or what was looked for is bad; "
    "2 what was asked for is wrong; 3 stopped on request, to be resumed; 130 interrupted at once."
)
EXAMPLES = {
    "launch": "launch -m accumulation.steps=1,2,4",
    "run": "run cluster.nodes=2 -- train.py --lr 0.1",
    "plan": "plan cluster.nodes=3 accumulation.global_batch=1000",
    "resume": "resume RUN train.updates=200",
    "status": "status RUN --json",
    "attach": "attach RUN",
    "logs": "logs RUN --rank 3 -f",
    "cancel": "cancel RUN",
    "compare": "compare RUN_A RUN_B --tensors",
    "report": "report RUN --format md",
    "doctor": "doctor --run +cluster=slurm",
    "rehearse": "rehearse job=digits cluster.nodes=3 --faults 20 --seed 7",
}
Verb = TypeVar("Verb", bound=Callable[..., Any])


def verb(**settings: Any) -> Callable[[Verb], Verb]:
    """Register a verb whose errors become one message and an exit code."""

    def register(function: Verb) -> Verb:
        _add(guarded(function), **settings)
        return function

    return register


def _add(function: Callable[..., Any], **settings: Any) -> None:
    """A verb, at the end of whose help stands an example."""
    example = EXAMPLES.get(function.__name__)
    said = f"As in: python -m orchestrator {example}" if example else None
    app.command(epilog=said, **settings)(function)


def guarded(function: Verb) -> Verb:
    """`function`, whose errors become one message and an exit code."""

    @functools.wraps(function)
    def guarding(*args: Any, **kwargs: Any) -> Any:
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

    return cast("Verb", guarding)


@app.callback(invoke_without_command=True, epilog=EXIT_CODES)
def main_help(context: typer.Context, as_json: Json = False) -> None:
    """Start, plan, follow, compare and resume training runs. Without a verb: what is here now."""
    if context.invoked_subcommand is None:
        from orchestrator.cli.overview import overview

        guarded(overview)(as_json=as_json)


_program: list[str] = []


def _after_dashes() -> list[str]:
    """`--` and the program that stands after it on our command line; empty without."""
    return list(_program)


def launch(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="KEY=VALUE, -m, …", autocompletion=complete_overrides),
    ] = None,
) -> None:
    """Start a run, or with -m a sweep of runs; the same as python -m orchestrator.launch."""
    from orchestrator.launch import main as start

    raise typer.Exit(start([*(arguments or []), *_after_dashes()]))


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


for starts in (launch, run):  # whose errors are messages already, and whose help is Hydra's
    _add(starts, context_settings={"ignore_unknown_options": True}, add_help_option=False)


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
    from orchestrator.config.command_line import CommandLine, check_overrides, program_overrides

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
    run: Annotated[Path, typer.Argument(help="A run folder, or a sweep's: its unfinished points.")],
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
    from orchestrator.rundir.folder import RunDir
    from orchestrator.rundir.status import find_runs
    from orchestrator.runs.console import Manner
    from orchestrator.runs.start import resumed, way_of

    manner = Manner(console=Console(), verbose=verbose, quiet=quiet)
    folder = run.absolute()
    points, searched = find_runs(folder), RunDir(folder).search.exists()
    if searched or points not in ([], [folder]):
        from orchestrator.sweep.sweep import resume_sweep

        runs = [RunDir(point) for point in points]
        raise typer.Exit(resume_sweep(folder, runs, manner, overrides or [], config_dir))
    with resumed(run.absolute(), manner, overrides or [], config_dir) as ready:
        code = EXIT_FINISHED if ready is None else way_of(ready.cluster)(ready).exit_code
    raise typer.Exit(code)


for function in (
    following.status,
    following.attach,
    following.logs,
    following.cancel,
    results.compare,
    results.report,
    health.doctor,
    rehearsal.rehearse,
):
    verb()(function)


def main() -> None:
    """The verbs, as `python -m orchestrator` and as the console script `orchestrator`."""
    script = Path(sys.argv[0]).name == "orchestrator"
    if script and not sys.flags.safe_path:
        # A job is looked for where one stands, as ranks do and as with `python -m`; a script has
        # the folder that it lies in instead.
        sys.path[0] = str(Path.cwd())
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
