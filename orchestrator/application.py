"""What `orchestrator.launch` does: read the flags, compose, start; errors become messages."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from omegaconf import OmegaConf
from rich.console import Console

from orchestrator.command_line import read_command_line
from orchestrator.compose import Composer
from orchestrator.config import to_yaml
from orchestrator.errors import (
    EXIT_FINISHED,
    ConfigError,
    OrchestratorError,
    UsageError,
    standing_somewhere,
)
from orchestrator.hydra_input import check_arguments
from orchestrator.report.terminal import say_error, while_somebody_reads
from orchestrator.submit.manner import Manner
from orchestrator.wording import no_such_key


def run_app(arguments: Sequence[str]) -> int:
    """Do what the arguments say; give the exit code. Raises our errors."""
    check_arguments(arguments)
    line = read_command_line(arguments)
    composer = Composer(line)
    if line.cfg == "job":
        return show_config(composer)
    if line.asks_hydra:
        from orchestrator.hydra_app import answer

        return answer(composer)
    manner = Manner(console=Console(), verbose=line.verbose, quiet=line.quiet)
    found = composer.compose()
    if found.sweeps:
        from orchestrator.submit.sweep import run_sweep

        return run_sweep(composer.points(), manner)
    from orchestrator.submit.run import start

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


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: errors become one message and an exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    verbose = any(a in {"-v", "--verbose"} for a in given)
    try:
        standing_somewhere()
        with while_somebody_reads():
            return run_app(given)
    except OrchestratorError as error:
        if verbose and (error.__cause__ or not isinstance(error, UsageError)):
            raise
        return report(error, Console(stderr=True))


def report(error: OrchestratorError, console: Console) -> int:
    """Print an error as a message; give its exit code."""
    say_error(error, console)
    return error.exit_code
