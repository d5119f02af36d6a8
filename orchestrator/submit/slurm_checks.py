"""Would the scheduler ever run this? Asked before a run folder exists.

`sbatch --test-only` answers for most. Sites with EnforcePartLimits=NO accept what can never start,
and it would pend for ever; so the partition's own limits are looked at too, and accounts, which
SLURM takes as they come unless the site enforces them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.config import Config, node_range
from orchestrator.errors import ClusterError, did_you_mean
from orchestrator.submit.slurm_client import SlurmClient, explained
from orchestrator.submit.slurm_jobs import seconds
from orchestrator.submit.slurm_request import SIGNAL_AHEAD_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """What matters of one partition. `grace_s`: between a preempting signal and the end."""

    name: str
    nodes: int
    is_default: bool
    up: bool
    limit_min: float | None
    max_nodes: int | None
    grace_s: int
    preemptible: bool


def read_partitions(text: str) -> dict[str, Partition]:
    """`scontrol --oneliner show partition` as values."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        words: Mapping[str, str] = dict(w.split("=", 1) for w in line.split() if "=" in w)
        if "PartitionName" not in words:
            continue
        limit = seconds(words.get("MaxTime", ""))
        most = words.get("MaxNodes", "UNLIMITED")
        found[words["PartitionName"]] = Partition(
            name=words["PartitionName"],
            nodes=int(words.get("TotalNodes", "0")),
            is_default=words.get("Default") == "YES",
            up=words.get("State", "UP") == "UP",
            limit_min=None if limit is None else limit / 60,
            max_nodes=int(most) if most.isdigit() else None,
            grace_s=int(words.get("GraceTime", "0")),
            preemptible=words.get("PreemptMode", "OFF") not in ("OFF", ""),
        )
    return found


def chosen_partitions(config: Config, known: Mapping[str, Partition]) -> list[Partition]:
    """Those that the job may run in. Raises `ClusterError` for a name that does not exist."""
    asked = config.cluster.partition
    if asked is None:
        return [p for p in known.values() if p.is_default]
    for name in asked.split(","):
        if name not in known:
            raise ClusterError(
                f"cluster.partition={asked}: this cluster has no partition '{name}'"
                + did_you_mean(name, known)
            )
    return [known[name] for name in asked.split(",")]


def misfit(config: Config, partition: Partition) -> str | None:
    """Why the job can never run in a partition; None when nothing stands against it."""
    least = node_range(config.cluster.nodes)[0]
    most = min(partition.nodes, partition.max_nodes or partition.nodes)
    if least > most:
        return f"cluster.nodes={least}, but partition {partition.name} gives {most} at most"
    asked = config.cluster.time_min
    if asked is not None and partition.limit_min is not None and asked > partition.limit_min:
        return (
            f"cluster.time_min={asked}, but partition {partition.name} allows "
            f"{partition.limit_min:g} minutes; try cluster.time_min={partition.limit_min:g} (a run "
            f"that needs longer is requeued and goes on)"
        )
    return None if partition.up else f"partition {partition.name} takes no jobs at present"


def grace_s(config: Config, partitions: list[Partition]) -> float:
    """How long after a stop signal the job lives at the least, in seconds."""
    ahead = config.cluster.signal_ahead_s or SIGNAL_AHEAD_S
    return float(min([ahead, *(p.grace_s for p in partitions if p.preemptible)]))


def _check_account(client: SlurmClient, account: str) -> None:
    answer = client.ask("sacctmgr", "-nP", "list", "account", "format=Account")
    known = answer.out.split()
    if answer.code == 0 and known and account.lower() not in known:
        raise ClusterError(
            f"cluster.account={account}: this cluster has no account '{account}'"
            + did_you_mean(account, known)
        )


def _check_qos(client: SlurmClient, qos: str) -> None:
    answer = client.ask("sacctmgr", "-nP", "list", "qos", "format=Name")
    known = answer.out.split()
    if answer.code == 0 and known and qos.lower() not in known:
        raise ClusterError(
            f"cluster.qos={qos}: this cluster has no quality of service '{qos}'"
            + did_you_mean(qos, known)
        )


def try_out(client: SlurmClient, script: str) -> str:
    """What `sbatch --test-only` says of a script, in its own words. Raises `ClusterError`."""
    answer = client.ask("sbatch", "--test-only", text=script)
    if answer.code:
        raise ClusterError(explained(answer.words))
    return answer.words.removeprefix("sbatch: ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The scheduler's answer to a request that it would take."""

    words: str
    grace_s: float


def check_request(client: SlurmClient, config: Config, script: str) -> Verdict:
    """Refuse what can never run. Raises `ClusterError`; `SchedulerDown` when nobody answers."""
    known = read_partitions(client.must("scontrol", "--oneliner", "show", "partition"))
    partitions = chosen_partitions(config, known)
    against = [misfit(config, partition) for partition in partitions]
    if against and all(against):
        raise ClusterError("; ".join(sentence for sentence in against if sentence))
    if config.cluster.account is not None:
        _check_account(client, config.cluster.account)
    if config.cluster.qos is not None:
        _check_qos(client, config.cluster.qos)
    return Verdict(words=try_out(client, script), grace_s=grace_s(config, partitions))
