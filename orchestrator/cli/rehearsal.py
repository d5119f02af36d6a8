"""The verb `rehearse`."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from orchestrator.cli.completion import complete_overrides
from orchestrator.cli.options import Json, Verbose, print_json
from orchestrator.errors import EXIT_FAILED, RunFolderError
from orchestrator.report.terminal import say


def rehearse(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="As for launch.", autocompletion=complete_overrides),
    ] = None,
    faults: Annotated[int, typer.Option("--faults", help="How many.")] = 6,
    seed: Annotated[int, typer.Option("--seed", help="Which ones, and when.")] = 0,
    only: Annotated[
        str, typer.Option("--only", help="Kinds of faults, with commas; all by default.")
    ] = "",
    config_dir: Annotated[
        str | None, typer.Option("--config-dir", "-cd", help="Folder of your own configs.")
    ] = None,
    into: Annotated[
        Path | None, typer.Option("--into", help="A new folder; below runs/ by default.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run a job small, kill, stop and cut off parts of it, and compare its end.

    Exit code 1 where anything is otherwise than in an undisturbed run.
    """
    del verbose
    from orchestrator.rehearse.asked import asked
    from orchestrator.rehearse.playing import rehearse as play
    from orchestrator.rehearse.table import print_rehearsal

    given, console = overrides or [], Console(stderr=as_json)
    kinds = [kind.strip() for kind in only.split(",") if kind.strip()]
    to_play = asked(given, config_dir, faults, kinds)
    folder = (into or Path(f"runs/rehearsal_{datetime.now(UTC):%Y-%m-%d_%H-%M-%S}")).absolute()
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError as error:
        raise RunFolderError(f"{folder} is there already; name a new one: --into") from error
    for note in to_play.notes:
        say(console, f"note: {note}", "dim", prose=True)
    found = play(
        to_play, folder, seed=seed, faults=faults, say=lambda line: say(console, line, "dim")
    )
    if as_json:
        print_json({**found.to_json(), "folder": str(folder)})
    else:
        print_rehearsal(found, console)
    if found.wrong:
        for sentence in found.wrong:
            say(Console(stderr=True), f"error: {sentence}", "bold red")
        words = [*given, *(["--config-dir", config_dir] if config_dir else [])]
        words += ["--only", only] if only else []
        again = shlex.join([*words, "--faults", str(faults), "--seed", str(seed)])
        say(Console(stderr=True), f"the same again: python -m orchestrator rehearse {again}")
        raise typer.Exit(EXIT_FAILED)
