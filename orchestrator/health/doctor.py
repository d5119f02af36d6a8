"""`doctor`: what this machine and its cluster offer, and what would hurt runs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from orchestrator.agent.topology import (
    FABRIC_VARIABLES,
    INTERFACE_VARIABLE,
    address_of_interface,
    interface_variables,
    is_loopback,
    own_address,
)
from orchestrator.cli.follow import OutputOptions
from orchestrator.cli.start import begun, way_of
from orchestrator.clusters.slurm.admission import PARTITIONS, read_partitions
from orchestrator.config.command_line import CommandLine, program_overrides
from orchestrator.config.composer import Composer
from orchestrator.errors import ClusterError, UsageError
from orchestrator.health import exchange
from orchestrator.rundir.files import read_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import read_metrics
from orchestrator.rundir.outcome import describe_culprit
from orchestrator.slurm_client import NoClient, SlurmClient
from orchestrator.units import format_bytes, format_seconds, plural

GOOD, NOTE, BAD = "good", "note", "bad"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        about: what it belongs to: "SLURM", "devices", ...
        found: what is there, in a sentence.
        state: `GOOD`; `NOTE`, where it is worth knowing; `BAD`, where runs suffer from it.
        do: what to do; "" where nothing is to be done.
    """

    about: str
    found: str
    state: str = GOOD
    do: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Check = Callable[[], Iterable[Finding]]


def findings_of(checks: Iterable[Check]) -> Iterator[Finding]:
    """Yield the findings of the checks, in their order."""
    for check in checks:
        yield from check()


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
    """Report Python and the packages that runs depend on, with the tested versions."""
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
    """Return the first two numbers of a version.

    >>> _release("2.13.0+cu128")
    '2.13'
    """
    return ".".join(version.split(".")[:2])


def limits() -> Iterator[Finding]:
    """Report processors, memory, and limits of this shell that ranks inherit."""
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
    """Report GPUs and NPUs, their drivers and toolkits."""
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
    """Return the first number with dots in a file of versions."""
    try:
        found = re.search(r"\d+(\.[\w]+)+", path.read_text("utf-8", "replace"))
    except OSError:  # there is none, which is what is told
        return None
    return found[0] if found else None


def _said(*command: str) -> str | None:
    """Return the output of a command; None if it fails or does not exist."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def file_system(folder: Path) -> Iterator[Finding]:
    """Report on the file system of runs: is it writable, has it room, do nodes share it?"""
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


DECIDING = (
    *FABRIC_VARIABLES, INTERFACE_VARIABLE, "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET",
    "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_DEBUG", "HCCL_IF_IP", "TP_SOCKET_IFNAME",
)  # fmt: skip
NAME_IT = "cluster.interface=eth0, say: gloo, NCCL and HCCL are told of it, on every node"


def network() -> Iterator[Finding]:
    """Report interfaces with an address, the default one, and variables that change it."""
    there = interfaces()
    told = ", ".join(f"{name} {' '.join(found)}" for name, found in there.items())
    yield Finding(about="network", found=f"interfaces: {told}")
    yield from _variables(os.environ)
    node = socket.gethostname()
    try:
        address = own_address(os.environ, node=node, node_index=0, nodes=1)
    except UsageError as error:
        yield Finding(about="network", found=str(error), state=BAD, do=NAME_IT)
        return
    gloo = os.environ.get("GLOO_SOCKET_IFNAME") or interface_variables({}, address).get(
        "GLOO_SOCKET_IFNAME", "unknown"
    )
    yield Finding(about="network", found=f"gloo would take {gloo} ({address}) for one node")
    nccl = os.environ.get("NCCL_SOCKET_IFNAME") or nccl_choice(there)
    yield Finding(
        about="network", found=f"NCCL would take {nccl or 'none'} where it finds no fabric",
        **({} if nccl else {"state": NOTE, "do": NAME_IT}),
    )  # fmt: skip
    if is_loopback(address) and any(name != "lo" for name in there):
        yield Finding(
            about="network",
            found=f"the name {node} means {address} here, which no other node reaches", state=NOTE,
            do="nothing where SLURM starts ranks: the route to the other nodes decides there. By "
            f"hand: {NAME_IT}",
        )  # fmt: skip


def _variables(env: Mapping[str, str]) -> Iterator[Finding]:
    for name in DECIDING:
        if not (value := env.get(name)):
            continue
        wrong = ""
        if name.endswith("SOCKET_IFNAME") and not value.startswith("^"):
            try:
                address_of_interface(value, "this machine")
            except UsageError as error:
                wrong = str(error).partition(": ")[2]
        yield Finding(
            about="network", found=f"{name}={value} is set" + f", but {wrong}" * bool(wrong),
            state=BAD if wrong else NOTE,
            do=f"unset {name}, or correct it" if wrong else "ranks inherit it; unset it to let the "
            "framework choose",
        )  # fmt: skip


def interfaces() -> dict[str, list[str]]:
    """Return the interfaces that are up, with their addresses."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return {
        name: [e.address for e in entries if e.family == socket.AF_INET]
        or [e.address for e in entries if e.family == socket.AF_INET6]
        for name, entries in sorted(psutil.net_if_addrs().items())
        if name in up and any(e.family in (socket.AF_INET, socket.AF_INET6) for e in entries)
    }


