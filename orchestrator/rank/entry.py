"""What a rank of this run is: our training loop around a job, or the parent of a program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from orchestrator.config.program import is_program
from orchestrator.errors import OrchestratorError
from orchestrator.rundir.folder import RunDir


def main_of(run: Path) -> Callable[[Path, int], int]:
    """What to call, with the run and the attempt, to be one rank of the run in `run`; it gives the
    exit code. Only what is needed is imported.
    """
    if _names_program(RunDir(run)):
        from orchestrator.rank.program.parent import run_program

        return run_program
    from orchestrator.rank.main import run_rank

    return run_rank


def _names_program(run: RunDir) -> bool:
    try:
        return is_program(run.existing().read_config().get("job") or {})
    except OrchestratorError:  # the training loop meets the same, and says it where people look
        return False
