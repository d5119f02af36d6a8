"""SLURM as it is seen from here: its commands, its partitions, settings that hurt runs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from orchestrator.clusters.slurm.admission.partitions import PARTITIONS, read_partitions
from orchestrator.doctor.findings import BAD, NOTE, Finding
from orchestrator.errors import ClusterError
from orchestrator.scheduler.client import NoClient, SlurmClient

COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo", "sacct")
TESTED = "22.05"
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
    """What the cluster says of itself; one note on a machine without any.

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
    r"""`scontrol show config` as values.

    >>> read_settings("KillWait                = 30 sec\nClusterName = one\n")
    {'KillWait': '30 sec', 'ClusterName': 'one'}
    """
    lines = (line.partition("=") for line in shown.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in lines}


def from_settings(settings: Settings) -> Iterator[Finding]:
    """The cluster's name, version and limits, and each setting that hurts."""
    version = settings.get("SLURM_VERSION", "unknown")
    tested = version.startswith(f"{TESTED}.")
    yield Finding(
        about="SLURM",
        found=f"cluster {settings.get('ClusterName', '?')}, version {version}"
        + f", tested with {TESTED}" * (not tested),
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
        limit = "no time limit" if one.allows.minutes is None else f"{one.allows.minutes:g} minutes"
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
