"""sbatch, through submitit, with our batch script; and what to do while no scheduler answers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import submitit

from orchestrator.errors import ClusterError
from orchestrator.run_folder.rundir import write_atomically
from orchestrator.scheduler.client import SchedulerDown, SlurmClient, explained
from orchestrator.scheduler.jobs import mine

LOST_ANSWERS = ("timed out", "zero bytes", "did not answer")


class Executor(submitit.SlurmExecutor):
    """submitit's, with our batch script and our way of calling sbatch."""

    def __init__(self, folder: Path, script: str, client: SlurmClient, name: str) -> None:
        super().__init__(folder=folder)
        self._script, self._client, self._name = script, client, name
        self._throttling = 0.0

    def _submit_command(self, command: str) -> submitit.SlurmJob[Any]:
        del command  # the script has its own, see `slurm_request`
        path = self.folder / f"{self._name}.sh"
        write_atomically(path, self._script)
        return submitit.SlurmJob(folder=self.folder, job_id=self._place(path), tasks=[0])

    def _place(self, path: Path) -> str:
        return sbatch(self._client, path)


def sbatch(client: SlurmClient, path: Path) -> str:
    """Submit a batch script; give the job's id. Raises `ClusterError`."""
    try:
        answer = client.ask("sbatch", "--parsable", str(path))
    except SchedulerDown as error:
        if any(words in str(error).lower() for words in LOST_ANSWERS):
            found = _accepted(client, path)  # the answer was lost: was the job, too?
            if found is not None:
                return found
        raise
    job_id, _, elsewhere = answer.out.strip().partition(";")
    if answer.code or not job_id.isdigit():
        raise ClusterError(explained(answer.words))
    if elsewhere and elsewhere != client.cluster_name():
        client.must("scancel", f"--clusters={elsewhere}", job_id)
        raise ClusterError(
            f"sbatch queued it on another cluster of the federation, {elsewhere}, where this "
            f"run would not be found again; that job ({job_id}) was cancelled. Submit it on a "
            f"login node of {elsewhere}, or choose the cluster by cluster.slurm_conf"
        )
    return job_id


def _accepted(client: SlurmClient, script: Path) -> str | None:
    """The job, or the array, that was made from a script, if there is one."""
    found = (j.id for j in mine(client, os.getuid()).values() if j.command == str(script))
    return next((job_id.partition("_")[0] for job_id in found), None)
