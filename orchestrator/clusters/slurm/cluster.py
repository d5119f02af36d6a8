"""The SLURM cluster: requests as batch scripts, placed by submitit, found again by their job id.

A submission is detached by nature: `SlurmHandle` is made from the run folder alone, in any shell,
days later. The run folder says how training goes, the scheduler says where the job is.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from orchestrator.clusters.api import Admission, Cluster, Request
from orchestrator.clusters.slurm.admission.checks import Verdict, check_request, too_slow
from orchestrator.clusters.slurm.admission.limits import wanted
from orchestrator.clusters.slurm.arrays import submit_as_arrays
from orchestrator.clusters.slurm.batch_script import Here, all_options, batch_script
from orchestrator.clusters.slurm.safe_values import (
    check_clusters,
    check_defaults,
    check_preamble,
    check_values,
    quoted,
)
from orchestrator.clusters.slurm.sbatch_defaults import read_defaults
from orchestrator.clusters.slurm.scripts import UNLIKE, patiently, script_name
from orchestrator.clusters.slurm.task import Task
from orchestrator.clusters.slurm.trust import client_of, remember
from orchestrator.clusters.slurm.watch import SlurmHandle
from orchestrator.config.program_section import target_of
from orchestrator.config.schema import Config, node_range
from orchestrator.lifecycle.signs.last_word import SCRIPT, after_rank
from orchestrator.outcome.folder_status import RunStatus
from orchestrator.run_folder.rundir import RunDir, write_atomically, write_json
from orchestrator.scheduler.client import SlurmClient
from orchestrator.snapshot import code_copy as snapshot
from orchestrator.snapshot.secret_files import told

_said: dict[tuple[object, ...], Verdict] = {}


def here(config: Config, copy: Path) -> Here:
    """The submitting side as it is now.

    Args:
        copy: where the copy of the code goes, if there is to be one.
    """
    target = target_of(config.job)
    roots = snapshot.source_roots(target)
    if config.run.snapshot:
        places = snapshot.copies(target, copy)
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
        unpacked=copy if config.run.snapshot else None,
        defaults=read_defaults(os.environ),
        copies=None if isinstance(target, str) else places if config.run.snapshot else {},
    )


class SlurmCluster(Cluster):
    """The machine's SLURM, or the one of `cluster.slurm_conf`."""

    attended = False

    def trust(self, run: RunDir, typed: Collection[str] | None = None) -> None:
        conf = self.config.cluster.slurm_conf
        if conf is not None:
            if typed is None or "cluster.slurm_conf" in typed:
                remember(conf)
            client_of(run, conf)

    def request(self, run: Path, attempt: int, copy: Path | None = None) -> Request:
        """The submission as a value; `text` is the exact script.

        Args:
            copy: where the copy of the code is that it shares with others; None: in its own folder.
        """
        config, folder = self.config, RunDir(run)
        check_values(config, run, Path.cwd())
        place = here(config, copy or folder.snapshot(attempt))
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
            text=script,
            details={"sbatch": script, "options": options},
        )

    def check(self, request: Request) -> Admission:
        """What the scheduler says of it. Raises `ClusterError` when it would never run.

        It is asked once in a process's life for requests that are alike, as a sweep's points are.
        """
        cluster, options = self.config.cluster, request.details["options"]
        alike = (cluster.slurm_conf, *((k, v) for k, v in options.items() if k not in UNLIKE))
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
            words=said.words,
            warnings=said.warnings + ((slow,) if slow else ()),
            notice={"preempt_grace_s": said.preempt_grace_s, "kill_wait_s": said.kill_wait_s},
        )

    def submit(self, request: Request) -> SlurmHandle:
        """Queue it; the run folder then holds the job's id, so that anyone can follow it."""
        from orchestrator.clusters.slurm.submission import Executor

        run = RunDir(request.run)
        if self.config.run.snapshot:
            self.copy_code(run.path, run.snapshot(request.attempt))
        self.write_epilog(run)
        client = SlurmClient(self.config.cluster.slurm_conf)
        executor = Executor(run.submitit, request.text, client, script_name(request.attempt))
        job_id: str = patiently(lambda: executor.submit(Task(str(run.path))).job_id, tell=self.tell)
        self.write_handle(run, request.attempt, job_id)
        return SlurmHandle(run)

    def copy_code(self, run: Path, into: Path) -> None:
        """Copy the code that is to run, and say what is left out of it."""
        left_out = snapshot.take(target_of(self.config.job), run, into)
        if left_out:
            self.tell(
                f"the copy of the code leaves out what holds secrets by its name, and links "
                f"that lead elsewhere: {told(left_out)}"
            )

    def write_epilog(self, run: RunDir) -> None:
        """What srun starts after each rank, in the folder of all that SLURM starts."""
        run.submitit.mkdir(mode=0o700, exist_ok=True)
        script = run.submitit / SCRIPT
        write_atomically(script, after_rank(run, quoted(run.path)))
        script.chmod(0o700)

    def write_handle(self, run: RunDir, attempt: int, job_id: str) -> None:
        """What anybody finds the job by."""
        write_json(
            run.handle,
            {
                "kind": "slurm",
                "job_id": job_id,
                "attempt": attempt,
                "slurm_conf": self.config.cluster.slurm_conf,
                "time": time.time(),
            },
        )

    @classmethod
    def submit_all(
        cls, placed: Sequence[tuple[Cluster, Request]], at_once: int | None = None
    ) -> None:
        """As arrays, see `arrays.py`."""
        submit_as_arrays([(c, r) for c, r in placed if isinstance(c, SlurmCluster)], at_once)

    @classmethod
    def handle(cls, run: RunDir) -> SlurmHandle:
        return SlurmHandle(run)

    @classmethod
    def look(cls, runs: Sequence[RunDir], found: dict[Path, RunStatus]) -> Iterator[str]:
        from orchestrator.clusters.slurm.standing import look

        return look(runs, found)
