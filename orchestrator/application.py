"""What `orchestrator.launch` does: read the flags, compose, start; errors become messages."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from orchestrator.compose import (
    COMPOSITION_ERRORS,
    accept_spellings,
    composed,
    explained,
    to_config,
)
from orchestrator.errors import OrchestratorError, UsageError, standing_somewhere
from orchestrator.report.terminal import say_error
from orchestrator.submit.manner import Manner

LEADING_FLAGS = ("-m", "--multirun")


def manner_of(arguments: Sequence[str]) -> tuple[Manner, list[str]]:
    """Take -v and -q out of the arguments; put Hydra's -m in front, where alone it works."""
    verbose = any(a in {"-v", "--verbose"} for a in arguments)
    quiet = any(a in {"-q", "--quiet"} for a in arguments)
    rest = [a for a in arguments if a not in {"-v", "--verbose", "-q", "--quiet"}]
    leading = [a for a in rest if a in LEADING_FLAGS]
    rest = leading[:1] + [a for a in rest if a not in LEADING_FLAGS]
    return Manner(console=Console(), verbose=verbose, quiet=quiet), rest


def config_folder_of(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take `--config-dir FOLDER` out of the arguments, in any of Hydra's spellings."""
    rest = list(arguments)
    for place, argument in enumerate(rest):
        if argument in {"--config-dir", "-cd"} and place + 1 < len(rest):
            return rest[place + 1], rest[:place] + rest[place + 2 :]
        if argument.startswith("--config-dir="):
            return argument.split("=", 1)[1], rest[:place] + rest[place + 1 :]
    return None, rest


def run_app(arguments: Sequence[str]) -> int:
    """Do what the arguments say; give the exit code. Raises our errors.

    A plain launch composes once and starts. Hydra's own application, which takes longer, is for
    its flags and for sweeps, an experiment's own sweep included.
    """
    manner, rest = manner_of(arguments)
    folder, overrides = config_folder_of(rest)
    if not any(override.startswith("-") for override in overrides):
        found = composed(overrides, folder)
        if not found.sweeps:
            from orchestrator.submit.run import start

            config = to_config(found.values, found.overrides)
            return start(config, manner, overrides=found.overrides).exit_code
    from orchestrator.hydra_app import run_hydra

    return run_hydra(accept_spellings(rest), manner)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: errors become one message and an exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    verbose = any(a in {"-v", "--verbose"} for a in given)
    errors = Console(stderr=True)
    try:
        standing_somewhere()
        return run_app(given)
    except COMPOSITION_ERRORS as error:
        if verbose:
            raise
        return report(explained(error), errors)
    except OrchestratorError as error:
        if verbose and not isinstance(error, UsageError):
            raise
        return report(error, errors)


def report(error: OrchestratorError, console: Console) -> int:
    """Print an error as a message; give its exit code."""
    say_error(error, console)
    return error.exit_code
