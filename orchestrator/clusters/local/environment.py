"""Addresses, GPUs and environments of simulated nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from orchestrator.clusters.api import Request
from orchestrator.machine import gpu_variable, share_gpu_over_nccl


def node_address(index: int) -> str:
    """Return the loopback address of a simulated node.

    >>> node_address(0), node_address(253), node_address(254)
    ('127.0.1.1', '127.0.1.254', '127.0.2.1')
    """
    return f"127.0.{1 + index // 254}.{1 + index % 254}"


def find_shared_gpus(request: Request) -> list[str]:
    """Return the GPUs that are given to more than one node."""
    assignments = [gpu for gpus in request.details["gpus"] or () for gpu in gpus]
    return sorted({gpu for gpu in assignments if assignments.count(gpu) > 1})


def build_environment(request: Request, index: int, names: Sequence[str]) -> dict[str, str]:
    """Return the environment of a simulated node's agent, which its workers inherit."""
    environment = request.node_environment(index, names, node_address(index))
    gpus = request.details["gpus"]
    if gpus is not None:
        environment[gpu_variable(os.environ)] = ",".join(gpus[index])
    if find_shared_gpus(request):
        environment = {**share_gpu_over_nccl(names[index]), **environment}
    return environment