def nccl_choice(there: Mapping[str, object]) -> str | None:
    """Choose in NCCL's own order (its documentation of NCCL_SOCKET_IFNAME): ib first, docker and lo
    last.

    >>> nccl_choice(["docker0", "lo", "eth1", "eth0"]), nccl_choice(["eth0", "ib0"])
    ('eth0', 'ib0')
    >>> nccl_choice(["lo"])
    'lo'
    """

    def order(name: str) -> tuple[int, str]:
        place = 0 if name.startswith("ib") else 2 if name.startswith("docker") else 1
        return (3 if name == "lo" else place), name

    return min(there, key=order, default=None)


COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo", "sacct")
TESTED_SLURM = "22.05"
LONG_CRED_S = 30  # what a requeued job may wait before it starts again, without a word
LONG_SILENCE_S = 60
SHORT_MEMORY_S = 300
Settings = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Hurts:
    """A setting that hurts: `when` it does, what that means, what its administrator can do."""

    when: Callable[[Settings], bool]
    means: str
    do: str
    state: str = NOTE


def _number(settings: Settings, key: str, default: float) -> float:
    found = re.match(r"\d+", settings.get(key, ""))
    return float(found[0]) if found else default


def _cred_expire_s(settings: Settings) -> float:
    found = re.search(r"cred_expire=(\d+)", settings.get("AuthInfo", ""))
    return float(found[1]) if found else 120.0


def _preempts(settings: Settings) -> bool:
    return settings.get("PreemptType", "preempt/none") not in ("preempt/none", "(null)")


HURTING = (
    Hurts(
        lambda s: s.get("JobRequeue") == "0",
        "JobRequeue=0: a preempted job, or one whose node failed, is not queued again by itself",
        "cluster.requeue=true asks for it; `resume` goes on where it does not help",
    ),
    Hurts(
        lambda s: _cred_expire_s(s) > LONG_CRED_S,
        "a requeued job waits up to two minutes before it starts again (AuthInfo's cred_expire)",
        "ask for AuthInfo=cred_expire=5 in slurm.conf (1 is refused)",
    ),
    Hurts(
        lambda s: s.get("EnforcePartLimits", "NO") == "NO",
        "EnforcePartLimits=NO: sbatch takes jobs that can never start, and they wait for ever",
        "nothing: they are compared with the partitions' limits before they are submitted",
    ),
    Hurts(
        lambda s: _number(s, "SlurmdTimeout", 300) > LONG_SILENCE_S,
        "SLURM takes more than a minute to notice that a node is gone (SlurmdTimeout)",
        "nothing: the ranks' own heartbeats notice after cluster.heartbeat_timeout_s",
    ),
    Hurts(
        lambda s: (
            _preempts(s) and "preempt_send_user_signal" not in s.get("SlurmctldParameters", "")
        ),
        "a preempted job is sent SIGTERM alone, not the signal that it asked for",
        "nothing: ranks heed both",
    ),
    Hurts(
        lambda s: "none" in s.get("AccountingStorageType", "none"),
        "there is no accounting: sacct does not say how a job ended",
        "nothing: the run folder says it",
    ),
    Hurts(
        lambda s: "none" in s.get("TaskPlugin", "none"),
        "TaskPlugin=task/none: ranks are not kept to their own cores or memory",
        "ask for TaskPlugin=task/cgroup,task/affinity",
    ),
    Hurts(
        lambda s: "linuxproc" in s.get("ProctrackType", "") or "pgid" in s.get("ProctrackType", ""),
        "a process that leaves its group may outlive its job (ProctrackType)",
        "ask for ProctrackType=proctrack/cgroup",
    ),
    Hurts(
        lambda s: _number(s, "MinJobAge", 300) < SHORT_MEMORY_S,
        "squeue forgets ended jobs within five minutes (MinJobAge)",
        "nothing: sacct or the run folder is asked then",
    ),
    Hurts(
        lambda s: _number(s, "KillWait", 30) < 10,
        "between SIGTERM and SIGKILL there are less than 10 s (KillWait)",
        "keep checkpoints quick, or windows short: fewer accumulation.steps",
    ),
)


