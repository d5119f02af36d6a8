"""Runs as SLURM jobs of their own.

`SlurmCluster` submits batch scripts and finds runs again by their job ids. A submitted run does not
need its launcher: `SlurmHandle` is made from the run folder alone, in any shell, days later.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.clusters.api import Admission, Cluster, Request
from orchestrator.clusters.slurm.admission import check_request
from orchestrator.clusters.slurm.allocation import CurrentAllocation
from orchestrator.clusters.slurm.arrays import UNLIKE, fitting, submit_as_arrays
from orchestrator.clusters.slurm.base import BaseSlurmCluster
from orchestrator.clusters.slurm.batch_script import SubmitHost, batch_script
from orchestrator.clusters.slurm.handle import SlurmHandle, cancel_all
from orchestrator.clusters.slurm.safe_values import without_effect
from orchestrator.clusters.slurm.scheduler import retry_unanswered
from orchestrator.clusters.slurm.submission import adopt, queue
from orchestrator.config.schema import ClusterConfig, Config, end_s, gpu_count, node_range, notice_s
from orchestrator.errors import ClusterError
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.status import RunStatus
from orchestrator.units import format_bytes, plural

CPUS_FOR_A_GPU = 4
CLUSTERS_VARIABLES = ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")
_answers: dict[tuple[object, ...], Admission] = {}


class SlurmCluster(BaseSlurmCluster):
    """The machine's SLURM, or the one of `cluster.slurm_conf`."""

    attended, supports_survival = False, True
    status_interval_s = 15.0  # administrators ask for at most four calls of squeue a minute

    def script(self, run: RunDir, attempt: int, host: SubmitHost) -> str:
        return batch_script(self.decided, run, attempt, host)

    @classmethod
    def chosen(cls, config: Config) -> type[Cluster]:
        return cls if config.cluster.allocation == "new" else CurrentAllocation

    def check(self, request: Request) -> Admission:
        """Ask the scheduler. Raises `ClusterError` if it would never run the request.

        Equal requests, as a sweep's points, are asked about once per process.
        """
        cluster, options = self.config.cluster, request.details["options"]
        self._refuse_other_clusters()
        least = node_range(cluster.nodes)[0]
        key = (cluster.slurm_conf, *((k, v) for k, v in options.items() if k not in UNLIKE))
        if key not in _answers:
            _answers[key] = retry_unanswered(
                lambda: check_request(self.client(), options, least, request.text), tell=self.tell
            )
        message, warnings = _answers[key].message, _answers[key].warnings
        if self.survives:
            nodes = plural(1 if isinstance(cluster.nodes, int) else least, "node")
            message += (
                f"; a rank or a node that is lost does not end it, down to {nodes}, but its first "
                "node set down does: it goes back to the queue then, with a checkpoint"
            )
        if gpu_count(cluster.gpus_per_node) and cluster.cpus_per_rank < CPUS_FOR_A_GPU:
            few_cpus = (
                f"cluster.cpus_per_rank={cluster.cpus_per_rank} is little for a rank with a GPU: "
                "its main and autograd threads, NCCL's, and train.loader_workers share them; with "
                f"cluster.cpus_per_rank={CPUS_FOR_A_GPU} or more they do not wait for each other"
            )
            warnings = (*warnings, few_cpus)
        limit_s: float | None = _answers[key].notice.get("time_limit_s")
        if limit_s is not None and cluster.signal_ahead_s >= limit_s / 2:
            warnings = (*warnings, _describe_long_notice(cluster, limit_s))
        addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
        if addresses != resource.RLIM_INFINITY and "propagate" not in cluster.slurm_flags:
            limited = (
                f"this shell limits processes to {format_bytes(addresses)} of addresses (ulimit "
                "-v), and SLURM gives that limit to the ranks; CUDA reserves many more. Set "
                "cluster.slurm_flags.propagate=NONE, or ulimit -S -v unlimited"
            )
            warnings = (*warnings, limited)
        if ignored := without_effect(cluster, os.environ):
            none = (
                f"variables without effect here: {', '.join(ignored)}; set the key of cluster.*, "
                "or cluster.slurm_flags.OPTION"
            )
            warnings = (*warnings, none)
        return replace(_answers[key], message=message, warnings=warnings)

    def _refuse_other_clusters(self) -> None:
        """Refuse the user's variables that stand for sbatch's -M, if they name other clusters only:
        the job would go to this one.
        """
        chosen = {name: os.environ[name] for name in CLUSTERS_VARIABLES if os.environ.get(name)}
        if not chosen or self.config.cluster.slurm_conf is not None:
            return
        settings = retry_unanswered(lambda: self.client().settings(), tell=self.tell)
        own = settings["ClusterName"]
        for name, value in chosen.items():
            named = {name.strip().lower() for name in value.split(",")}
            if not named & {own.lower(), "all"}:
                raise ClusterError(
                    f"{name}={value} is set, but this machine's cluster is {own}, and -M "
                    f"(--clusters) is not supported: set cluster.slurm_conf to the slurm.conf of "
                    f"that cluster, or unset {name}"
                )

    def submit(self, request: Request) -> SlurmHandle:
        """Queue the request, and write the job's id to the run folder."""
        run, cluster = RunDir(request.run), self.config.cluster
        notes: dict[str, Any] = {"requeue": cluster.requeue is not False, "tell": self.tell}
        self.submit_script(
            request,
            lambda script: queue(run, script, request.attempt, cluster.slurm_conf, **notes),
        )
        return SlurmHandle(run)

    @classmethod
    def submit_all(
        cls, placed: Sequence[tuple[Cluster, Request]], at_once: int | None = None
    ) -> None:
        """Submit runs as arrays, see `arrays.py`."""
        submit_as_arrays([(c, r) for c, r in placed if isinstance(c, SlurmCluster)], at_once)

    @classmethod
    def predict_submit_all(cls, placed: Sequence[tuple[Cluster, Request]]) -> list[str]:
        """Return a sentence for each of the site's limits with too little room, see `arrays.py`."""
        _, why = fitting([(c, r) for c, r in placed if isinstance(c, SlurmCluster)])
        return [f"{sentence}; the same line submits the others later" for sentence in why]

    @classmethod
    def adopt(cls, folder: RunDir) -> str:
        """Complete an interrupted submission, see `submission.py`."""
        return adopt(folder)

    @classmethod
    def cancel_all(cls, runs: Sequence[RunDir], *, now: bool) -> dict[Path, str]:
        """Cancel runs by one scancel; see `handle.py`."""
        return {path: each.clause for path, each in cancel_all(runs, now=now).items()}

    @classmethod
    def handle(cls, run: RunDir) -> SlurmHandle:
        return SlurmHandle(run)

    @classmethod
    def update_statuses(
        cls, runs: Sequence[RunDir], statuses: dict[Path, RunStatus]
    ) -> Iterator[str]:
        from orchestrator.clusters.slurm.status import update_statuses

        return update_statuses(runs, statuses)


def _describe_long_notice(cluster: ClusterConfig, limit_s: float) -> str:
    """Warn of a notice that takes half of the time limit or more."""
    half = notice_s(cluster.signal_ahead_s, limit_s)
    minutes = f"{limit_s / 60:g}"
    takes = (
        f"cluster.signal_ahead_s={cluster.signal_ahead_s} takes half or more of the time limit of "
        f"{minutes} min; a job class that is requeued trains on until {end_s(limit_s):.0f} s "
        "before the limit, others have little time to train"
    )
    if cluster.time_min is None:
        return (
            f"{takes}; try cluster.signal_ahead_s={half}, or state cluster.time_min={minutes}, "
            "where half is the most"
        )
    return f"{takes}: the notice comes {half} s before the limit; a longer cluster.time_min helps"
