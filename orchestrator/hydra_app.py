"""The Hydra application proper: sweeps (`-m`), `--help`, `--cfg job` and Hydra's other flags.

A plain launch does not come here: `application` composes once and starts. What Hydra would print
as a traceback reaches the caller as an exception.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from orchestrator.compose import HYDRA_VERSION_BASE, config_folder, register, to_config
from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.hydra_input import guarded
from orchestrator.submit.manner import Manner
from orchestrator.submit.run import start
from orchestrator.submit.sweep import Sweep, SweepInterrupted, SweepRefused


def run_hydra(arguments: Sequence[str], manner: Manner) -> int:
    """Run Hydra with these arguments; give the exit code.

    Raises:
        OrchestratorError, HydraException, OmegaConfBaseException: as they come.
    """
    register()
    codes: list[int] = []
    refused: list[OrchestratorError] = []
    defects: list[Exception] = []
    sweep = Sweep(manner)

    def task(composed: DictConfig) -> None:
        values = HydraConfig.get()
        overrides = list(values.overrides.task)
        if values.mode == RunMode.MULTIRUN:
            folder = Path(values.sweep.dir).absolute()
            sweep.point(lambda: to_config(composed, overrides), overrides, folder, values.job.num)
            return
        codes.append(start(to_config(composed, overrides), manner, overrides=overrides).exit_code)

    def kept(composed: DictConfig) -> None:
        try:
            task(composed)
        except OrchestratorError as error:  # Hydra would print its own lines about it
            refused.append(error)
        except Exception as error:
            defects.append(error)
            raise

    sys.argv = [sys.argv[0], *arguments]
    # Without this Hydra prints its own report and exits; with it, exceptions reach the caller.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    app: Any = hydra.main(
        config_path=str(config_folder()), config_name="config", version_base=HYDRA_VERSION_BASE
    )(kept)
    try:
        with guarded(bounded=False):
            app()
    except SweepRefused as wrong:
        raise wrong.error from wrong
    except SweepInterrupted:
        codes.append(sweep.finish(interrupted=True))
    except ConfigError:
        if defects:  # ours, not Hydra's: it keeps its traceback
            raise defects[0] from None
        raise
    if refused:
        raise refused[0]
    if sweep.points and not codes:
        codes.append(sweep.finish())
    return codes[-1] if codes else 0
