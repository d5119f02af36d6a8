"""What a command line asks for, as values; what only shows something; errors as messages."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from omegaconf import OmegaConf
from rich.console import Console

from orchestrator.cli.follow import OutputOptions
from orchestrator.config.command_line import read_command_line
from orchestrator.config.composer import Composer, print_help
from orchestrator.config.messages import no_such_key
from orchestrator.config.reading import to_yaml
from orchestrator.config.rules import refuse_without_sweep
from orchestrator.config.schema import Config
from orchestrator.errors import EXIT_FINISHED, ConfigError, OrchestratorError, plainly_said
from orchestrator.report.terminal import say_error


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a command line asks for: a run, or a sweep; neither once it is answered.

    Attributes:
        exit_code: of what was answered.
    """

    manner: OutputOptions
    config: Config | None = None
    overrides: tuple[str, ...] = ()
    sweep: Composer | None = None
    exit_code: int = EXIT_FINISHED


def read(arguments: Sequence[str]) -> Asked:
    """What the arguments ask for; what only shows something is done here. Raises our errors."""
    line = read_command_line(arguments)
    manner = OutputOptions(console=Console(), verbose=line.verbose, quiet=line.quiet)
    composer = Composer(line)
    if line.cfg == "job":
        return Asked(manner=manner, exit_code=show_config(composer))
    if line.help:
        print_help(composer)
        return Asked(manner=manner)
    found = composer.compose()
    if found.sweeps:
        return Asked(manner=manner, sweep=composer)
    config = found.config()
    refuse_without_sweep(config)
    return Asked(manner=manner, config=config, overrides=found.overrides)


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


class Messages:
    """Errors of what is done inside become one message, and `exit_code`."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._verbose = any(a in {"-v", "--verbose"} for a in arguments)
        self.exit_code = EXIT_FINISHED

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, OrchestratorError):
            return False
        if self._verbose and not plainly_said(error):
            traceback.print_exception(error)  # the sentence and the exit code stay as they are
        say_error(error, Console(stderr=True))
        self.exit_code = error.exit_code
        return True
