"""What `orchestrator.launch` does: read the flags, compose, start; errors become messages."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console

from orchestrator.compose.command_line import CommandLine, read_command_line
from orchestrator.compose.composer import Composer
from orchestrator.compose.hydra_input import check_arguments
from orchestrator.compose.wording import no_such_key
from orchestrator.config.reading import to_yaml
from orchestrator.config.schema import Config
from orchestrator.errors import (
    EXIT_FINISHED,
    ConfigError,
    OrchestratorError,
    plainly_said,
    standing_somewhere,
)
from orchestrator.report.terminal import say, say_error, while_somebody_reads
from orchestrator.runs.console import Manner


def run_app(arguments: Sequence[str]) -> int:
    """Do what the arguments say; give the exit code. Raises our errors."""
    check_arguments(arguments)
    line = read_command_line(arguments)
    composer = Composer(line)
    if line.cfg == "job":
        return show_config(composer)
    if line.asks_hydra:
        from orchestrator.compose.hydra_app import answer

        return answer(composer)
    manner = Manner(console=Console(), verbose=line.verbose, quiet=line.quiet)
    found = composer.compose()
    if found.sweeps:
        from orchestrator.sweeps.sweep import run_sweep

        return run_sweep(composer.points(), manner)
    from orchestrator.runs.start import start

    return start(found.config(), manner, overrides=found.overrides).exit_code


def show_config(composer: Composer) -> int:
    """Print what config.yaml of the run would say, or the part of it that --package names."""
    text = to_yaml(composer.compose().config())
    package = composer.line.package
    if package is not None:
        part = OmegaConf.select(OmegaConf.create(text), package)
        if part is None:
            raise ConfigError(no_such_key(package))
        text = OmegaConf.to_yaml(part) if OmegaConf.is_config(part) else f"{part}\n"
    sys.stdout.write(text)
    return EXIT_FINISHED


def show_plan(line: CommandLine, console: Console, *, as_json: bool) -> None:
    """Print who would compute what: of a run, or of each point of a sweep, as a launch would have
    it. Raises `UsageError` as that does.
    """
    composer = Composer(line)
    found = composer.compose()
    if not found.sweeps:
        _show_plan_of_one(found.config(), console, as_json=as_json)
        return
    from orchestrator.sweeps.sweep import plans

    made = plans(composer.points())
    if as_json:
        _print_json([{"overrides": list(point.overrides), **plan} for point, plan in made])
        return
    for point, plan in made:
        say(console, point.words, "bold")
        _print_plan(plan, console)


def _show_plan_of_one(config: Config, console: Console, *, as_json: bool) -> None:
    from orchestrator.runs.start import plan_and_notes

    made = plan_and_notes(config)
    placed: dict[str, Any] = {}
    if config.cluster.kind != "local":
        from orchestrator.runs.background import describe

        placed = describe(config)
    if as_json:
        _print_json({**made, **({"request": placed} if placed else {})})
        return
    _print_plan(made, console)
    if placed:
        sys.stdout.write(f"\n{placed['sbatch']}\n")
        refused = placed["refused"]
        say(console, f"the scheduler would say: {placed['scheduler']}", "red" if refused else "")
        if placed["warning"]:
            say(console, f"warning: {placed['warning']}", "yellow", prose=True)


def _print_plan(plan: dict[str, Any], console: Console) -> None:
    from orchestrator.report.tables.plan_table import print_plan

    print_plan(plan, console)
    for sentence in plan["notes"]:
        say(console, sentence, "dim", prose=True)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: errors become one message and an exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    verbose = any(a in {"-v", "--verbose"} for a in given)
    try:
        standing_somewhere()
        with while_somebody_reads():
            return run_app(given)
    except OrchestratorError as error:
        if verbose and not plainly_said(error):
            traceback.print_exception(error)  # the sentence and the exit code stay as they are
        return report(error, Console(stderr=True))


def report(error: OrchestratorError, console: Console) -> int:
    """Print an error as a message; give its exit code."""
    say_error(error, console)
    return error.exit_code
