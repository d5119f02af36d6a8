"""Which nodes a submission leaves out because they are in quarantine."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

from orchestrator.config.schema import ClusterConfig
from orchestrator.errors import ClusterError
from orchestrator.lifecycle.quarantine import Entry, of_cluster
from orchestrator.scheduler.client import SlurmClient


def left_out(cluster: ClusterConfig) -> list[Entry]:
    """Those of the cluster that it still has: sbatch refuses names that it does not know.

    Nobody is asked where none is in. Raises `RunFolderError` for a damaged record.
    """
    if cluster.allocation == "current":  # its nodes are chosen
        return []
    entries = of_cluster(cluster.slurm_conf)
    known = _nodes_of(cluster.slurm_conf) if entries else None
    return [entry for entry in entries if known is None or entry.node in known]


@functools.cache  # of a sweep each point asks
def _nodes_of(slurm_conf: str | None) -> frozenset[str] | None:
    """All nodes of a cluster; None where it does not say, and sbatch has the last word."""
    try:
        answer = SlurmClient(slurm_conf).ask("sinfo", "-a", "-h", "-N", "-o", "%N")
    except ClusterError:  # who asks whether the job can run meets the same, and says it
        return None
    return frozenset(answer.out.split()) if not answer.code else None


def told(entries: list[Entry]) -> Iterator[str]:
    """A sentence for each."""
    for one in entries:
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.until))
        yield (
            f"node {one.node} is in quarantine until {until} ({one.reason}), and is not asked for; "
            f"to take it out: python -m orchestrator quarantine clear {one.node}"
            + (f" --slurm-conf {one.cluster}" if one.cluster else "")
        )
