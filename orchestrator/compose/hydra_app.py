"""What Hydra itself answers about a configuration: --help, --info, --cfg hydra and completion.

Asked of the composer that composes everything else, so that it speaks of the same configuration.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from hydra import __version__
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.types import RunMode
from omegaconf import DictConfig

from orchestrator.compose.composer import Composer
from orchestrator.compose.hydra.input import guarded
from orchestrator.errors import EXIT_FINISHED


class Answers(Hydra):
    """Hydra's application, which composes as a launch does."""

    def __init__(self, composer: Composer) -> None:
        super().__init__(task_name="orchestrator.launch", config_loader=composer.loader)
        self._composer = composer

    def compose_config(
        self, config_name: str | None, overrides: list[str], run_mode: RunMode, *_: Any, **__: Any
    ) -> DictConfig:
        if config_name is None:  # Hydra's own help, which is of no configuration
            return super().compose_config(config_name, overrides, run_mode)
        return self._composer.load(overrides, run_mode)


def answer(composer: Composer) -> int:
    """Print what a flag of Hydra's asks for; give the exit code."""
    line, name, given = composer.line, composer.line.config_name, composer.overrides
    parser, asked = get_args_parser(), Namespace(overrides=given, resolve=line.resolve)
    with guarded():
        hydra = Answers(composer)
        if line.help:
            hydra.app_help(config_name=name, args_parser=parser, args=asked)
        elif line.hydra_help:
            hydra.hydra_help(config_name=name, args_parser=parser, args=asked)
        elif line.version:
            print(f"Hydra {__version__}")  # noqa: T201  # as Hydra's own flag prints it
        elif line.shell_completion:
            hydra.shell_completion(config_name=name, overrides=list(line.overrides))
        elif line.info:
            hydra.show_info(line.info, config_name=name, overrides=given)
        elif line.cfg:
            hydra.show_cfg(name, given, line.cfg, line.package, line.resolve)
    return EXIT_FINISHED
