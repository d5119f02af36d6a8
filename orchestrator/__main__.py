"""`python -m orchestrator VERB`: inspect plans and runs, and resume them.

The verbs read the run folder alone, so they work from another shell and days later. None of them
but `export` imports a framework.
"""

from __future__ import annotations

import os.path
import sys

from orchestrator.interrupt import leave_at_interrupt, raise_at_interrupt

SCRIPT = "orchestrator"
if __name__ == "__main__" or os.path.basename(sys.argv[0]) == SCRIPT:  # noqa: PTH119
    leave_at_interrupt()

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from orchestrator.commands.interface import (
    TAKES_PROGRAM,
    AsForLaunch,
    ConfigDir,
    ConfigName,
    Json,
    Quiet,
    Verbose,
    command,
    options_of,
    overrides_argument,
    program_of,
    run_argument,
    settings_of,
)
from orchestrator.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_TIMED_OUT,
    ClusterError,
    ConfigError,
    OrchestratorError,
    RunFolderError,
    UsageError,
    expand_user,
    require_cwd,
)
from orchestrator.launch import main as launch_main
from orchestrator.plugins import COMMANDS
from orchestrator.report.terminal import exit_on_broken_pipe, print_error, print_json, say
from orchestrator.rundir.folder import RunDir

app = typer.Typer(pretty_exceptions_enable=False)
EXIT_CODES = (
    "Exit codes: 0 done, or the run finished; 1 the run failed, or what was looked for is bad; "
    "2 what was asked for is wrong; 3 stopped on request, to be resumed; 4 not judged by audit; "
    "124 wait has timed out; 130 interrupted at once."
)
_with_program: set[str] = set()
"""Verbs that take a program after `--`."""
Verb = TypeVar("Verb", bound=Callable[..., Any])


def verb(
    example: str, *, takes_program: bool = False, hydra: bool = False
) -> Callable[[Verb], Verb]:
    """Register a verb whose errors become one message and an exit code.

    Args:
        example: for the end of its help.
        hydra: its help and its options are Hydra's.
    """

    def register(function: Verb) -> Verb:
        describe = command(example, takes_program=takes_program or hydra, adds_verbose=not hydra)
        _register(function.__name__, describe(function), add_help_option=not hydra)
        return function

    return register


def _register(name: str, function: Callable[..., Any], **settings: Any) -> None:
    attached = settings_of(function)
    if attached.takes_program:
        settings |= TAKES_PROGRAM
        _with_program.add(name)
    app.command(name, epilog=attached.epilog, **settings)(_guarded(function))


def _declares(parameter: inspect.Parameter, option: str) -> bool:
    """Return whether a verb's parameter is an option of that name."""
    settings = getattr(parameter.annotation, "__metadata__", ())
    return any(option in (getattr(each, "param_decls", None) or ()) for each in settings)


def _with_home(value: Any) -> Any:
    """Return a parameter's value with `~` replaced in paths, which a shell leaves in quotes."""
    if isinstance(value, list):
        items: list[Any] = value
        return [_with_home(item) for item in items]
    return expand_user(str(value)) if isinstance(value, Path) else value


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a verb whose errors become one message and an exit code; with `-v`, a traceback too.

    `-v` is added here to the verbs that do not read it themselves.
    """
    signature = inspect.signature(function, eval_str=True)
    adds_verbose = (
        settings_of(function).adds_verbose
        and "verbose" not in signature.parameters
        and not any(_declares(parameter, "-v") for parameter in signature.parameters.values())
    )

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        verbose = kwargs.pop("verbose", False) if adds_verbose else kwargs.get("verbose", False)
        try:
            require_cwd()
            kwargs = {name: _with_home(value) for name, value in kwargs.items()}
            return function(*args, **kwargs)
        except BrokenPipeError:
            raise
        except (OrchestratorError, OSError) as error:
            raise typer.Exit(print_error(error, verbose=verbose)) from error

    if adds_verbose:  # typer reads the options from the signature
        option = inspect.Parameter(
            "verbose", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Verbose
        )
        parameters = [*signature.parameters.values(), option]
        vars(guarded)["__signature__"] = signature.replace(parameters=parameters)
    return guarded


def add_commands(typed: Sequence[str]) -> None:
    """Add commands of add-ons and of other packages to the verbs: only the one that is typed, since
    a search through all packages takes longer than most verbs; all of them where they are listed.
    """
    first = next((word for word in typed if not word.startswith("-")), None)
    known = {
        info.name or getattr(info.callback, "__name__", "") for info in app.registered_commands
    }
    if first in known or "--version" in typed:
        return
    for name in [first] if first in COMMANDS.ours else COMMANDS.names():
        if name is None or name in known:  # those of `__main__.py` cannot be replaced
            continue
        try:
            _register(name, COMMANDS.load_function(name))
        except ConfigError as error:
            if name == first:
                raise
            say(Console(stderr=True), f"warning: {error}", "yellow")


@app.callback(invoke_without_command=True, epilog=EXIT_CODES)
def main_help(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Start, plan, follow, compare and resume training runs."""
    if version:
        sys.stdout.write(f"{sys.modules['orchestrator'].__version__}\n")
    elif context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")