def slurm(slurm_conf: str | None = None) -> Iterator[Finding]:
    """Report the cluster's settings; one note on a machine without SLURM.

    Args:
        slurm_conf: of another cluster than the machine's own.
    """
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if len(missing) == len(COMMANDS):
        yield Finding(
            about="SLURM", found="none of its commands is on this machine", state=NOTE,
            do="runs are local; +cluster=slurm works on a login node, and `python -m slurm up` "
            "makes a development cluster here",
        )  # fmt: skip
        return
    if missing:
        yield Finding(
            about="SLURM", found=f"there is no {' and no '.join(missing)}", state=BAD,
            do="install SLURM's client commands, or add their folder to PATH",
        )  # fmt: skip
    try:
        client = SlurmClient(slurm_conf)
        shown = client.must("scontrol", "show", "config")
        partitions = client.must(*PARTITIONS)
    except ClusterError as error:
        gone = not isinstance(error, NoClient)  # whose sentence says what to do
        yield Finding(
            about="SLURM", found=str(error), state=BAD if gone else NOTE,
            do="`sinfo` has to answer in this shell" if gone else "",
        )  # fmt: skip
        return
    yield from from_settings(read_settings(shown))
    yield from _partitions(partitions)


def read_settings(shown: str) -> dict[str, str]:
    r"""RParse `scontrol show config`.

    >>> read_settings("KillWait                = 30 sec\nClusterName = one\n")
    {'KillWait': '30 sec', 'ClusterName': 'one'}
    """
    lines = (line.partition("=") for line in shown.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in lines}


def from_settings(settings: Settings) -> Iterator[Finding]:
    """Report the cluster's name, version and limits, and each setting that hurts."""
    version = settings.get("SLURM_VERSION", "unknown")
    tested = version.startswith(f"{TESTED_SLURM}.")
    yield Finding(
        about="SLURM",
        found=f"cluster {settings.get('ClusterName', '?')}, version {version}"
        + f", tested with {TESTED_SLURM}" * (not tested),
        state="good" if tested else NOTE,
        do=""
        if tested
        else "if something is odd: python -m orchestrator plan +cluster=slurm "
        "shows the batch script and what the scheduler says of it",
    )
    yield Finding(
        about="SLURM",
        found=f"arrays up to {_number(settings, 'MaxArraySize', 1001) - 1:.0f}, "
        f"{_number(settings, 'MaxJobCount', 10000):.0f} jobs at once",
    )
    for one in HURTING:
        if one.when(settings):
            yield Finding(about="SLURM", found=one.means, state=one.state, do=one.do)


def _partitions(text: str) -> Iterator[Finding]:
    known = read_partitions(text).values()
    for one in known:
        limit = "no time limit" if one.minutes is None else f"{one.minutes:g} minutes"
        yield Finding(
            about="partitions",
            found=f"{one.name}{' (default)' * one.is_default}: {one.nodes} nodes, {limit}, "
            f"{one.state}",
            state="good" if one.open else NOTE,
            do="" if one.open else "cluster.partition= another one",
        )
    if not any(one.is_default for one in known):
        yield Finding(
            about="partitions", found="no partition is the default", state=NOTE,
            do="name one: cluster.partition=",
        )  # fmt: skip


LITTLE_MEMORY = 256 << 20
LITTLE_SCRATCH = 16 << 20
DEVICE_TAKEN = 0.25  # of a device's memory, by other processes
CLOCK_S = 5.0
SLOWER = 4.0  # a node is slow if its best link has less than the median's bandwidth divided by this
LEAST_NODES = 3  # from which on a median tells which node is slow


def run_trial(overrides: Sequence[str], output: OutputOptions) -> Iterator[Finding]:
    """Start it where `overrides` say, wait for its end, and tell what it measured.

    Raises what a launch raises: what was asked for cannot be had.
    """
    given = (*overrides, *program_overrides([str(Path(exchange.__file__))], beside=overrides))
    if not any(one.startswith("run.dir=") for one in given):
        given += (f"run.dir=runs/doctor_{datetime.now(UTC):%Y-%m-%d_%H-%M-%S}",)
    own = ("run.watch=true", "run.snapshot=false")
    config = Composer(CommandLine(overrides=(*given, *own))).compose().config()
    with begun(config, output, overrides=given) as ready:
        ended = way_of(ready.cluster)(ready)
    yield from trial_findings(RunDir(Path(config.run.dir or "")), ended.exit_code)


