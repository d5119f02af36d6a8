"""`doctor`: the resources of this machine or its cluster, and settings that would hurt runs."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from orchestrator.agent.topology import (
    FABRIC_VARIABLES,
    GLOO_INTERFACE,
    INTERFACE_VARIABLE,
    interface_of,
    is_loopback,
    own_address,
)
from orchestrator.clusters.slurm.scheduler import DEVELOPMENT_CLUSTER, NoClient, SlurmClient
from orchestrator.config.command_line import program_overrides
from orchestrator.config.composer import compose
from orchestrator.config.frameworks import facts_of
from orchestrator.errors import ClusterError, UsageError
from orchestrator.health import exchange
from orchestrator.machine import npu_count
from orchestrator.plugins import FRAMEWORK_FACTS
from orchestrator.report.terminal import command
from orchestrator.rundir.files import read_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import read_metrics
from orchestrator.rundir.outcome import describe_end
from orchestrator.runs.follow import OutputOptions, start_run
from orchestrator.runs.start import prepared_run, stated_folder
from orchestrator.units import format_bytes, format_count, format_seconds, plural

GOOD, NOTE, BAD = "good", "note", "bad"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check.

    Attributes:
        subject: "SLURM", "devices", …
        text: the finding, in a sentence.
        state: `GOOD`; `NOTE` if it is worth knowing; `BAD` if runs suffer from it.
        remedy: the advice; "" without one.
    """

    subject: str
    text: str
    state: str = GOOD
    remedy: str = ""


# The versions that the tests run with; constraints.txt has the same (a test compares them).
TESTED = {
    "hydra-core": "1.3.8",
    "omegaconf": "2.3.1",
    "submitit": "1.5.4",
}
NEEDED = ("hydra-core", "omegaconf", "submitit")
COLLECTIVES = re.compile(r"nvidia-nccl-.*|torch-npu")


def tested_versions() -> dict[str, str]:
    """Return the tested version of each package, those of present frameworks included."""
    frameworks = map(facts_of, FRAMEWORK_FACTS.names())
    return TESTED | {facts.package: facts.tested_version for facts in frameworks if facts.package}


