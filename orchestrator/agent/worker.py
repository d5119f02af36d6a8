"""The main function of a worker, in a fork of the process that has imported what it needs."""

from __future__ import annotations

import gc
import importlib
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.agent.processes import name_process
from orchestrator.config.job_source import check_target
from orchestrator.config.program import is_program
from orchestrator.config.reading import read_config
from orchestrator.engine.api import Framework
from orchestrator.errors import OrchestratorError
from orchestrator.plugins import FRAMEWORKS
from orchestrator.rundir.folder import RunDir

# By name, since a trainer imports the agent's modules. Each has `main(run, attempt)`.
PROGRAM, TRAINER = "orchestrator.trainer.program", "orchestrator.trainer.main"


def run_worker(path: Path, attempt: int, rank: int) -> int:
    """Run a worker to its end, the training loop of a job or a program; return its exit status."""
    name_process(f"rank {rank}")
    reseed_generators()
    try:
        program = is_program(RunDir(path).existing().read_config().get("job") or {})
    except OrchestratorError:  # the training loop reads the same, and reports it in the rank's log
        program = False
    return importlib.import_module(PROGRAM if program else TRAINER).main(path, attempt)


def preload(run: RunDir) -> None:
    """Import what the workers of a run need; see `import_for`."""
    try:
        job = read_config(run.existing().read_config()).job
    except OrchestratorError:  # each worker reads the same, and reports it in the rank's log
        traceback.print_exc()
    else:
        import_for(job)


def import_for(job: Mapping[str, Any]) -> None:
    """Import what workers need, with the engine if the job's source names its framework.

    An import that fails here fails in each worker again, which reports it in the rank's log.
    """
    gc.disable()  # imports leave no garbage; collection would take a tenth of their time
    try:
        if is_program(job):
            importlib.import_module(PROGRAM)
            return
        importlib.import_module(TRAINER)
        framework = check_target(job["_target_"]).framework
        if framework is not None:
            FRAMEWORKS.load(framework, Framework)
    except Exception:  # noqa: BLE001  # see above; this is the node's log
        traceback.print_exc()
    finally:
        gc.enable()
    gc.freeze()  # imported objects are no garbage; collecting them would copy their pages


def reseed_generators() -> None:
    """Seed NumPy's and torch's generators anew, so that no two forks draw the same numbers.

    Python's own generator is reseeded in a fork.
    """
    modules: dict[str, Any] = dict(sys.modules)
    if "numpy" in modules:
        modules["numpy"].random.seed()
    if "torch" in modules:
        modules["torch"].default_generator.seed()
