"""Choice of a worker's main function: the training loop of a job, or the parent of a program."""

from __future__ import annotations

import gc
import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.config.job_source import check_target
from orchestrator.config.program import is_program
from orchestrator.config.reading import read_config
from orchestrator.engine.api import Framework
from orchestrator.errors import OrchestratorError
from orchestrator.plugins import FRAMEWORKS
from orchestrator.rundir.folder import RunDir


def main_of(run: Path) -> Callable[[Path, int], int]:
    """Return the main function of a rank, from the run and the attempt to the exit code.

    Import only what it needs.
    """
    if _names_program(RunDir(run)):
        from orchestrator.trainer.program import run_program

        return run_program
    from orchestrator.trainer.main import run_rank

    return run_rank


def _names_program(run: RunDir) -> bool:
    try:
        return is_program(run.existing().read_config().get("job") or {})
    except OrchestratorError:  # the training loop meets the same, and says it where people look
        return False


# ----------------------------------------------------------------------
# Imports for the process that all ranks of a node are forked from.


def preload(run: RunDir) -> None:
    """Import what a rank is made of, and its engine if the job's source names the framework.

    Whatever fails here fails in each rank again, which tells it where a person looks for it.
    """
    gc.disable()  # what an import leaves is no garbage; to look for some takes a tenth of its time
    try:
        job = read_config(run.existing().read_config()).job
        if is_program(job):
            importlib.import_module("orchestrator.trainer.program")
            return
        importlib.import_module("orchestrator.trainer.main")
        framework = check_target(job).framework
        if framework is not None:
            FRAMEWORKS.load(framework, Framework)
    except Exception:  # noqa: BLE001  # see above; this is the node's log
        traceback.print_exc()
    finally:
        gc.enable()


def draw_other_numbers() -> None:
    """Seed generators anew that were seeded by an import, so that no two forks draw the same.

    Python's own does so by itself.
    """
    modules: dict[str, Any] = dict(sys.modules)
    if "numpy" in modules:
        modules["numpy"].random.seed()
    if "torch" in modules:
        modules["torch"].default_generator.seed()
