"""Would the scheduler ever run this? Asked before a run folder exists.

`sbatch --test-only` answers for most. Sites with EnforcePartLimits=NO accept what can never start,
and it would pend for ever; so the partition's own limits are looked at too, and accounts, which
SLURM takes as they come unless the site enforces them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
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
    """Those of the named ones that exist, or the default."""
    asked = config.cluster.partition
    if asked is None:
        return [p for p in known.values() if p.is_default]
    return [known[name] for name in asked.split(",") if name in known]


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


def too_slow(config: Config, grace: float) -> str | None:
    """A sentence when an update is known to take longer than a stop may."""
    update_s = config.facts.update_s
    if update_s is None or update_s <= grace:
        return None
    return (
        f"an update takes {update_s:g} s (facts.update_s), longer than the {grace:g} s between the "
        f"scheduler's signal and the end: a stop will lose the window under way; "
        f"cluster.signal_ahead_s={math.ceil(update_s)} gives it time before a time limit, fewer "
        f"accumulation.steps also when preempted"
    )


def _unknown(client: SlurmClient, key: str, value: str | None) -> str | None:
    """A sentence when accounting exists and does not know an account or quality of service."""
    if value is None:
        return None
    entity, column = {"account": ("account", "Account"), "qos": ("qos", "Name")}[key]
    answer = client.ask("sacctmgr", "-nP", "list", entity, f"format={column}")
    known = answer.out.split()
    if answer.code or not known or value.lower() in known:
        return None
    return f"cluster.{key}={value}: this cluster has no {key} '{value}'{did_you_mean(value, known)}"


def objections(client: SlurmClient, config: Config, known: Mapping[str, Partition]) -> list[str]:
    """Every sentence that stands against the job, by our own look at the cluster."""
    asked = (config.cluster.partition or "").split(",")
    sentences = [
        f"cluster.partition={config.cluster.partition}: this cluster has no partition '{name}'"
        + did_you_mean(name, known)
        for name in asked
        if name and name not in known
    ]
    against = [misfit(config, partition) for partition in chosen_partitions(config, known)]
    if all(against):
        sentences += [sentence for sentence in against if sentence]
    for key in ("account", "qos"):
        sentence = _unknown(client, key, getattr(config.cluster, key))
        sentences += [sentence] if sentence else []
    return sentences


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The scheduler's answer to a request that it would take."""

    words: str
    grace_s: float


def check_request(client: SlurmClient, config: Config, script: str) -> Verdict:
    """Refuse what can never run. Raises `ClusterError`; `SchedulerDown` when nobody answers."""
    with ThreadPoolExecutor(max_workers=1) as beside:
        tested = beside.submit(client.ask, "sbatch", "--test-only", text=script)
        known = read_partitions(client.must("scontrol", "--oneliner", "show", "partition"))
        against = objections(client, config, known)
        answer = tested.result()
    if answer.code:
        raise ClusterError("\n".join([explained(answer.words), *against]))
    if against:
        raise ClusterError(
            "\n".join(
                [*against, "(the scheduler would take the job all the same, to wait for ever)"]
            )
        )
    partitions = chosen_partitions(config, known)
    return Verdict(words=answer.words.removeprefix("sbatch: "), grace_s=grace_s(config, partitions))
