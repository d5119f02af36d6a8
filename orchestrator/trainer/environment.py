"""Environment of a rank: the devices that were requested for it."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.config.schema import ClusterConfig, gpu_count
from orchestrator.machine import NO_DEVICE, device_count
from orchestrator.units import plural

# ----------------------------------------------------------------------
# Requested accelerators: with them `transport=auto` must not silently compute on CPUs.

OPTIONS = ("gpus", "gpus-per-task", "gpus-per-socket", "gres")
HANDED_OUT = (
    "CUDA_VISIBLE_DEVICES",
    "SLURM_STEP_GPUS",
    "SLURM_JOB_GPUS",
    "ROCR_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "ASCEND_VISIBLE_DEVICES",
)
RESOURCES_OF_HOSTS = ("none", "tmp", "disk", "ssd", "nvme", "license", "bandwidth", "network")


def device_request(cluster: ClusterConfig, env: Mapping[str, str], *, scheduled: bool) -> str:
    """Return the setting that requests devices; "" without one.

    >>> device_request(ClusterConfig(gpus_per_node="a100:4"), {}, scheduled=True)
    'cluster.gpus_per_node=a100:4'
    """
    if gpu_count(cluster.gpus_per_node):
        return f"cluster.gpus_per_node={cluster.gpus_per_node}"
    for section in ("slurm_flags", "srun_flags"):
        flags: Mapping[str, object] = getattr(cluster, section)
        for name in OPTIONS:
            value = str(flags.get(name) or "")
            if value and not value.startswith(RESOURCES_OF_HOSTS):
                return f"cluster.{section}.{name}={value}"
    # With whole nodes SLURM hands out all that is in them, asked for or not.
    for name in HANDED_OUT if scheduled and cluster.exclusive is not True else ():
        if env.get(name, "").strip().lower() not in NO_DEVICE:
            return f"the scheduler gave {name}={env[name]}"
    return ""


def lacking_devices(cluster: ClusterConfig, env: Mapping[str, str]) -> str:
    """Return a warning for a program whose node has fewer devices than were requested, or whose
    devices no driver lists; else "".

    >>> lacking_devices(ClusterConfig(gpus_per_node=2), {"CUDA_VISIBLE_DEVICES": "0"})[:65]
    'it has 1 of the 2 devices that cluster.gpus_per_node=2 asks for o'
    """
    requested, count = gpu_count(cluster.gpus_per_node), device_count(env)
    setting = f"cluster.gpus_per_node={cluster.gpus_per_node}"
    if not requested:
        return ""
    if count is None:
        return (
            f"{setting} asks for {plural(requested, 'device')}, but no driver lists any on its "
            "node, so it is not known how many it has: the program may compute on CPUs"
        )
    if count >= requested:
        return ""
    return (
        f"it has {count} of the {requested} devices that {setting} asks for on its node: the "
        "program may compute on CPUs"
    )
