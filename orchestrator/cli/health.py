"""The verbs that look at this machine and its cluster: `doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from orchestrator.cli.options import Json, Verbose, print_json
from orchestrator.errors import EXIT_FAILED
from orchestrator.report.terminal import say

SIGNS = {"good": ("ok", "green"), "note": ("note", "yellow"), "bad": ("BAD", "bold red")}


def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="As for launch: +cluster=slurm, cluster.nodes=4, run.dir=..."),
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Also sum tensors on the real nodes, and time it.")
    ] = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Say what this machine or its cluster offers, what would be used, and what hurts.

    Exit code 1 where something is bad.
    """
    from orchestrator.config.composer import compose
    from orchestrator.doctor.findings import findings_of
    from orchestrator.doctor.machine import devices, file_system, limits, packages
    from orchestrator.doctor.network import network
    from orchestrator.doctor.slurm import slurm
    from orchestrator.doctor.trial import tried
    from orchestrator.runs.console import Manner

    given = overrides or []
    config = compose(given)
    folder = Path(config.run.dir or "runs").absolute()
    checks = [packages, limits, devices, network, lambda: file_system(folder),
              lambda: slurm(config.cluster.slurm_conf)]  # fmt: skip
    if run:
        manner = Manner(console=Console(stderr=True), verbose=verbose, quiet=True)
        checks.append(lambda: tried(given, manner))
    found = []
    console = Console()
    for finding in findings_of(checks):
        found.append(finding)
        if not as_json:
            sign, style = SIGNS[finding.state]
            say(console, f"{sign:<5} {finding.about + ':':<12} {finding.found}", style)
            if finding.do:
                say(console, f"{'':<18} -> {finding.do}")
    if as_json:
        print_json([finding.to_json() for finding in found])
    if any(finding.state == "bad" for finding in found):
        raise typer.Exit(EXIT_FAILED)