def trial_findings(run: RunDir, exit_code: int) -> Iterator[Finding]:
    """Report what a trial run measured of its nodes."""
    plan, result = run.read_plan(), run.read_result() or {}
    where = f"{plural(plan.get('ranks') or 0, 'rank')} on {plural(plan.get('nodes') or 0, 'node')}"
    if exit_code:
        culprit = result.get("culprit")
        why = describe_culprit(culprit) if culprit else f"exit code {exit_code}"
        yield Finding(
            about="collective", found=f"{where}: {why}", state=BAD,
            do=f"python -m orchestrator logs {run.path}; name the network: cluster.interface=",
        )  # fmt: skip
        return
    yield Finding(about="runs", found=f"{run.path} was written here and read on {where}, and back")
    yield from _nodes(read_json(run.attempt(0) / exchange.NODES_FILE) or {})
    for record in read_metrics(run.metrics).updates:
        figures = record["metrics"]
        yield Finding(
            about="collective",
            found=f"{figures['mib']:g} MiB summed over {where}: "
            f"{format_seconds(figures['seconds'])}, {figures['gigabytes_per_s']:.3g} GB/s a rank",
            state="good" if not record["loss"] else BAD,
            do=""
            if not record["loss"]
            else "the sum is wrong: this network or library corrupts "
            "data; try another transport, and look at the nodes' logs",
        )


def _nodes(measured: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what was measured of each node, then what is wrong with it."""
    nodes = measured.get("nodes", ())
    for one in nodes:
        rate = one["bytes_per_s"]
        speed = f", {format_bytes(rate)}/s to and from other nodes" if rate else ""
        yield Finding(
            about="nodes",
            found=f"{one['node']}: {format_bytes(one['memory'])} of memory free, meets the others "
            f"on {one['interface'] or one['address']}{speed}, its clock {one['clock_s']:+.1f} s",
        )
    yield from node_faults(nodes, measured.get("damaged", ()))


def node_faults(
    nodes: Sequence[Mapping[str, Any]], damaged: Sequence[Sequence[str]]
) -> Iterator[Finding]:
    """Yield the faults of nodes.

    Args:
        nodes: as `exchange.measure_nodes` returns them.
        damaged: pairs of nodes (sender, receiver) between which data came damaged.
    """
    involved = Counter(name for pair in damaged for name in set(pair))
    if involved:
        name, count = min(involved.items(), key=lambda item: (-item[1], item[0]))
        why = f"data that it sent or received came damaged over {count} of {len(damaged)} links"
        yield _fault(name, why, BAD)
    rates = [one["bytes_per_s"] for one in nodes if one["bytes_per_s"] is not None]
    usual = median(rates) if len(rates) >= LEAST_NODES else 0.0
    for one in nodes:
        if one["memory"] < LITTLE_MEMORY:
            yield _fault(one["node"], f"{format_bytes(one['memory'])} of memory are free", BAD)
        if one["scratch"] < LITTLE_SCRATCH:
            room = one["scratch"]
            state = "cannot be written" if room < 0 else f"has {format_bytes(room)} free"
            yield _fault(one["node"], f"its folder for temporary files (TMPDIR) {state}", BAD)
        if one["device_taken"] > DEVICE_TAKEN:
            taken = f"{one['device_taken']:.0%} of a device's memory are taken by other processes"
            yield _fault(one["node"], taken)
        if abs(one["clock_s"]) > CLOCK_S:
            yield _fault(one["node"], f"its clock is {one['clock_s']:+.1f} s off the median")
        if one["bytes_per_s"] is not None and one["bytes_per_s"] * SLOWER < usual:
            where = f"{one['interface']} ({one['address']})" if one["interface"] else one["address"]
            yield _fault(
                one["node"],
                f"its network is slow: {format_bytes(one['bytes_per_s'])}/s, where the median is "
                f"{format_bytes(usual)}/s; it meets the others on {where}",
            )


def _fault(node: str, why: str, state: str = NOTE) -> Finding:
    do = f"leave it out with cluster.exclude={node}, and report it to its administrator"
    return Finding(about="nodes", found=f"{node}: {why}", state=state, do=do)
