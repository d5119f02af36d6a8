"""The Hydra application behind `orchestrator.launch`: compose, check, plan, place, follow.

`--help`, `--cfg job`, `--config-dir` and `-m` are Hydra's own. What Hydra would print as a
traceback is put into words here, with our exit codes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from orchestrator.compose import (
    COMPOSITION_ERRORS,
    HYDRA_VERSION_BASE,
    accept_spellings,
    config_folder,
    explained,
    register,
    to_config,
)
from orchestrator.errors import OrchestratorError, UsageError
from orchestrator.report.terminal import say
from orchestrator.submit.run import Manner, start
from orchestrator.submit.sweep import Sweep, SweepInterrupted, SweepRefused

LEADING_FLAGS = ("-m", "--multirun")


def manner_of(arguments: Sequence[str]) -> tuple[Manner, list[str]]:
    """Take -v and -q out of the arguments; put Hydra's -m in front, where alone it works."""
    verbose = any(a in {"-v", "--verbose"} for a in arguments)
    quiet = any(a in {"-q", "--quiet"} for a in arguments)
    rest = [a for a in arguments if a not in {"-v", "--verbose", "-q", "--quiet"}]
    leading = [a for a in rest if a in LEADING_FLAGS]
    rest = leading[:1] + [a for a in rest if a not in LEADING_FLAGS]
    return Manner(console=Console(), verbose=verbose, quiet=quiet), rest


def run_app(arguments: Sequence[str]) -> int:
    """Run the application; give the exit code. Raises our errors."""
    manner, rest = manner_of(arguments)
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    register()
    codes: list[int] = []
    refused: list[OrchestratorError] = []
    sweep = Sweep(manner)

    def task(composed: DictConfig) -> None:
        values = HydraConfig.get()
        overrides = list(values.overrides.task)
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            folder = Path(values.sweep.dir).absolute()
            sweep.point(lambda: to_config(composed, overrides), overrides, folder, values.job.num)
            return
        try:
            codes.append(
                start(to_config(composed, overrides), manner, overrides=overrides).exit_code
            )
        except OrchestratorError as error:  # Hydra would print its own lines about it
            refused.append(error)

    sys.argv = [sys.argv[0], *accept_spellings(rest)]
    # Without this Hydra prints its own report and exits; with it, exceptions reach `main`.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    app: Any = hydra.main(
        config_path=str(config_folder()), config_name="config", version_base=HYDRA_VERSION_BASE
    )(task)
    try:
        app()
    except SweepRefused as wrong:
        raise wrong.error from wrong
    except SweepInterrupted:
        codes.append(sweep.finish(interrupted=True))
    if refused:
        raise refused[0]
    if sweep.points and not codes:
        codes.append(sweep.finish())
    return codes[-1] if codes else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: errors become one message and an exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    verbose = any(a in {"-v", "--verbose"} for a in given)
    errors = Console(stderr=True)
    try:
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
    say(console, f"error: {error}", "bold red")
    return error.exit_code
