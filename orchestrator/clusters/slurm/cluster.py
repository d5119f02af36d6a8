"""The SLURM cluster: requests as batch scripts, placed by submitit, found again by their job id.

A submission is detached by nature: `SlurmHandle` is made from the run folder alone, in any shell,
days later. The run folder says how training goes, the scheduler says where the job is.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import submitit

from orchestrator.clusters.api import Request
from orchestrator.clusters.slurm.admission.checks import Verdict, check_request
from orchestrator.clusters.slurm.admission.limits import wanted
from orchestrator.clusters.slurm.batch_script import Here, all_options, batch_script
from orchestrator.clusters.slurm.safe_values import (
    check_clusters,
    check_defaults,
    check_preamble,
    check_values,
    quoted,
)
from orchestrator.clusters.slurm.sbatch_defaults import read_defaults
from orchestrator.clusters.slurm.task import Task
from orchestrator.clusters.slurm.watch import SlurmHandle
from orchestrator.config.program_section import target_of
from orchestrator.config.schema import Config, node_range
from orchestrator.errors import ClusterError
from orchestrator.lifecycle.signs.last_word import SCRIPT, after_rank
from orchestrator.run_folder.rundir import RunDir, write_atomically, write_json
from orchestrator.scheduler.client import SchedulerDown, SlurmClient, explained
from orchestrator.scheduler.jobs import mine
from orchestrator.snapshot import code_copy as snapshot
from orchestrator.snapshot.secret_files import told

PATIENCE_S = 60.0
LONGEST_PAUSE_S = 8.0
UNLIKE = ("job-name", "output")  # what differs between a sweep's points, and no limit is about
LOST_ANSWERS = ("timed out", "zero bytes", "did not answer")

_said: dict[tuple[object, ...], Verdict] = {}


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
        return submitit.SlurmJob(folder=self.folder, job_id=self._sbatch(path), tasks=[0])

    def _sbatch(self, path: Path) -> str:
        try:
            answer = self._client.ask("sbatch", "--parsable", str(path))
        except SchedulerDown as error:
            if any(words in str(error).lower() for words in LOST_ANSWERS):
                found = _accepted(self._client, path)  # the answer was lost: was the job, too?
                if found is not None:
                    return found
            raise
        job_id, _, elsewhere = answer.out.strip().partition(";")
        if answer.code or not job_id.isdigit():
            raise ClusterError(explained(answer.words))
        if elsewhere and elsewhere != self._client.cluster_name():
            self._client.must("scancel", f"--clusters={elsewhere}", job_id)
            raise ClusterError(
                f"sbatch queued it on another cluster of the federation, {elsewhere}, where this "
                f"run would not be found again; that job ({job_id}) was cancelled. Submit it on a "
                f"login node of {elsewhere}, or choose the cluster by cluster.slurm_conf"
            )
        return job_id


def _accepted(client: SlurmClient, script: Path) -> str | None:
    """The job that was made from a script, if there is one."""
    return next(
        (j.id for j in mine(client, os.getuid()).values() if j.command == str(script)), None
    )


def here(config: Config, run: RunDir, attempt: int) -> Here:
    """The submitting side as it is now."""
    target = target_of(config.job)
    roots = snapshot.source_roots(target)
    if config.run.snapshot:
        places = snapshot.copies(target, run.snapshot(attempt))
    else:
        places = {root: root for root in roots}
    package = snapshot.PACKAGE
    own = places.get(package.parent)
    path = [*places.values(), Path.cwd()]
    return Here(
        python=sys.executable,
        folder=Path.cwd(),
        package=own / package.name if own else package,
        path=tuple(dict.fromkeys(path)),
        unpacked=run.snapshot(attempt) if config.run.snapshot else None,
        defaults=read_defaults(os.environ),
        copies=None if isinstance(target, str) else places if config.run.snapshot else {},
    )


def patiently(action: Callable[[], Any], *, patience_s: float, tell: Callable[[str], None]) -> Any:
    """Do what needs a scheduler; while none answers, again and again for a bounded time."""
    began, pause = time.monotonic(), 1.0
    while True:
        try:
            return action()
        except SchedulerDown as error:
            waited = time.monotonic() - began
            if waited + pause > patience_s:
                raise ClusterError(
                    f"{error}\nnothing was submitted; tried for {waited:.0f} s"
                ) from error
            tell(f"{error}; trying again for up to {patience_s - waited:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)


class SlurmCluster:
    """The machine's SLURM, or the one of `cluster.slurm_conf`."""

    def __init__(
        self,
        config: Config,
        *,
        patience_s: float = PATIENCE_S,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._config = config
        self._patience_s, self._tell = patience_s, tell

    def request(self, config: Config, run: Path, attempt: int) -> Request:
        """The submission as a value; `details["sbatch"]` is the exact script."""
        folder = RunDir(run)
        check_values(config, run, Path.cwd())
        place = here(config, folder, attempt)
        check_clusters(os.environ)
        check_defaults(place.defaults)
        check_preamble(config.cluster.preamble)
        script = batch_script(config, folder, attempt, place)
        options = {
            k: v if v is True else str(v) for k, v in all_options(config, folder, place).items()
        }
        return Request(
            run=run,
            attempt=attempt,
            nodes=node_range(config.cluster.nodes)[1],
            ranks_per_node=config.cluster.ranks_per_node,
            environment=dict(config.cluster.environment),
            details={"sbatch": script, "options": options},
        )

    def check(self, request: Request) -> Verdict:
        """What the scheduler says of it. Raises `ClusterError` when it would never run.

        It is asked once in a process's life for requests that are alike, as a sweep's points are.
        """
        cluster, options = self._config.cluster, request.details["options"]
        alike = (cluster.slurm_conf, *((k, v) for k, v in options.items() if k not in UNLIKE))
        if alike not in _said:
            client = SlurmClient(cluster.slurm_conf)
            job = wanted(
                options,
                nodes=node_range(cluster.nodes),
                cpus=cluster.ranks_per_node * cluster.cpus_per_rank,
            )
            script = str(request.details["sbatch"])
            _said[alike] = patiently(
                lambda: check_request(client, self._config, job, script),
                patience_s=self._patience_s,
                tell=self._tell,
            )
        return _said[alike]

    def submit(self, request: Request) -> SlurmHandle:
        """Queue it; the run folder then holds the job's id, so that anyone can follow it."""
        run, config = RunDir(request.run), self._config
        client = SlurmClient(config.cluster.slurm_conf)
        if config.run.snapshot:
            target = target_of(config.job)
            left_out = snapshot.take(target, run.path, run.snapshot(request.attempt))
            if left_out:
                self._tell(
                    f"the copy of the code leaves out what holds secrets by its name, and links "
                    f"that lead elsewhere: {told(left_out)}"
                )
        run.submitit.mkdir(mode=0o700, exist_ok=True)
        script = run.submitit / SCRIPT
        write_atomically(script, after_rank(run, quoted(run.path)))
        script.chmod(0o700)
        executor = Executor(
            run.submitit, str(request.details["sbatch"]), client, f"{request.attempt:03d}"
        )

        job_id: str = patiently(
            lambda: executor.submit(Task(str(run.path))).job_id,
            patience_s=self._patience_s,
            tell=self._tell,
        )
        write_json(
            run.handle,
            {
                "kind": "slurm",
                "job_id": job_id,
                "attempt": request.attempt,
                "slurm_conf": config.cluster.slurm_conf,
                "time": time.time(),
            },
        )
        return SlurmHandle(run)
