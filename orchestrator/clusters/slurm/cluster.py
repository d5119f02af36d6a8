"""The SLURM cluster: requests as batch scripts, placed by submitit, found again by their job id.

A submission is detached by nature: `SlurmHandle` is made from the run folder alone, in any shell,
days later. The run folder says how training goes, the scheduler says where the job is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator.clusters.api import Admission, Cluster, Request
from orchestrator.clusters.slurm.admission.checks import Verdict, check_request, too_slow
from orchestrator.clusters.slurm.admission.limits import wanted
from orchestrator.clusters.slurm.on_slurm import OnSlurm, here
from orchestrator.clusters.slurm.queue.arrays import foresee, submit_as_arrays
from orchestrator.clusters.slurm.queue.packing.shares import all_memory, refuse_uncounted, step_of
from orchestrator.clusters.slurm.queue.scripts import UNLIKE, patiently, script_name
from orchestrator.clusters.slurm.request.batch_script import Here, batch_script, share_script
from orchestrator.clusters.slurm.request.srun_lines import shape_of
from orchestrator.clusters.slurm.task import Task, write_task
from orchestrator.clusters.slurm.watch import SlurmHandle
from orchestrator.config.schema import Config, node_range
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.status import RunStatus
from orchestrator.scheduler.client import SlurmClient
from orchestrator.units import plural

_said: dict[tuple[object, ...], Verdict] = {}


class SlurmCluster(OnSlurm):
    """The machine's SLURM, or the one of `cluster.slurm_conf`."""

    attended = False
    look_every_s = 15.0  # administrators ask for at most four calls of squeue a minute

    def script(self, run: RunDir, attempt: int, place: Here) -> str:
        return batch_script(self.decided, run, attempt, place)

    def share_script(self, run: Path, attempt: int, copy: Path | None = None) -> str:
        """The script of a run in an allocation that others share, see `packing/`."""
        folder = RunDir(run)
        place = here(self.config, copy or folder.snapshot(attempt))
        shape = [*step_of(run.name), *shape_of(self.config.cluster), *all_memory(self.config)]
        return share_script(self.config, folder, attempt, place, shape)

    @classmethod
    def chosen(cls, config: Config) -> type[Cluster]:
        if config.cluster.allocation == "new":
            return cls
        from orchestrator.clusters.slurm.allocation import CurrentAllocation

        return CurrentAllocation

    def check(self, request: Request) -> Admission:
        """What the scheduler says of it. Raises `ClusterError` when it would never run.

        It is asked once in a process's life for requests that are alike, as a sweep's points are.
        """
        cluster, options = self.config.cluster, request.details["options"]
        alike = (cluster.slurm_conf, *((k, v) for k, v in options.items() if k not in UNLIKE))
        refuse_uncounted(self.config, options)
        if alike not in _said:
            client = SlurmClient(cluster.slurm_conf)
            job = wanted(
                options,
                nodes=node_range(cluster.nodes),
                cpus=cluster.ranks_per_node * cluster.cpus_per_rank,
            )
            _said[alike] = patiently(
                lambda: check_request(client, self.config, job, request.text), tell=self.tell
            )
        said = _said[alike]
        slow = too_slow(self.config, said.grace_s)
        return Admission(
            words=said.words + self._survives(),
            warnings=(*said.warnings, *([slow] if slow else [])),
            notice={"preempt_grace_s": said.preempt_grace_s, "kill_wait_s": said.kill_wait_s},
        )

    def _survives(self) -> str:
        """What becomes of losses, in words, where they do not end the job."""
        if not self.survival.on:
            return ""
        nodes = self.config.cluster.nodes
        least = plural(1 if isinstance(nodes, int) else node_range(nodes)[0], "node")
        return (
            f"; a rank or a node that is lost does not end it, down to {least}, but its first node "
            "set down does: it goes back to the queue then, with a checkpoint"
        )

    def submit(self, request: Request) -> SlurmHandle:
        """Queue it; the run folder then holds the job's id, so that anyone can follow it."""
        from orchestrator.clusters.slurm.queue.executor import Executor
        from orchestrator.clusters.slurm.queue.sbatch import queue

        run = RunDir(request.run)
        self.lay_out(request)
        number, conf = request.attempt, self.config.cluster.slurm_conf

        def place(script: Path) -> str:
            return queue(run, script, number, conf, tell=self.tell)

        write_task(run)
        executor = Executor(run.submitit, request.text, script_name(number), place)
        executor.submit(Task(str(run.path)))
        return SlurmHandle(run)

    @classmethod
    def submit_all(
        cls, placed: Sequence[tuple[Cluster, Request]], at_once: int | None = None
    ) -> None:
        """As arrays, see `queue/arrays.py`."""
        submit_as_arrays([(c, r) for c, r in placed if isinstance(c, SlurmCluster)], at_once)

    @classmethod
    def foresee_all(cls, placed: Sequence[tuple[Cluster, Request]], most: int | None) -> list[str]:
        """Predict shared allocations and the site's limits, see `queue/arrays.py`."""
        del most
        return foresee([(c, r) for c, r in placed if isinstance(c, SlurmCluster)])

    @classmethod
    def adopt(cls, folder: RunDir) -> str:
        """See `queue/sbatch.py`."""
        from orchestrator.clusters.slurm.queue.sbatch import adopt

        return adopt(folder)

    @classmethod
    def cancel_all(cls, runs: Sequence[RunDir], *, now: bool) -> dict[Path, str]:
        """By one scancel; see `queue/cancelling.py`."""
        from orchestrator.clusters.slurm.queue.cancelling import cancel_all

        return cancel_all(runs, now=now)

    @classmethod
    def handle(cls, run: RunDir) -> SlurmHandle:
        return SlurmHandle(run)

    @classmethod
    def look(cls, runs: Sequence[RunDir], found: dict[Path, RunStatus]) -> Iterator[str]:
        from orchestrator.clusters.slurm.standing import look

        return look(runs, found)
