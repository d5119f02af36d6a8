"""Cores, memory and GPUs that this machine has for its processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
NVIDIA = Path("/proc/driver/nvidia/gpus")
AMD = Path("/sys/class/kfd/kfd/topology/nodes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Resources of a machine for one user's processes at one time. `gpus`: by name."""

    cores: int
    free_memory_bytes: int
    gpus: tuple[str, ...]

    @classmethod
    def here(cls) -> Machine:
        return cls(
            cores=cores(),
            free_memory_bytes=free_memory_bytes(),
            gpus=tuple(visible_gpus(os.environ)),
        )


def cores() -> int:
    """Return the processors that this process may use, by affinity and control groups' quota."""
    count = float(len(os.sched_getaffinity(0)))
    for group in _groups():
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdigit():
            count = min(count, int(quota) / int(period))
    return max(1, int(count))


def free_memory_bytes() -> int:
    """Return the bytes available without swapping, of the machine and of the control groups.

    A group's unused file cache counts as free, as the kernel counts it.
    """
    free = int(psutil.virtual_memory().available)
    for group in _groups():
        most, used = _read(group / "memory.max"), _read(group / "memory.current")
        if most.isdigit() and used.isdigit():
            counts = dict(line.split() for line in _read(group / "memory.stat").splitlines())
            free = min(free, int(most) - int(used) + int(counts.get("inactive_file", 0)))
    return max(0, free)


# As CUDA, SLURM and container runtimes say it, in lower case.
NO_DEVICE = frozenset({"", "-1", "nodevfiles", "none", "void"})


GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def gpu_variable(env: Mapping[str, str]) -> str:
    """Return the variable that states this process's GPUs, or that would."""
    return next((variable for variable in GPU_VARIABLES if variable in env), GPU_VARIABLES[0])


def visible_gpus(env: Mapping[str, str]) -> list[str]:
    """Return the GPUs that this process may use: by variable, or else the drivers' lists."""
    if (variable := gpu_variable(env)) in env:
        names = [name.strip() for name in env[variable].split(",")]
        return [] if names[0].lower() in NO_DEVICE else [name for name in names if name]
    count = len(list(NVIDIA.glob("*")))
    # AMD's driver lists CPUs as well, with an id of 0.
    count = count or sum(_read(gpu) != "0" for gpu in AMD.glob("*/gpu_id"))
    return [str(number) for number in range(count)]


def device_count(env: Mapping[str, str]) -> int | None:
    """Return how many GPUs or NPUs this process may use; None where that cannot be known.

    >>> device_count({"CUDA_VISIBLE_DEVICES": "0,2"}), device_count({"CUDA_VISIBLE_DEVICES": ""})
    (2, 0)
    """
    if (npus := env.get("ASCEND_RT_VISIBLE_DEVICES")) is not None:
        return sum(bool(name.strip()) for name in npus.split(","))
    if gpu_variable(env) in env:
        return len(visible_gpus(env))
    # An empty list says nothing: on WSL2, on a Jetson and in some containers no driver has one.
    return len(visible_gpus(env)) or npu_count() or None


def npu_count() -> int:
    """Return how many Ascend NPUs this machine has."""
    return sum(path.name[7:].isdigit() for path in Path("/dev").glob("davinci*"))


def share_gpus(
    gpus: list[str], nodes: int, width: int, *, common: bool = False
) -> list[list[str]] | None:
    """Return each node's GPUs, one a rank; None without GPUs.

    Args:
        common: where there are too few, nodes have the same ones in turn; otherwise none has any.

    >>> share_gpus(["0", "1", "2"], 1, 2), share_gpus(["0"], 2, 1), share_gpus([], 2, 2)
    ([['0', '1']], [[], []], None)
    >>> share_gpus(["0", "1"], 3, 1, common=True)
    [['0'], ['1'], ['0']]
    """
    if not gpus:
        return None
    if len(gpus) < nodes * width and not common:
        return [[] for _ in range(nodes)]
    blocks = [gpus[i : i + width] for i in range(0, len(gpus) - width + 1, width)]
    return [blocks[node % len(blocks)] for node in range(nodes)]


def share_gpu_over_nccl(node: str) -> dict[str, str]:
    """Return variables with which NCCL accepts ranks of several simulated nodes on one GPU.

    NCCL refuses a GPU to two ranks of one host; with a HOSTID each node is a host. They are
    connected over loopback.
    """
    return {"NCCL_HOSTID": node, "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}


def _groups() -> Iterator[Path]:
    """Return this process's version-2 control group and its parents; none elsewhere."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        if line.startswith("0::/"):
            own = CGROUPS / line[4:]
            yield from (group for group in (own, *own.parents) if group.is_relative_to(CGROUPS))


def _read(path: Path) -> str:
    """Return a kernel file's text; "" if this group, or this kernel, has none of the name."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
