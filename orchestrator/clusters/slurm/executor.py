"""A submitit executor with our batch script. Its own module, since importing submitit is slow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import submitit

from orchestrator.rundir.files import write_atomically


class Executor(submitit.SlurmExecutor):
    """Executor of one script. Args: place: queues the script at that path; returns the job's id."""

    def __init__(self, folder: Path, script: str, name: str, place: Callable[[Path], str]) -> None:
        super().__init__(folder=folder)
        self._script, self._name, self._place = script, name, place
        self._throttling = 0.0

    def _submit_command(self, command: str) -> submitit.SlurmJob[Any]:
        del command  # the script has its own, see `slurm_request`
        path = self.folder / f"{self._name}.sh"
        write_atomically(path, self._script)
        return submitit.SlurmJob(folder=self.folder, job_id=self._place(path), tasks=[0])
