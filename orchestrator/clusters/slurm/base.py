"""Parts of a submission that new jobs and steps of an existing allocation have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from orchestrator import snapshot
from orchestrator.clusters.api import Cluster, Request
from orchestrator.clusters.slurm.batch_script import (
    SubmitHost,
    options,
    script_name,
    submit_host,
)
from orchestrator.clusters.slurm.safe_values import check_preamble, check_values
from orchestrator.clusters.slurm.scheduler import SlurmClient
from orchestrator.clusters.slurm.task import NodeTask, write_task
from orchestrator.clusters.slurm.trust import client_of, remember
from orchestrator.config.frameworks import facts_of
from orchestrator.config.program import target_of
from orchestrator.config.schema import gpu_count, node_range
from orchestrator.errors import ConfigError
from orchestrator.rundir.files import write_atomically
from orchestrator.rundir.folder import RunDir
from orchestrator.units import first_few


class BaseSlurmCluster(Cluster):
    """The machine's SLURM, or the one of `cluster.slurm_conf`."""

    def refuse(self, framework: str | None) -> None:
        """Refuse a job with fewer GPUs than ranks on a node, which each rank would refuse."""
        cluster, gpus = self.config.cluster, gpu_count(self.config.cluster.gpus_per_node)
        if 0 < gpus < cluster.ranks_per_node and self.config.transport in ("auto", "nccl"):
            on_cpus = facts_of(framework).cpu_transport
            raise ConfigError(
                f"cluster.gpus_per_node={cluster.gpus_per_node}, but the "
                f"{cluster.ranks_per_node} ranks of a node (cluster.ranks_per_node) need a GPU "
                f"each; try cluster.ranks_per_node={gpus}, or transport={on_cpus}"
            )

    def trust(self, run: RunDir, typed: Collection[str] | None = None) -> None:
        conf = self.config.cluster.slurm_conf
        if conf is not None:
            if typed is None or "cluster.slurm_conf" in typed:
                remember(conf)
            client_of(run, conf)

    def request(self, run: Path, attempt: int, copy: Path | None = None) -> Request:
        """Return the submission as a value; `text` is the exact script.

        Args:
            copy: where the code's shared copy is; None: in the run's folder.
        """
        config, folder = self.decided, RunDir(run)
        check_values(config, run, Path.cwd())
        host = submit_host(config, copy or folder.snapshot(attempt))
        check_preamble(config.cluster.preamble)
        script = self.script(folder, attempt, host)
        sbatch_options = {k: v if v is True else str(v) for k, v in options(config, folder)}
        return Request(
            run=run,
            attempt=attempt,
            nodes=node_range(config.cluster.nodes)[1],
            ranks_per_node=config.cluster.ranks_per_node,
            environment=dict(config.cluster.environment),
            text=script,
            details={"sbatch": script, "options": sbatch_options},
        )

    def client(self) -> SlurmClient:
        """Return the client that submits."""
        return SlurmClient(self.config.cluster.slurm_conf)

    @abstractmethod
    def script(self, run: RunDir, attempt: int, host: SubmitHost) -> str:
        """Return the exact script that starts the ranks."""

    def submit_script(self, request: Request, queue: Callable[[Path], str]) -> None:
        """Write the files of the request, and have submitit place its batch script.

        Args:
            queue: queues the script at a path; returns the job's id.
        """
        import submitit  # slow to import

        class Executor(submitit.SlurmExecutor):
            def _submit_command(self, command: str) -> submitit.SlurmJob[Any]:
                del command  # the script has its own
                path = self.folder / f"{script_name(request.attempt)}.sh"
                write_atomically(path, request.text)
                return submitit.SlurmJob(folder=self.folder, job_id=queue(path), tasks=[0])

        run = RunDir(request.run)
        if self.config.run.snapshot:
            self.copy_code(run.path, run.snapshot(request.attempt))
        write_task(run)
        Executor(folder=run.submitit).submit(NodeTask(str(run.path)))

    def copy_code(self, run: Path, into: Path) -> None:
        """Copy the run's code, and report the files left out."""
        left_out = snapshot.copy_code(target_of(self.config.job), run, into)
        if left_out:
            self.tell(
                f"the copy of the code leaves out what holds secrets by its name or cannot be "
                f"read, links that lead elsewhere, and, as too large, what is imported from where "
                f"it is, or copied in part: "
                f"{first_few(sorted(left_out), 3)}"
            )
