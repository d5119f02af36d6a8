"""A recorded run: its owner, its configuration and plan, and where it was submitted from."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.config.program import is_program
from orchestrator.config.reading import read_config
from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError, PlanError, RunFolderError
from orchestrator.plan.parts import JobFacts, branch_in
from orchestrator.plan.plan import Plan
from orchestrator.plan.program import ProgramPlan, plan_of_program
from orchestrator.rundir.files import is_own
from orchestrator.rundir.folder import RunDir

PYTHONPATH = "PYTHONPATH"  # in submission.json, too


def check_own(run: RunDir) -> None:
    """Raise `RunFolderError` if the folder is another user's."""
    if not is_own(run.path):
        raise RunFolderError(
            f"{run.path} belongs to the user with number {run.path.stat().st_uid}; to go on with a "
            f"run is to run the code that its folder names, so copy it and make sure of "
            f"{run.config.name} first"
        )


@contextlib.contextmanager
def submission_directory(run: RunDir, home: Path | None = None) -> Generator[None]:
    """Change to the directory that the run was submitted from: its relative paths and modules are
    meant from there. The folders in PYTHONPATH at that time are searched, too.

    Args:
        home: in place of the folder in submission.json.

    Raises:
        RunFolderError: that folder is gone.
    """
    cwd, submission = Path.cwd(), run.read_submission()
    home = home or Path(submission.get("folder") or cwd)
    try:
        os.chdir(home)
    except OSError as error:
        raise RunFolderError(
            f"{run.path} was submitted in {home}, where its relative paths and its code are, but "
            f"that folder cannot be entered: {error.strerror}"
        ) from error
    before, variable = list(sys.path), os.environ.get(PYTHONPATH)
    # Python's path as if it had been started at `home`: entries that mean the working directory.
    sys.path[:] = [
        str(home) if entry == "" or (index == 0 and entry == str(cwd)) else entry
        for index, entry in enumerate(before)
    ]
    own = [str(Path(entry).absolute()) for entry in submission.get(PYTHONPATH) or ()]
    if more := [entry for entry in own if entry not in sys.path]:
        sys.path[1:1] = more
        os.environ[PYTHONPATH] = os.pathsep.join([*([variable] if variable else []), *more])
    try:
        yield
    finally:
        sys.path[:] = before
        if more:
            os.environ.pop(PYTHONPATH)
            os.environ.update({PYTHONPATH: variable} if variable is not None else {})
        os.chdir(cwd)


def config_of(run: RunDir) -> Config:
    """Read a run's configuration. Raises `RunFolderError` if no run can have started with it."""
    values = run.read_config()
    try:
        return read_config(values)
    except ConfigError as error:
        raise RunFolderError(f"{run.config} is damaged: {error}") from error


def plan_of_run(config: Config, known: Mapping[str, Any]) -> Plan | ProgramPlan:
    """Return the plan of a run, or of one that it would become.

    Args:
        known: its plan.json, which has what the ranks found out.
    """
    if is_program(config.job):
        return plan_of_program(config)
    try:
        facts = JobFacts(
            dataset_samples=known.get("dataset_samples"),
            lengths_digest=known.get("lengths_digest"),
            parameters=known.get("parameters"),
            base_rate=None if config.optimizer else (known.get("schedule") or {}).get("base_lr"),
            branch=branch_in(known),
        )
        return Plan.of(config, facts)
    except PlanError as error:
        raise ConfigError(str(error)) from error