@verb("launch -m accumulation.steps=1,2,4", hydra=True)
def launch(
    context: typer.Context,
    arguments: Annotated[list[str] | None, overrides_argument("KEY=VALUE, -m, …")] = None,
) -> None:
    """Start a run, or with -m a sweep of runs; the same as python -m orchestrator.launch."""
    raise typer.Exit(launch_main([*(arguments or []), *program_of(context)]))


@verb("run cluster.nodes=2 -- train.py --lr 0.1", hydra=True)
def run(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None, overrides_argument(metavar="[KEY=VALUE]... -- PROGRAM [ARGUMENT]...")
    ] = None,
) -> None:
    """Start a training program as it is, as in: run cluster.nodes=2 -- train.py --lr 0.1."""
    words = arguments or []
    wants_help = not {"-h", "--help"}.isdisjoint(words)
    raise typer.Exit(
        launch_main([*words, *(program_of(context) or ([] if wants_help else ["--"]))])
    )


@verb("plan cluster.nodes=3 accumulation.global_batch=1000", takes_program=True)
def plan(
    context: typer.Context,
    overrides: AsForLaunch = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "config",
    multirun: Annotated[
        bool, typer.Option("--multirun", "-m", help="A sweep: the plan of each of its points.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print who would compute what, without starting anything."""
    from orchestrator.config.command_line import CommandLine, check_overrides, program_overrides
    from orchestrator.config.composer import Composer
    from orchestrator.runs.planning import plan_new_run, show_planned_run
    from orchestrator.sweep.planning import plan_points, show_planned_points

    words = tuple(overrides or ())
    if program := program_of(context):
        words += program_overrides(program[1:], before=words)
    check_overrides(words, verb="plan", options=options_of(context))
    line = CommandLine(
        overrides=words, config_dir=config_dir, config_name=config_name, multirun=multirun
    )
    composer = Composer(line)
    composition = composer.compose()
    if not composition.sweeps:
        planned_run = plan_new_run(composition.config())
        if as_json:
            print_json(planned_run.to_json())
        else:
            show_planned_run(planned_run, Console())
        return
    planned_points = plan_points(composer)
    if not as_json:
        show_planned_points(planned_points, Console())
        return
    print_json(planned_points.to_json())
    for sentence in planned_points.sentences:
        say(Console(stderr=True), f"warning: {sentence}", "yellow")


@verb("resume RUN train.updates=200")
def resume(
    run: Annotated[Path, run_argument("A run folder, or a sweep's: its unfinished points.")],
    overrides: Annotated[
        list[str] | None,
        overrides_argument("KEY=VALUE: more updates, other nodes, another cluster, …"),
    ] = None,
    config_dir: ConfigDir = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Although the code or data has changed.")
    ] = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Go on with a run from its newest sound checkpoint, to the same bits.

    What is given after the run may change where and for how long it trains, never the samples or
    rates of an update; what changes rounding is warned of.
    """
    from orchestrator.rundir.status import find_runs
    from orchestrator.runs.follow import OutputOptions, start_run
    from orchestrator.runs.resume import prepared_resume

    output = OutputOptions(console=Console(), verbose=verbose, quiet=quiet)
    folder = run.absolute()
    points, searched = find_runs(folder), RunDir(folder).search.exists()
    if searched or points not in ([], [folder]):
        from orchestrator.sweep.sweep import resume_sweep

        runs = [RunDir(point) for point in points]
        code = resume_sweep(folder, runs, output, overrides or [], config_dir, changed=changed)
        raise typer.Exit(code)
    with prepared_resume(folder, output, overrides or [], config_dir, changed=changed) as ready:
        code = EXIT_FINISHED if ready is None else start_run(ready)
    raise typer.Exit(code)


@verb("new my_project")
def new(
    folder: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
) -> None:
    """Write a small project of your own: a job, its configuration, a test."""
    from orchestrator.commands.new import write_project

    project = write_project(folder)
    say(Console(), f"{project} is written; its README.md says what to type", prose=True)


@verb("status RUN --json")
def status(
    runs: Annotated[
        list[Path] | None, run_argument("Run folders, or a sweep's; none: all in runs/.")
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option("--sort", help="The largest first: held_out.accuracy; -loss: the smallest."),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option("--columns", help="With commas: loss, held_out.NAME, best, note, a key, …"),
    ] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Only runs with it in run.tags.")] = None,
    as_json: Json = False,
) -> None:
    """Print the states of runs: waiting, running or ended, on any cluster."""
    from orchestrator.report import status_tables as tables
    from orchestrator.rundir.status import find_runs
    from orchestrator.runs.status import columns_of, expand, sorted_by, statuses

    paths = [path.absolute() for path in runs or []]
    search, damage = None, list[str]()
    try:
        search = RunDir(paths[0]).read_search() if len(paths) == 1 else None
    except RunFolderError as error:  # its runs can be read all the same
        damage.append(str(error))
    unbegun = search is not None and not find_runs(paths[0])
    run_statuses, sentences = statuses([] if unbegun else expand(paths))
    sentences += damage
    if tag is not None:
        run_statuses = [status for status in run_statuses if tag in status.tags]
    names = [name.strip() for name in (columns or "").split(",") if name.strip()]
    if sort is not None:
        run_statuses = sorted_by(run_statuses, sort, sentences)
        names += [sort.removeprefix("-")] if columns is None else []
    shown = columns_of(run_statuses, names, sentences) if names and run_statuses else None
    console = Console()
    for sentence in dict.fromkeys(sentences):
        say(Console(stderr=True), f"warning: {sentence}", "yellow")
    if as_json:
        rows = [status.to_json() for status in run_statuses]
        for index, row in enumerate(rows):
            row |= {name: column[index] for name, column in (shown or {}).items()}
        print_json(tables.with_trials(rows, search) if search else rows)
        return
    if len(paths) == 1 and [status.folder for status in run_statuses] == paths and shown is None:
        tables.print_run(run_statuses[0], console)
    elif run_statuses:
        tables.print_status(run_statuses, console, Path.cwd(), shown)
    elif tag is not None:
        places = ", ".join(map(str, paths)) or "runs/"
        say(console, f"no run has the tag {tag} in {places}")
    elif not paths:
        say(console, "there are no runs in runs/")
    if search is not None:
        tables.print_search(search, console)


@verb("attach RUN")
def attach(
    run: Annotated[Path, run_argument("A run folder, or a sweep's.")],
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Show a run's live line again, to its end; Ctrl-C leaves the run alone."""
    from orchestrator.api import EXIT_OF_STATE, Sweep
    from orchestrator.interrupt import interrupts
    from orchestrator.rundir.metrics import RECENT_BYTES
    from orchestrator.runs.follow import OutputOptions, follow, handle_of
    from orchestrator.sweep.sweep import is_sweep

    if is_sweep(RunDir(run.absolute())):
        raise typer.Exit(EXIT_OF_STATE.get(Sweep(run.absolute()).follow(), EXIT_FAILED))
    output = OutputOptions(console=Console(), verbose=verbose, quiet=quiet)
    folder = RunDir(run.absolute()).existing()
    with interrupts:
        code = follow(handle_of(folder), folder, output, recent=RECENT_BYTES)  # for the pace
    raise typer.Exit(code)


@verb("wait RUN --timeout 3600 --json")
def wait(
    runs: Annotated[list[Path], run_argument("Run folders, or sweeps'.")],
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout", min=0.0, help="For so many seconds at most."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Return when runs have ended, with their states and causes; Ctrl-C leaves them alone.

    Exit code 0 if all have finished, 1 if one failed, 3 if one was stopped.
    """
    from orchestrator.api import Run, wait_for
    from orchestrator.report import status_tables as tables
    from orchestrator.runs.status import expand

    waited_for = [Run(run.path) for run in expand([path.absolute() for path in runs])]
    code = EXIT_TIMED_OUT
    try:
        code = wait_for(waited_for, timeout_s)
    except TimeoutError as error:
        say(Console(stderr=True), str(error), "yellow")
    run_statuses = [run.status for run in waited_for]
    if as_json:
        print_json([status.to_json() for status in run_statuses])
    else:
        tables.print_status(run_statuses, Console(), Path.cwd())
    raise typer.Exit(code)


@verb("logs RUN --rank 3 -f")
def logs(
    run: Annotated[Path, run_argument("A run folder.")],
    rank: Annotated[int | None, typer.Option(min=0, help="Whose; rank 0's by default.")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Until the run ends.")] = False,
    lines: Annotated[
        int | None, typer.Option("-n", "--lines", min=0, help="Its last lines only.")
    ] = None,
) -> None:
    """Print a rank's log."""
    from orchestrator.runs.logs import pointer_to_culprit, read_log

    folder = RunDir(run.absolute()).existing()
    for text in read_log(folder, rank, lines, follow=follow):
        sys.stdout.write(text)
        sys.stdout.flush()
    if note := pointer_to_culprit(folder, rank):
        say(Console(stderr=True), note, "yellow")


@verb("cancel RUN")
def cancel(
    runs: Annotated[list[Path], run_argument("Run folders, or sweeps': all their points.")],
    now: Annotated[bool, typer.Option("--now", help="At once, without a checkpoint.")] = False,
    verbose: Verbose = False,
) -> None:
    """Stop a run, which `resume` continues: all ranks together at the next update boundary, with a
    checkpoint; a program by its signal.

    Of several runs, those that have ended already are no error.
    """
    from orchestrator.api import Run, Sweep
    from orchestrator.rundir.status import OVER, find_runs
    from orchestrator.runs.status import expand, statuses

    code = 0
    for folder in (path.absolute() for path in runs):
        try:
            alone = find_runs(folder) == [folder]
            sentences = [Run(folder).cancel(now=now)] if alone else Sweep(folder).cancel(now=now)
        except (OrchestratorError, OSError) as error:
            if len(runs) == 1:
                raise
            if isinstance(error, ClusterError) and all(
                status.state in OVER for status in statuses(expand([folder]))[0]
            ):
                say(Console(), f"{folder} has ended already")
            else:
                failed = print_error(error, verbose=verbose)  # each of them
                code = code or failed
            continue
        for sentence in sentences:
            say(Console(), sentence)
    raise typer.Exit(code)


@verb("compare RUN_A RUN_B --tensors")
def compare(
    a: Annotated[Path, run_argument("A run folder, or a safetensors file.")],
    b: Annotated[Path, run_argument("The reference: differences are relative to it.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="Tensor by tensor.")] = False,
    at_most: Annotated[
        float | None, typer.Option(min=0.0, help="Exit with 1 when the difference is larger.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the largest relative difference between the final weights of two runs, and how their
    settings and losses differ.
    """
    from orchestrator.api import compare as compare_runs
    from orchestrator.report.compare import print_comparison
    from orchestrator.report.compare_runs import print_run_comparison
    from orchestrator.rundir.environments import environment_notes
    from orchestrator.runs.inputs import code_differences

    compared = compare_runs(a, b)
    if as_json:
        # An infinite difference is `Infinity`: null would pass for small in too many scripts.
        print_json(compared.to_json())
    else:
        print_comparison(compared.weights, Console(), tensors=tensors)
        print_run_comparison(compared, Console())
        if compared.settings is not None:  # of runs, not of files
            runs = RunDir(a), RunDir(b)
            for sentence in environment_notes(*runs) + code_differences(*runs):
                say(Console(), sentence, "yellow")
    largest = compared.weights.max_relative_difference
    if at_most is not None and not largest <= at_most:
        say(
            Console(stderr=True),
            f"error: the largest relative difference is {largest:.3e}, more than --at-most "
            f"{at_most:g}",
            "bold red",
        )
        raise typer.Exit(EXIT_FAILED)


@verb("export RUN --torch")
def export(
    run: Annotated[Path, run_argument("A run folder.")],
    safetensors: Annotated[
        bool, typer.Option("--safetensors", help="The weights in one file; the default.")
    ] = False,
    torch: Annotated[
        bool, typer.Option("--torch", help="Weights and optimizer, for torch.load().")
    ] = False,
    dcp: Annotated[
        bool, typer.Option("--dcp", help="The same, for torch.distributed.checkpoint.load().")
    ] = False,
    best: Annotated[
        bool, typer.Option("--best", help="The best one, as train.keep_best has it.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="A new file or folder; in RUN/export.")
    ] = None,
) -> None:
    """Write a run's newest or best checkpoint for other programs."""
    from orchestrator.api import open_run

    if safetensors + torch + dcp > 1:
        raise UsageError("--safetensors, --torch and --dcp exclude one another")
    form = "torch" if torch else "dcp" if dcp else "safetensors"
    path, updates = open_run(run).export(form, output, best=best)
    say(Console(), f"{path} is written: the checkpoint after {updates} updates", prose=True)


SIGNS = {"good": ("ok", "green"), "note": ("note", "yellow"), "bad": ("BAD", "bold red")}


@verb("doctor --run +cluster=slurm")
def doctor(
    overrides: Annotated[
        list[str] | None,
        overrides_argument("As for launch: +cluster=slurm, cluster.nodes=4, run.dir=..."),
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Also sum tensors on the real nodes, and time it.")
    ] = False,
    config_dir: ConfigDir = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Say what this machine or its cluster offers, what would be used, and what hurts.

    Exit code 1 where something is bad.
    """
    from orchestrator.health.doctor import check_machine
    from orchestrator.runs.follow import OutputOptions

    trial = None
    if run:
        trial = OutputOptions(console=Console(stderr=True), verbose=verbose, quiet=True)
    findings = []
    console = Console()
    for finding in check_machine(*(overrides or ()), config_dir=config_dir, trial=trial):
        findings.append(finding)
        if not as_json:
            sign, style = SIGNS[finding.state]
            say(console, f"{sign:<5} {finding.subject + ':':<12} {finding.text}", style)
            if finding.remedy:
                say(console, f"{'':<18} -> {finding.remedy}")
    if as_json:
        print_json([asdict(finding) for finding in findings])
    if any(finding.state == "bad" for finding in findings):
        raise typer.Exit(EXIT_FAILED)


def main() -> None:
    """Run the verbs, as `python -m orchestrator` and as the console script `orchestrator`."""
    script = Path(sys.argv[0]).name == SCRIPT
    if script and not sys.flags.safe_path:
        # A job is imported from the working folder, as ranks do and as with `python -m`; a script
        # has its own folder there instead.
        sys.path[0] = str(Path.cwd())
    arguments, program = sys.argv[1:], list[str]()
    before = list(itertools.takewhile(lambda word: word != "--", arguments))
    try:
        raise_at_interrupt()
        with exit_on_broken_pipe():
            try:
                add_commands(before)
            except OrchestratorError as error:
                sys.exit(print_error(error))
            if before and before[0] in _with_program:  # typer would take the dashes away
                arguments, program = before, arguments[len(before) :]
            name = "orchestrator" if script else "python -m orchestrator"
            app(arguments, prog_name=name, obj=program)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
