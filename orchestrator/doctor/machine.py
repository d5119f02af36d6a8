"""This machine: packages, memory and limits, accelerators and their drivers, file systems."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

from orchestrator.doctor.findings import BAD, GOOD, NOTE, Finding
from orchestrator.units import format_bytes, plural

# What the tests run with; constraints.txt has the same (a test compares them).
TESTED = {
    "hydra-core": "1.3.8",
    "omegaconf": "2.3.1",
    "submitit": "1.5.4",
    "torch": "2.13.0",
    "mindspore": "2.10.0",
}
NEEDED = ("hydra-core", "omegaconf", "submitit")
COLLECTIVES = re.compile(r"nvidia-nccl-.*|torch-npu")
FEW_FILES = 4096
LITTLE_SHARED = 1 << 30
LITTLE_ROOM = 5 << 30
SHARED = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cephfs", "ceph", "fuse.sshfs", "glusterfs"}
ASCEND = (Path("/usr/local/Ascend"), Path("/usr/local/Ascend/ascend-toolkit"))
COMMAND_S = 10.0


def packages() -> Iterator[Finding]:
    """Python and what runs depend on, beside the versions that were tested."""
    yield Finding(about="Python", found=f"{platform.python_version()} on {platform.platform()}")
    for name, tested in TESTED.items():
        version = _version(name)
        if version is None:
            needed = name in NEEDED
            yield Finding(
                about="packages",
                found=f"{name} is not installed here",
                state=BAD if needed else NOTE,
                do=f"pip install 'cluster-orchestrator[{name}]'"
                + " where ranks run, if jobs are written for it" * (not needed),
            )
        elif _release(version) != _release(tested):
            yield Finding(
                about="packages", found=f"{name} {version}, tested with {tested}", state=NOTE,
                do=f"if something is odd: pip install {name}=={tested}",
            )  # fmt: skip
        else:
            yield Finding(about="packages", found=f"{name} {version}, as tested")
    for package in importlib.metadata.distributions():
        if COLLECTIVES.fullmatch(name := package.metadata["Name"] or ""):
            yield Finding(about="packages", found=f"{name} {package.version}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> str:
    """Its first two numbers.

    >>> _release("2.13.0+cu128")
    '2.13'
    """
    return ".".join(version.split(".")[:2])


def limits() -> Iterator[Finding]:
    """Processors, memory, and limits of this shell that ranks inherit."""
    cores, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory()
    yield Finding(
        about="machine",
        found=f"{plural(cores, 'core')}, {format_bytes(memory.total)} of memory, "
        f"{format_bytes(memory.available)} free",
    )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < FEW_FILES:
        yield Finding(
            about="limits", found=f"a process may open {files} files", state=NOTE,
            do="ulimit -n 65536, or many ranks and loader workers run out of them",
        )  # fmt: skip
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if any(Path("/sys/class/infiniband").glob("*")) and locked != resource.RLIM_INFINITY:
        yield Finding(
            about="limits", found=f"{format_bytes(locked)} of memory may be locked", state=BAD,
            do="ulimit -l unlimited (PropagateResourceLimitsExcept=MEMLOCK in slurm.conf): RDMA "
            "wants locked memory, NCCL fails or falls back to TCP without",
        )  # fmt: skip
    shared = Path("/dev/shm")  # noqa: S108  # looked at, not written
    size = shutil.disk_usage(shared).total if shared.is_dir() else 0
    if size < LITTLE_SHARED:
        yield Finding(
            about="limits", found=f"{shared} has {format_bytes(size)}", state=NOTE,
            do="docker run --shm-size=8g, say: loader workers and NCCL pass data through it",
        )  # fmt: skip


def devices() -> Iterator[Finding]:
    """GPUs and NPUs, their drivers and toolkits."""
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*"))
    npus = sorted(path for path in Path("/dev").glob("davinci*") if path.name[7:].isdigit())
    if not gpus and not npus:
        yield Finding(
            about="devices", found="no GPU and no NPU on this machine: ranks compute on CPUs, "
            "over gloo (torch) or MCCL (MindSpore)", state=NOTE,
        )  # fmt: skip
    if gpus:
        yield from _nvidia(len(gpus))
    if npus:
        yield from _ascend(len(npus))


def _nvidia(count: int) -> Iterator[Finding]:
    asked = "--query-gpu=name,driver_version,memory.total"
    said = _said("nvidia-smi", asked, "--format=csv,noheader")
    if said is None:
        yield Finding(
            about="devices", found=f"{plural(count, 'NVIDIA GPU')}, but nvidia-smi does not answer",
            state=BAD, do="look at `nvidia-smi` and `dmesg`: the driver is not usable",
        )  # fmt: skip
    else:
        names = sorted(set(said.splitlines()))
        yield Finding(about="devices", found=f"{plural(count, 'NVIDIA GPU')}: {'; '.join(names)}")
    version = _version("torch")
    if version is not None and "+cpu" in version:
        yield Finding(
            about="devices", found=f"torch {version} is a build for CPUs", state=BAD,
            do="install torch's build for your CUDA: NCCL is in it",
        )  # fmt: skip


def _ascend(count: int) -> Iterator[Finding]:
    driver = _version_file(ASCEND[0] / "driver" / "version.info")
    cann = next((v for home in ASCEND for v in _toolkits(home)), None)
    yield Finding(
        about="devices",
        found=f"{plural(count, 'Ascend NPU')}, driver {driver or 'unknown'}, CANN "
        f"{cann or 'not found'} (HCCL is part of it)",
        state=GOOD if cann else BAD,
        do="" if cann else "source /usr/local/Ascend/ascend-toolkit/set_env.sh in cluster.setup",
    )


def _toolkits(home: Path) -> Iterator[str]:
    for path in sorted(home.glob("*/version.cfg"), reverse=True):
        if found := _version_file(path):
            yield found


def _version_file(path: Path) -> str | None:
    """The first number with dots in a file of versions."""
    try:
        found = re.search(r"\d+(\.[\w]+)+", path.read_text("utf-8", "replace"))
    except OSError:  # there is none, which is what is told
        return None
    return found[0] if found else None


def _said(*command: str) -> str | None:
    """What a command of the machine answers; None when it does not, or is not there."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def file_system(folder: Path) -> Iterator[Finding]:
    """Where runs are written: can it be written, has it room, is it one that nodes share?"""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(there, os.W_OK):
        yield Finding(
            about="runs", found=f"{there} cannot be written", state=BAD,
            do="go to a folder of your own, or run.dir=/where/there/is/room",
        )  # fmt: skip
    free = shutil.disk_usage(there).free
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    kind = next((mounts[at] for at in (there, *there.parents) if at in mounts), "unknown")
    shared = kind in SHARED
    yield Finding(
        about="runs",
        found=f"{folder} is on {kind}, {format_bytes(free)} free",
        state=GOOD if free >= LITTLE_ROOM else NOTE,
        do="" if free >= LITTLE_ROOM else "make room: a checkpoint is three times its parameters",
    )
    if not shared:
        yield Finding(
            about="runs", found=f"{kind} is mostly no file system that nodes share", state=NOTE,
            do="nothing for local runs; for several nodes choose run.dir on one that is, and try "
            "it with --run",
        )  # fmt: skip
