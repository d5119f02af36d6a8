"""Which transport and device a rank takes, and the variables that MindSpore and HCCL read.

Pure, but for the question what this machine has.
"""

from __future__ import annotations

from collections.abc import Mapping

import mindspore as ms

from orchestrator.engine.api import GroupSpec
from orchestrator.errors import TransportError

DEVICE_OF = {"mccl": "CPU", "nccl": "GPU", "hccl": "Ascend"}
VISIBLE = {"nccl": "CUDA_VISIBLE_DEVICES", "hccl": "ASCEND_RT_VISIBLE_DEVICES"}
COLLECTIVE_TIMEOUT = {"mccl": "MS_CPU_COMM_OP_TIMEOUT", "hccl": "HCCL_EXEC_TIMEOUT"}
CONNECT_TIMEOUT = "HCCL_CONNECT_TIMEOUT"
CONNECT_LIMITS_S = (120, 7200)
"""What HCCL takes, by its manual."""


def available(device: str) -> bool:
    """Whether this MindSpore can compute on `device` on this machine."""
    return device == "CPU" or bool(ms.hal.is_available(device))


def choose_transport(spec: GroupSpec) -> str:
    """The transport to use. Raises `TransportError` for what this machine cannot offer."""
    asked = spec.transport
    if asked == "auto":
        found = next(t for t in ("hccl", "nccl", "mccl") if available(DEVICE_OF[t]))
        if found == "mccl" and spec.devices_asked:
            raise TransportError(
                f"devices were asked for ({spec.devices_asked}), but MindSpore finds neither an "
                f"Ascend NPU nor a GPU that it can use for rank {spec.rank} on {spec.node} (is "
                f"CANN installed there, and its set_env.sh sourced?). Computing on CPUs instead "
                f"has to be said: transport=mccl"
            )
        return found
    if asked not in DEVICE_OF:
        raise TransportError(
            f"transport={asked} is not one of MindSpore's; it has hccl (Ascend), nccl (GPU) and "
            f"mccl (CPU); try transport=auto"
        )
    if not available(DEVICE_OF[asked]):
        raise TransportError(
            f"transport={asked} needs MindSpore with {DEVICE_OF[asked]} support and such a device, "
            f"but this machine has neither"
            + (" (is CANN installed, and its set_env.sh sourced?)" if asked == "hccl" else "")
            + "; try transport=mccl"
        )
    return asked


def device_index(transport: str, local_rank: int, environment: Mapping[str, str]) -> int:
    """The number of a rank's device: its local rank's, counted among those that it may see.

    A scheduler that gives each rank its own device shows it one only, which then is number 0.

    >>> device_index("hccl", 3, {}), device_index("hccl", 3, {"ASCEND_RT_VISIBLE_DEVICES": "6"})
    (3, 0)

    Raises:
        TransportError: there are fewer than the ranks of the node need.
    """
    variable = VISIBLE[transport]
    listed = environment.get(variable)
    if listed is None:
        return local_rank
    seen = [name for name in listed.split(",") if name.strip()]
    if len(seen) == 1:
        return 0
    if local_rank >= len(seen):
        raise TransportError(
            f"local rank {local_rank} has no device: {variable}={listed} shows {len(seen)}; ask "
            f"the scheduler for one a rank, or set cluster.ranks_per_node={max(1, len(seen))}"
        )
    return local_rank


def variables(
    spec: GroupSpec, transport: str, scheduler: tuple[str, int], present: Mapping[str, str]
) -> dict[str, str]:
    """What a worker's environment needs before MindSpore's cluster forms.

    Args:
        scheduler: address and port of MindSpore's scheduler process.
        present: the environment; what a person set of HCCL's time-outs there is left alone.
    """
    found = {
        "MS_ROLE": "MS_WORKER",
        "MS_WORKER_NUM": str(spec.size),
        "MS_NODE_ID": str(spec.rank),
        "MS_SCHED_HOST": str(scheduler[0]),
        "MS_SCHED_PORT": str(scheduler[1]),
        "MS_TOPO_TIMEOUT": str(max(1, round(spec.timeout_s))),
    }
    if transport in COLLECTIVE_TIMEOUT:
        seconds = str(max(1, round(spec.collective_timeout_s)))
        found[COLLECTIVE_TIMEOUT[transport]] = seconds
    if transport == "hccl":
        least, most = CONNECT_LIMITS_S
        found[CONNECT_TIMEOUT] = str(min(most, max(least, round(spec.timeout_s))))
        found.update(
            {k: present[k] for k in (CONNECT_TIMEOUT, "HCCL_EXEC_TIMEOUT") if k in present}
        )
    return found
