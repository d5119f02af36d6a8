"""Did anybody ask for accelerators? Then `transport=auto` must not compute on CPUs in silence.

Asked they were by the configuration, or, under a scheduler, by what it handed to this rank (a
default of the site's or of the person's own, SBATCH_GRES say).
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.config.schema import ClusterConfig, gpu_count

OPTIONS = ("gpus", "gpus-per-task", "gpus-per-socket", "gres")
HANDED_OUT = (
    "CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "ROCR_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES",
)  # fmt: skip
NONE = frozenset({"", "-1", "nodevfiles", "none", "void"})
RESOURCES_OF_HOSTS = ("none", "tmp", "disk", "ssd", "nvme", "license", "bandwidth", "network")


def devices_asked(cluster: ClusterConfig, env: Mapping[str, str], *, scheduled: bool) -> str:
    """Who asked for devices, in words; "" when nobody did.

    >>> devices_asked(ClusterConfig(gpus_per_node="a100:4"), {}, scheduled=True)
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
    for name in HANDED_OUT if scheduled and not cluster.exclusive else ():
        if env.get(name, "").strip().lower() not in NONE:
            return f"the scheduler gave {name}={env[name]}"
    return ""
