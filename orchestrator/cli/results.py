"""The verbs that read what runs have made: `compare`, `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from orchestrator.cli.options import Json, Verbose, print_json
from orchestrator.errors import EXIT_FAILED, RunFolderError
from orchestrator.report.terminal import say


def final_weights(run: Path) -> Path:
    """The file of a run's newest weights. Raises `RunFolderError` when there is none, or when it is
    not as it was written: what is left of it would be compared as if it were the run's.
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
    from orchestrator.report.page import serve_report, write_report

    if serve:
        serve_report(run.absolute(), port, Console())
        return
    write_report(run.absolute(), form, output, Console())
