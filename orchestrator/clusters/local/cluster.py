"""The local cluster: simulated nodes on this machine, each with its name and its loopback address.

Every worker is a real process with the environment that SLURM would give it, so a job that runs
here runs there. Each node has its agent (`orchestrator.agent`). No process outlives the launcher.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from orchestrator.clusters.api import Admission, Cluster, Handle, Request, Share
from orchestrator.clusters.local.environment import find_shared_gpus
from orchestrator.config.frameworks import facts_of
from orchestrator.config.program import is_program
from orchestrator.config.rules import planned_survival
from orchestrator.config.schema import gpu_count, node_range
from orchestrator.errors import ClusterError, TransportError
from orchestrator.machine import (
    cores,
    device_count,
    free_memory_bytes,
    share_gpus,
    visible_gpus,
)
from orchestrator.units import format_bytes, plural

ON_CPUS = ("gloo", "mccl")
NODES_LIMIT = 254 * 254
CROWD = 8  # ranks on a core, beyond which a machine may no longer respond
LEAST_RANK_BYTES = 100 << 20
"""Private memory that a rank of a framework needs at least: 54 MiB were measured for a small model
on torch, without the activations and connections of a larger run.
"""


def _fewer(request: Request, ranks: int) -> str:
    """Return the overrides for the shape nearest to a request's that has at most so many ranks.

    >>> _fewer(Request(run=Path(), attempt=0, nodes=3, ranks_per_node=100), 16)
    'cluster.ranks_per_node=5'
    >>> _fewer(Request(run=Path(), attempt=0, nodes=30, ranks_per_node=8), 16)
    'cluster.nodes=16 cluster.ranks_per_node=1'
    """
    if ranks >= request.nodes:
        return f"cluster.ranks_per_node={ranks // request.nodes}"
    return f"cluster.nodes={max(1, ranks)} cluster.ranks_per_node=1"


def _refuse_beyond_memory(request: Request) -> None:
    free, needed = free_memory_bytes(), request.ranks * LEAST_RANK_BYTES
    if request.ranks > 1 and needed > free:
        raise ClusterError(
            f"cluster.nodes={request.nodes} cluster.ranks_per_node={request.ranks_per_node}: "
            f"{request.ranks} ranks need {format_bytes(needed)} of memory at least "
            f"({format_bytes(LEAST_RANK_BYTES)} each), but this machine has {format_bytes(free)} "
            f"free; try {_fewer(request, free // LEAST_RANK_BYTES)}"
        )


def _crowding_warning(request: Request) -> str | None:
    core_count = cores()
    if request.ranks <= CROWD * core_count:
        return None
    return (
        f"{request.ranks} ranks on {plural(core_count, 'core')}: this machine may stop responding; "
        f"start fewer ({_fewer(request, CROWD * core_count)}), or only look: "
        f"python -m orchestrator plan"
    )


class LocalCluster(Cluster):
    """Simulated nodes on this machine."""

    supports_survival = True

    def refuse(self, framework: str | None) -> None:
        """Refuse a run that this machine cannot run.

        Raises:
            TransportError: there are too few GPUs.
        """
        gpus, width = len(visible_gpus(os.environ)), self.config.cluster.ranks_per_node
        if self.config.transport == "nccl" and gpus < width:
            on_cpus = facts_of(framework).cpu_transport
            raise TransportError(
                f"transport=nccl needs a GPU for each of the {width} ranks of a node, but this "
                f"machine has {gpus}; try transport={on_cpus}"
            )

    def request(self, run: Path, attempt: int) -> Request:
        request = super().request(run, attempt)
        if request.nodes > NODES_LIMIT:
            raise ClusterError(
                f"cluster.nodes={request.nodes}: a local cluster has at most {NODES_LIMIT}"
            )
        gpus = share_gpus(
            visible_gpus(os.environ),
            request.nodes,
            max(request.ranks_per_node, self._requested_gpus),
            common=self.config.transport == "nccl",
        )
        return replace(request, details={"gpus": gpus})

    def check(self, request: Request) -> Admission:
        """Warn of crowded cores, and of GPUs that stay unused or are shared.

        Raises:
            ClusterError: the ranks need more memory than this machine has, or a program's nodes
                more devices.
        """
        count = device_count(os.environ)
        # Where it is not known, there may be enough: the ranks warn (`lacking_devices`).
        if count is not None and count < self._requested_gpus:
            raise ClusterError(
                f"devices were asked for (cluster.gpus_per_node={self.config.cluster.gpus_per_node}"
                f"), but this machine has {count}; leave it out to run with what is here, on CPUs "
                "perhaps"
            )
        if self._uses_framework:
            _refuse_beyond_memory(request)
        warnings = (_crowding_warning(request), self._gpu_warning(request))
        return Admission(warnings=tuple(filter(None, warnings)))

    @property
    def survival_line(self) -> str:
        cluster, config = self.config.cluster, self.config
        nodes = node_range(cluster.nodes)[1]
        gpus = share_gpus(visible_gpus(os.environ), nodes, cluster.ranks_per_node)
        if config.transport == "auto" and any(gpus or ()):
            config = replace(config, transport="nccl")  # as the ranks will find it
        return planned_survival(config).line

    @property
    def _requested_gpus(self) -> int:
        """GPUs of a program's node; a job class has one for each rank, and refuses CPUs itself."""
        if not is_program(self.config.job):
            return 0
        return gpu_count(self.config.cluster.gpus_per_node)

    @property
    def _uses_framework(self) -> bool:
        return not is_program(self.config.job) or self.config.job.get("style") != "plain"

    def _gpu_warning(self, request: Request) -> str | None:
        if shared := find_shared_gpus(request):
            named = f"GPU {shared[0]}" if len(shared) == 1 else f"GPUs {', '.join(shared)}"
            return f"nodes share {named}, and NCCL sends over loopback: slow, for tests"
        gpus = request.details["gpus"]
        if not gpus or any(gpus) or self.config.transport in ON_CPUS:
            return None
        count, ranks = len(visible_gpus(os.environ)), request.ranks
        unused, them = ("its GPU stays", "it") if count == 1 else (f"its {count} GPUs stay", "them")
        return (
            f"this machine has too few GPUs for one each of the {ranks} ranks, so {unused} unused: "
            f"cluster.nodes=1 cluster.ranks_per_node={count} uses {them}, transport=gloo says that "
            "CPUs are meant"
        )

    @property
    def share(self) -> Share:
        cluster = self.config.cluster
        ranks = node_range(cluster.nodes)[1] * cluster.ranks_per_node
        on_gpus = is_program(self.config.job) or self.config.transport not in ON_CPUS
        cores = ranks * cluster.cpus_per_rank
        gpus = max(ranks, node_range(cluster.nodes)[1] * self._requested_gpus) if on_gpus else 0
        if self.config.transport == "nccl":  # nodes share those that there are
            gpus = min(gpus, len(visible_gpus(os.environ)))
        return Share(ranks=ranks, cores=cores, gpus=gpus)

    def submit(self, request: Request) -> Handle:
        # Planning and checking need not import the agent.
        from orchestrator.clusters.local.handle import LocalHandle

        return LocalHandle(request, self.config, survive=self.survives)
