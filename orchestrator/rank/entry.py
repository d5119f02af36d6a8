"""What a rank of this run is: our training loop around a job, or the parent of a program."""

from __future__ import annotations

from pathlib import Path

from orchestrator.config.program_section import is_program
from orchestrator.errors import OrchestratorError
from orchestrator.run_folder.rundir import RunDir


def be_rank(run: Path, attempt: int) -> int:
    """Be one rank of the run in `run`; give its exit code. Only what is needed is imported."""
    if _names_program(RunDir(run)):
        from orchestrator.rank.program.parent import run_program

        return run_program(run, attempt)
    from orchestrator.rank.main import run_rank

    return run_rank(run, attempt)


def _names_program(run: RunDir) -> bool:
    try:
        return is_program(run.existing().read_config().get("job") or {})
    except OrchestratorError:  # the training loop meets the same, and says it where people look
        return False
