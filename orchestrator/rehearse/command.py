"""The command `rehearse`."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from orchestrator.commands.interface import (
    AsForLaunch,
    ConfigDir,
    ConfigName,
    Json,
    command,
)
from orchestrator.errors import EXIT_FAILED, RunFolderError
from orchestrator.report.terminal import print_json, say


@command("rehearse job=digits cluster.nodes=3 --faults 20 --seed 7")
def rehearse(
    overrides: AsForLaunch = None,
    faults: Annotated[int, typer.Option("--faults", help="How many.")] = 6,
    seed: Annotated[int, typer.Option("--seed", help="Which ones, and when.")] = 0,
    only: Annotated[
        str, typer.Option("--only", help="Kinds of faults, with commas; all by default.")
    ] = "",
    config_dir: ConfigDir = None,
    config_name: ConfigName = "config",
    into: Annotated[
        Path | None, typer.Option("--into", help="A new folder; below runs/ by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a job small, kill, stop and cut off parts of it, and compare its end.

    Exit code 1 where anything is otherwise than in an undisturbed run.
    """
    from orchestrator.config.command_line import CommandLine
    from orchestrator.rehearse.rehearsal import plan_rehearsal, print_rehearsal
    from orchestrator.rehearse.rehearsal import rehearse as play

    words, console = tuple(overrides or ()), Console(stderr=as_json)
    line = CommandLine(overrides=words, config_dir=config_dir, config_name=config_name)
    kinds = [kind.strip() for kind in only.split(",") if kind.strip()]
    rehearsal = plan_rehearsal(line, faults, kinds)
    folder = (into or Path(f"runs/rehearsal_{datetime.now(UTC):%Y-%m-%d_%H-%M-%S}")).absolute()
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError as error:
        raise RunFolderError(f"{folder} is there already; name a new one: --into") from error
    for note in rehearsal.notes:
        say(console, f"note: {note}", "dim", prose=True)
    outcome = play(
        rehearsal, folder, seed=seed, faults=faults, say=lambda line: say(console, line, "dim")
    )
    if as_json:
        print_json({**asdict(outcome), "folder": str(folder)})
    else:
        print_rehearsal(outcome, console)
    if outcome.wrong:
        for sentence in outcome.wrong:
            say(Console(stderr=True), f"error: {sentence}", "bold red")
        argv = [*words, *line.flags]
        argv += ["--only", only] if only else []
        again = shlex.join([*argv, "--faults", str(faults), "--seed", str(seed)])
        say(Console(stderr=True), f"the same again: python -m orchestrator rehearse {again}")
        raise typer.Exit(EXIT_FAILED)
