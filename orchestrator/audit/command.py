"""The command `audit`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from orchestrator.commands.interface import (
    Json,
    Verbose,
    command,
    options_of,
    overrides_argument,
    program_of,
)
from orchestrator.report.terminal import print_json


@command("audit cluster.ranks_per_node=2 -- train.py --accumulation 4", takes_program=True)
def audit(
    context: typer.Context,
    overrides: Annotated[
        list[str] | None, overrides_argument(metavar="[KEY=VALUE]... -- SCRIPT [ARGUMENT]...")
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option("--steps", help="The script's argument for the micro-steps: --k={steps}."),
    ] = None,
    updates: Annotated[
        int | None,
        typer.Option("--updates", help="How many; by default 8, or to an epoch's end if near."),
    ] = None,
    fake_cuda: Annotated[
        bool, typer.Option("--fake-cuda", help="Let a script that names cuda run on CPUs.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 for a slow script, too.")
    ] = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Judge a script's gradient accumulation: is each update that of one big batch?

    Exit code 0 if it is right, if slowly so; 1 if something is wrong; 4 if it cannot be judged.
    """
    from orchestrator.audit import auditing
    from orchestrator.config.command_line import check_overrides
    from orchestrator.runs.follow import OutputOptions

    check_overrides(overrides or (), verb="audit", options=options_of(context))
    console = Console()
    output = OutputOptions(console=Console(stderr=True), verbose=verbose, quiet=True)
    audits, code = auditing.audit(
        overrides or (),
        program_of(context)[1:],
        steps=steps,
        updates=updates,
        fake_cuda=fake_cuda,
        output=output,
        strict=strict,
    )
    if as_json:
        print_json({"runs": [result.to_json() for result in audits]})
    else:
        for result in audits:
            auditing.print_audit(result, console)
    raise typer.Exit(code)
