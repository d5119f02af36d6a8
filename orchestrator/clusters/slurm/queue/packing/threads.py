"""Where a site gives whole cores, a step has whole cores, too: what asks for a part of one would
keep others waiting for the rest of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from orchestrator.errors import ClusterError
from orchestrator.scheduler.client import SlurmClient

THREADS = ("sinfo", "-a", "-h", "-e", "-o", "%R|%Z")
BY_CPU = re.compile(r"^SelectTypeParameters\s*=.*\bCR_CPU", re.MULTILINE)


def cpus_of_cores(client: SlurmClient, cpus: int, partitions: Collection[str]) -> None:
    """Raise `ClusterError` where what a run takes of a node is not a number of whole cores."""
    lines = [line.partition("|") for line in client.must(*THREADS).splitlines()]
    threads = max(
        (int(count) for name, _, count in lines if name in partitions and count.isdigit()),
        default=1,
    )
    if cpus % threads == 0 or BY_CPU.search(client.must("scontrol", "show", "config")):
        return
    raise ClusterError(
        f"sweep.pack: a point takes {cpus} CPUs of a node, but a core is {threads} CPUs here, and "
        f"two points cannot share one; with cluster.cpus_per_rank={threads} each has its own"
    )