def packages() -> Iterator[CheckResult]:
    """Report Python and the packages that runs depend on, with the tested versions."""
    yield CheckResult("Python", f"{platform.python_version()} on {platform.platform()}")
    for name, tested in tested_versions().items():
        version = _version(name)
        install = f"pip install {name}=={tested}"
        if version is None:
            optional = name not in NEEDED
            remedy = f"{install} where ranks run{', if jobs are written for it' * optional}"
            state = NOTE if optional else BAD
            yield CheckResult("packages", f"{name} is not installed here", state, remedy)
        elif version.split(".")[:2] == tested.split(".")[:2]:
            yield CheckResult("packages", f"{name} {version}, as tested")
        else:
            remedy = f"if something is odd: {install}"
            yield CheckResult("packages", f"{name} {version}, tested with {tested}", NOTE, remedy)
    for package in importlib.metadata.distributions():
        if COLLECTIVES.fullmatch(name := package.metadata["Name"] or ""):
            yield CheckResult("packages", f"{name} {package.version}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


LITTLE_SHARED = 1 << 30
UNLIMITED_ON_NODES = (
    "ulimit -S {} before the launch; SLURM gives jobs the limits of the submitting shell, except "
    "with cluster.slurm_flags.propagate=NONE"
)
# Soft limits, the least that runs get along with, the option of ulimit, and what is limited.
LEAST_LIMITS: tuple[tuple[int, float, str, str], ...] = (
    (resource.RLIMIT_AS, math.inf, "-v unlimited", "bytes of addresses; CUDA reserves many more"),
    (resource.RLIMIT_DATA, math.inf, "-d unlimited", "bytes of data"),
    (resource.RLIMIT_NOFILE, 1024, "-n 65536", "open files and sockets"),
    (resource.RLIMIT_NPROC, 512, "-u 4096", "processes and threads of all of yours"),
)


def limits() -> Iterator[CheckResult]:
    """Report processors, memory, and limits of this shell that ranks inherit."""
    cores, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory()
    total, free = format_bytes(memory.total), format_bytes(memory.available)
    yield CheckResult("machine", f"{plural(cores, 'core')}, {total} of memory, {free} free")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if any(Path("/sys/class/infiniband").glob("*")) and locked != resource.RLIM_INFINITY:
        yield CheckResult(
            "limits",
            f"{format_bytes(locked)} of memory may be locked",
            BAD,
            "ulimit -l unlimited (PropagateResourceLimitsExcept=MEMLOCK in slurm.conf): RDMA "
            "wants locked memory, NCCL fails or falls back to TCP without",
        )
    for limit, least, option, what in LEAST_LIMITS:
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and soft < least:
            text = f"a process may have {format_count(soft)} {what}"
            yield CheckResult("limits", text, BAD, UNLIMITED_ON_NODES.format(option))
    shared = Path("/dev/shm")  # noqa: S108  # only its size is read
    size = shutil.disk_usage(shared).total if shared.is_dir() else 0
    if size < LITTLE_SHARED:
        remedy = "docker run --shm-size=8g, say: loader workers and NCCL pass data through it"
        yield CheckResult("limits", f"{shared} has {format_bytes(size)}", NOTE, remedy)


ASCEND = Path("/usr/local/Ascend")
COMMAND_S = 10.0


def devices() -> Iterator[CheckResult]:
    """Report GPUs and NPUs, their drivers and toolkits."""
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    npus = npu_count()
    if not gpus and not npus:
        yield CheckResult(
            "devices",
            "no GPU and no NPU on this machine: ranks compute on CPUs, over gloo (torch) or MCCL "
            "(MindSpore)",
            NOTE,
        )
    if gpus:
        query = ("--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
        count, answer = plural(gpus, "NVIDIA GPU"), _output("nvidia-smi", *query)
        if answer is None:
            remedy = "look at `nvidia-smi` and `dmesg`: the driver is not usable"
            yield CheckResult("devices", f"{count}, but nvidia-smi does not answer", BAD, remedy)
        else:
            yield CheckResult("devices", f"{count}: {'; '.join(sorted(set(answer.splitlines())))}")
        if "+cpu" in (torch := _version("torch") or ""):
            remedy = "install torch's build for your CUDA: NCCL is in it"
            yield CheckResult("devices", f"torch {torch} is a build for CPUs", BAD, remedy)
    if npus:
        driver = _version_in([ASCEND / "driver/version.info"]) or "unknown"
        toolkits = sorted(ASCEND.glob("*/version.cfg")) + sorted(ASCEND.glob("*/*/version.cfg"))
        cann = _version_in(reversed(toolkits))
        description = f"{plural(npus, 'Ascend NPU')}, driver {driver}, CANN {cann or 'not found'}"
        remedy = "source /usr/local/Ascend/ascend-toolkit/set_env.sh in cluster.preamble"
        state = (GOOD, "") if cann else (BAD, remedy)
        yield CheckResult("devices", f"{description} (HCCL is part of it)", *state)


def _version_in(paths: Iterable[Path]) -> str | None:
    """Return the first number with dots in the first of these files that has one."""
    for path in paths:
        if path.is_file() and (match := re.search(r"\d+(\.\w+)+", path.read_text("utf-8"))):
            return match[0]
    return None


def _output(*command: str) -> str | None:
    """Return the output of a command; None if it fails or does not exist."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


LITTLE_ROOM = 5 << 30
SHARED = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cephfs", "ceph", "fuse.sshfs", "glusterfs"}


def file_system(folder: Path) -> Iterator[CheckResult]:
    """Report whether the file system of runs is writable, has room, and is shared by nodes."""
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(parent, os.W_OK):
        remedy = "go to a folder of your own, or run.dir=/where/there/is/room"
        yield CheckResult("runs", f"{parent} cannot be written", BAD, remedy)
    free = shutil.disk_usage(parent).free
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    kind = next((mounts[at] for at in (parent, *parent.parents) if at in mounts), "unknown")
    room = (GOOD, "")
    if free < LITTLE_ROOM:
        room = (NOTE, "make room: a checkpoint is three times its parameters")
    yield CheckResult("runs", f"{folder} is on {kind}, {format_bytes(free)} free", *room)
    if kind not in SHARED:
        yield CheckResult(
            "runs",
            f"{kind} is mostly no file system that nodes share",
            NOTE,
            "nothing for local runs; for several nodes choose run.dir on one that is, and try it "
            "with --run",
        )


NETWORK_VARIABLES = (
    *FABRIC_VARIABLES,
    INTERFACE_VARIABLE,
    *("NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"),
    *("NCCL_DEBUG", "HCCL_IF_IP", "TP_SOCKET_IFNAME"),
)
NAME_IT = "cluster.interface=eth0, say: gloo, NCCL and HCCL get it, on every node"


def network() -> Iterator[CheckResult]:
    """Report interfaces with an address, the default one, and variables that change it."""
    there = interfaces()
    listed = ", ".join(f"{name} {' '.join(addresses)}" for name, addresses in there.items())
    yield CheckResult("network", f"interfaces: {listed}")
    for name in NETWORK_VARIABLES:
        if value := os.environ.get(name):
            remedy = "ranks inherit it; unset it to let the framework choose"
            yield CheckResult("network", f"{name}={value} is set", NOTE, remedy)
    node = socket.gethostname()
    try:
        address = own_address(os.environ, node=node, node_index=0, nodes=1)
    except UsageError as error:
        yield CheckResult("network", str(error), BAD, NAME_IT)
        return
    gloo = os.environ.get(GLOO_INTERFACE) or interface_of(address) or "unknown"
    yield CheckResult("network", f"gloo would take {gloo} ({address}) for one node")
    nccl = os.environ.get("NCCL_SOCKET_IFNAME") or nccl_choice(there)
    state = (GOOD, "") if nccl else (NOTE, NAME_IT)
    yield CheckResult(
        "network", f"NCCL would take {nccl or 'none'} where it finds no fabric", *state
    )
    if is_loopback(address) and any(name != "lo" for name in there):
        yield CheckResult(
            "network",
            f"the name {node} means {address} here, which no other node reaches",
            NOTE,
            "nothing where SLURM starts ranks: the route to the other nodes decides there. By "
            f"hand: {NAME_IT}",
        )


def interfaces() -> dict[str, list[str]]:
    """Return the interfaces that are up, with their addresses."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return {
        name: [e.address for e in entries if e.family == socket.AF_INET]
        or [e.address for e in entries if e.family == socket.AF_INET6]
        for name, entries in sorted(psutil.net_if_addrs().items())
        if name in up and any(e.family in (socket.AF_INET, socket.AF_INET6) for e in entries)
    }


def nccl_choice(there: Iterable[str]) -> str | None:
    """Choose in NCCL's own order (its documentation of NCCL_SOCKET_IFNAME): ib first, docker and lo
    last.

    >>> nccl_choice(["docker0", "lo", "eth1", "eth0"]), nccl_choice(["eth0", "ib0"])
    ('eth0', 'ib0')
    >>> nccl_choice(["lo"])
    'lo'
    """

    def order(name: str) -> tuple[int, str]:
        group = 0 if name.startswith("ib") else 2 if name.startswith("docker") else 1
        return (3 if name == "lo" else group), name

    return min(there, key=order, default=None)


COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo", "sacct")
TESTED_SLURM = "22.05"
Settings = Mapping[str, str]


def _number(settings: Settings, key: str, default: float, pattern: str = r"^(\d+)") -> float:
    match = re.search(pattern, settings.get(key, ""))
    return float(match[1]) if match else default


# Settings that hurt: the condition, its effect, and the remedy of an administrator or a user.
HURTFUL: tuple[tuple[Callable[[Settings], bool], str, str], ...] = (
    (
        lambda s: s.get("JobRequeue") == "0",
        "JobRequeue=0: a preempted job, or one whose node failed, is not queued again by itself",
        "cluster.requeue=true asks for it; `resume` goes on where it does not help",
    ),
    (
        lambda s: _number(s, "AuthInfo", 120, r"cred_expire=(\d+)") > 30,
        "a requeued job waits up to two minutes before it starts again (AuthInfo's cred_expire)",
        "nothing needs to be done: this is normal",
    ),
    (
        lambda s: "none" in s.get("TaskPlugin", "none"),
        "TaskPlugin=task/none: ranks are not kept to their own cores or memory",
        "ask for TaskPlugin=task/cgroup,task/affinity",
    ),
    (
        lambda s: "linuxproc" in s.get("ProctrackType", "") or "pgid" in s.get("ProctrackType", ""),
        "a process that leaves its group may outlive its job (ProctrackType)",
        "ask for ProctrackType=proctrack/cgroup",
    ),
    (
        lambda s: _number(s, "KillWait", 30) < 10,
        "between SIGTERM and SIGKILL there are less than 10 s (KillWait)",
        "keep checkpoints quick, or windows short: fewer accumulation.steps",
    ),
)


def slurm(slurm_conf: str | None = None) -> Iterator[CheckResult]:
    """Report the cluster's settings; one note on a machine without SLURM.

    Args:
        slurm_conf: of another cluster than the machine's own.
    """
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if len(missing) == len(COMMANDS):
        yield CheckResult(
            "SLURM",
            "none of its commands is on this machine",
            NOTE,
            f"runs are local; +cluster=slurm works on a login node{DEVELOPMENT_CLUSTER}",
        )
        return
    if missing:
        remedy = "install SLURM's client commands, or add their folder to PATH"
        yield CheckResult("SLURM", f"there is no {' and no '.join(missing)}", BAD, remedy)
    try:
        client = SlurmClient(slurm_conf)
        settings = client.settings()
    except NoClient as error:  # its sentence says what to do
        yield CheckResult("SLURM", str(error), NOTE)
    except ClusterError as error:
        yield CheckResult("SLURM", str(error), BAD, "`sinfo` has to answer in this shell")
    else:
        yield from from_settings(settings)


def from_settings(settings: Settings) -> Iterator[CheckResult]:
    """Report the cluster's name and version, and each setting that hurts.

    Args:
        settings: of `scontrol show config`.
    """
    version = settings.get("SLURM_VERSION", "unknown")
    description = f"cluster {settings.get('ClusterName', '?')}, version {version}"
    if version.startswith(f"{TESTED_SLURM}."):
        yield CheckResult("SLURM", description)
    else:
        yield CheckResult(
            "SLURM",
            f"{description}, tested with {TESTED_SLURM}",
            NOTE,
            "if something is odd: python -m orchestrator plan +cluster=slurm shows the batch "
            "script and what the scheduler says of it",
        )
    for hurts, means, remedy in HURTFUL:
        if hurts(settings):
            yield CheckResult("SLURM", means, NOTE, remedy)


LITTLE_MEMORY = 256 << 20
LITTLE_SCRATCH = 16 << 20
DEVICE_TAKEN = 0.25  # of a device's memory, by other processes
CLOCK_S = 5.0
SLOWER = 4.0  # a node is slow if its better link has less than the median's bandwidth by this
LEAST_NODES = 3  # from which on a median tells which node is slow


def run_trial(
    overrides: Sequence[str], output: OutputOptions, config_dir: str | None = None
) -> Iterator[CheckResult]:
    """Run the trial program as `overrides` say, wait for its end, and report its measurements.

    Raises the errors of a launch.
    """
    run_overrides = (
        *overrides,
        *program_overrides([str(Path(exchange.__file__))], before=overrides),
    )
    if not any(override.startswith("run.dir=") for override in run_overrides):
        run_overrides += (f"run.dir=runs/doctor_{datetime.now(UTC):%Y-%m-%d_%H-%M-%S}",)
    own = ("run.watch=true", "run.snapshot=false")
    config = compose((*run_overrides, *own), config_dir)
    with prepared_run(config, output, overrides=run_overrides) as ready:
        code = start_run(ready)
    yield from trial_findings(ready.run, code)


def trial_findings(run: RunDir, exit_code: int) -> Iterator[CheckResult]:
    """Report the measurements of a trial run."""
    plan, result = run.read_plan(), run.read_result() or {}
    where = f"{plural(plan.get('ranks') or 0, 'rank')} on {plural(plan.get('nodes') or 0, 'node')}"
    if exit_code:
        why = describe_end(result) or f"exit code {exit_code}"
        remedy = f"{command('logs', run.path)}; name the network: cluster.interface="
        yield CheckResult("collective", f"{where}: {why}", BAD, remedy)
        return
    yield CheckResult("runs", f"{run.path} was written here and read on {where}, and back")
    measured = read_json(run.attempt(run.latest_attempt) / exchange.NODES_FILE) or {}
    for entry in measured.get("nodes", ()):
        rate = entry["bytes_per_s"]
        speed = f", {format_bytes(rate)}/s to and from other nodes" if rate else ""
        yield CheckResult(
            "nodes",
            f"{entry['node']}: {format_bytes(entry['memory'])} of memory free, meets the others on "
            f"{entry['interface'] or entry['address']}{speed}, its clock {entry['clock_s']:+.1f} s",
        )
    yield from node_faults(measured.get("nodes", ()), measured.get("damaged", ()))
    for record in read_metrics(run.metrics).updates:
        figures = record["metrics"]
        rate = f"{format_seconds(figures['seconds'])}, {figures['gigabytes_per_s']:.3g} GB/s a rank"
        remedy = (
            "the sum is wrong: this network or library corrupts data; try another transport, and "
            "look at the nodes' logs"
        )
        state = (BAD, remedy) if record["loss"] else (GOOD, "")
        yield CheckResult(
            "collective", f"{figures['mib']:g} MiB summed over {where}: {rate}", *state
        )


def node_faults(
    nodes: Sequence[Mapping[str, Any]], damaged: Sequence[Sequence[str]]
) -> Iterator[CheckResult]:
    """Report the faults of nodes.

    Args:
        nodes: as `exchange.measure_nodes` returns them.
        damaged: pairs of nodes (sender, receiver) between which data came damaged.
    """
    for sender, receiver in damaged:
        yield _fault(sender, f"data that it sent to {receiver} came damaged", BAD)
    rates = [entry["bytes_per_s"] for entry in nodes if entry["bytes_per_s"] is not None]
    usual = median(rates) if len(rates) >= LEAST_NODES else 0.0
    for entry in nodes:
        node, room, rate = entry["node"], entry["scratch"], entry["bytes_per_s"]
        if entry["memory"] < LITTLE_MEMORY:
            yield _fault(node, f"{format_bytes(entry['memory'])} of memory are free", BAD)
        if room < LITTLE_SCRATCH:
            state = "cannot be written" if room < 0 else f"has {format_bytes(room)} free"
            yield _fault(node, f"its folder for temporary files (TMPDIR) {state}", BAD)
        if entry["device_taken"] > DEVICE_TAKEN:
            taken = f"{entry['device_taken']:.0%} of a device's memory are taken by other processes"
            yield _fault(node, taken)
        if abs(entry["clock_s"]) > CLOCK_S:
            yield _fault(node, f"its clock is {entry['clock_s']:+.1f} s off the median")
        if rate is not None and rate * SLOWER < usual:
            where = (
                f"{entry['interface']} ({entry['address']})"
                if entry["interface"]
                else entry["address"]
            )
            yield _fault(
                node,
                f"its network is slow: {format_bytes(rate)}/s, where the median is "
                f"{format_bytes(usual)}/s; it meets the others on {where}",
            )


def _fault(node: str, why: str, state: str = NOTE) -> CheckResult:
    remedy = f"leave it out with cluster.exclude={node}, and report it to its administrator"
    return CheckResult("nodes", f"{node}: {why}", state, remedy)


def check_machine(
    *overrides: str, config_dir: str | None = None, trial: OutputOptions | None = None
) -> Iterator[CheckResult]:
    """Yield the results of all checks of this machine or its cluster, as `doctor` prints them.

    Args:
        overrides: as for a launch: `"+cluster=slurm"`.
        config_dir: a folder of the user's own configuration.
        trial: also sum tensors on the real nodes, with this output.

    Raises:
        ConfigError: an override is wrong.
    """
    config = compose(overrides, config_dir)
    yield from packages()
    yield from limits()
    yield from devices()
    yield from network()
    yield from file_system(stated_folder(config.run.dir or "runs"))
    yield from slurm(config.cluster.slurm_conf)
    if trial is not None:
        yield from run_trial(overrides, trial, config_dir)
