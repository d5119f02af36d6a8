"""Would the scheduler ever run this? Asked before a run folder exists.

Refused is what can never run: by the limits of its partitions and their nodes as configured, by
those of accounting where they are enforced, or because it names what does not exist. Sites with
EnforcePartLimits=NO would accept it and let it wait for ever. All else, `sbatch --test-only`'s
opinion included, is advice: with nodes drained, reserved or not yet heard of it refuses what a
plain sbatch queues. sbatch itself has the last word.
"""

from __future__ import annotations

import getpass
import math
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from orchestrator.clusters.slurm.admission.limits import (
    Limit,
    Wanted,
    exceeded,
    misfit,
    read_limits,
)
from orchestrator.clusters.slurm.admission.partitions import (
    PARTITIONS,
    SHAPES,
    Partition,
    read_partitions,
)
from orchestrator.clusters.slurm.admission.site_rules import as_placed
from orchestrator.config.schema import SIGNAL_AHEAD_S, Config
from orchestrator.errors import ClusterError, did_you_mean
from orchestrator.scheduler.client import Answer, SchedulerDown, SlurmClient, explained
from orchestrator.scheduler.jobs import seconds

ACCOUNTING_S = 15.0
KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d+)", re.MULTILINE)
DEFAULT_KILL_WAIT_S = 30.0
# What sbatch says of a thing that does not exist; waiting would not make it exist.
NEVER = (
    "invalid partition", "invalid account", "invalid qos", "invalid generic resource",
    "invalid feature", "invalid node name", "reservation is invalid",
)  # fmt: skip
ASSOCIATION = "format=Account,Partition,MaxTRES,GrpTRES,MaxWall,DefaultQOS"
QUALITY = "format=Name,MaxTRES,MaxTRESPU,GrpTRES,MaxWall,GraceTime,Preempt"
PREEMPT_TYPE = re.compile(r"^PreemptType\s*=\s*preempt/(\w+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The scheduler's answer to a request that it would take.

    Attributes:
        words: what it says of it.
        grace_s: the shortest notice of a stop that is to be reckoned with.
        warnings: what may keep the job waiting, a sentence each.
        preempt_grace_s: GraceTime; None where nobody is preempted.
        kill_wait_s: KillWait, which follows it.
    """

    words: str
    grace_s: float
    warnings: tuple[str, ...] = ()
    preempt_grace_s: float | None = None
    kill_wait_s: float = DEFAULT_KILL_WAIT_S


def chosen_partitions(job: Wanted, known: Mapping[str, Partition]) -> list[Partition]:
    """Those of the named ones that exist, or the default."""
    if not job.partitions:
        return [p for p in known.values() if p.is_default]
    return [known[name] for name in job.partitions if name in known]


def preempt_grace_s(
    partitions: list[Partition], shown: str = "", of_qos: float | None = None
) -> float | None:
    """From the signal of a preemption to SIGTERM, in seconds; None where nobody is preempted.

    Args:
        shown: `scontrol show config`: who decides it, the partition or the qos.
        of_qos: as the job's qos has it.
    """
    kind = PREEMPT_TYPE.search(shown)
    if kind is not None and kind[1] in ("qos", "none"):
        return of_qos if kind[1] == "qos" else None
    return min((float(p.grace_s) for p in partitions if p.grace_s is not None), default=None)


def grace_s(config: Config, preempted: float | None, kill_wait_s: float = 0.0) -> float:
    """How long after a stop signal the job lives at the least, in seconds.

    A requeue by hand and a node set down give no notice but `kill_wait_s`; they are not reckoned
    with here.
    """
    ahead = config.cluster.signal_ahead_s or SIGNAL_AHEAD_S
    return float(min(ahead, ahead if preempted is None else preempted + kill_wait_s))


def read_kill_wait_s(text: str) -> float:
    r"""KillWait in `scontrol show config`: between SIGTERM and SIGKILL, in seconds.

    >>> read_kill_wait_s("KillOnBadExit = 0\nKillWait                = 30 sec\n")
    30.0
    """
    found = KILL_WAIT.search(text)
    return float(found[1]) if found else DEFAULT_KILL_WAIT_S


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


def _without_excluded(
    client: SlurmClient, exclude: str | None, known: Mapping[str, Partition]
) -> Mapping[str, Partition]:
    """The partitions as what is excluded leaves them."""
    if exclude is None:
        return known

    def names(listed: str) -> set[str]:
        answer = client.ask("scontrol", "show", "hostnames", listed)
        return set(answer.out.split()) if not answer.code else set()

    excluded = names(exclude)
    taken = {p.name: len(excluded & names(p.listed)) for p in known.values() if p.listed}
    return {
        p.name: replace(p, nodes=p.nodes - taken.get(p.name, 0), excluded=taken.get(p.name, 0))
        for p in known.values()
    }


def _against_partitions(job: Wanted, known: Mapping[str, Partition]) -> Iterator[str]:
    """Why no partition of the job can ever run it."""
    for name in job.partitions:
        if name not in known:
            yield (
                f"cluster.partition={','.join(job.partitions)}: this cluster has no partition "
                f"'{name}'{did_you_mean(name, known)}"
            )
    against = [misfit(job, partition) for partition in chosen_partitions(job, known)]
    if all(against):
        yield from (sentence for sentence in against if sentence)


class _Accounting:
    """What sacctmgr knows, where there is accounting. Raises `SchedulerDown` when it is away."""

    def __init__(self, client: SlurmClient) -> None:
        self._client = client
        self.preempt_grace_s: float | None = None

    def _rows(self, *command: str) -> list[list[str]]:
        answer = self._client.ask("sacctmgr", "-nP", *command, timeout_s=ACCOUNTING_S)
        if answer.code and "connection" in answer.err.lower():
            raise SchedulerDown(answer.words)
        return [line.split("|") for line in answer.out.splitlines()] if not answer.code else []

    def against(self, job: Wanted, partitions: list[Partition]) -> Iterator[str]:
        """What does not exist, and limits that the job can never keep, where they are enforced."""
        qualities = {row[0]: row for row in self._rows("show", "qos", QUALITY) if len(row) == 7}
        if not qualities:
            return  # no accounting
        own = [
            row
            for row in self._rows(
                "show", "assoc", "where", f"user={getpass.getuser()}", ASSOCIATION
            )
            if job.account in (None, row[0])
        ]
        self.preempt_grace_s = _grace_of_qos(job, own, qualities)
        if job.account is not None and not own:
            accounts = [row[0] for row in self._rows("list", "account", "format=Account") if row]
            if accounts and job.account.lower() not in accounts:
                yield (
                    f"cluster.account={job.account}: this cluster has no account '{job.account}'"
                    + did_you_mean(job.account, accounts)
                )
        if job.qos is not None and job.qos.lower() not in qualities:
            yield (
                f"cluster.qos={job.qos}: this cluster has no qos '{job.qos}'"
                + did_you_mean(job.qos, qualities)
            )
        over = list(_over_limits(job, own, qualities, partitions))
        if over and self._enforced():
            yield from over

    def _enforced(self) -> bool:
        shown = self._client.must("scontrol", "show", "config")
        line = next((x for x in shown.splitlines() if x.startswith("AccountingStorageEnforce")), "")
        return bool({"limits", "safe"} & set(line.partition("=")[2].strip().split(",")))


def _over_limits(
    job: Wanted,
    associations: list[list[str]],
    qualities: Mapping[str, list[str]],
    partitions: list[Partition],
) -> Iterator[str]:
    """Why none of the person's associations, with the quality that goes with it, admits the job."""
    of_partitions = {p.qos for p in partitions}
    against: list[list[str]] = []
    for account, partition, most, group, wall, default in associations:
        if partition and job.partitions and partition not in job.partitions:
            continue
        limits = list(read_limits(f"account {account}", (most, group), wall))
        shared = of_partitions if len(of_partitions) == 1 else set[str | None]()
        for name in {job.qos or default or None, *shared} - {None}:
            if (row := qualities.get(str(name))) is not None:
                limits += _limits_of(row)
        against.append(list(exceeded(job, limits)))
    if against and all(against):
        yield from against[0]


def _grace_of_qos(
    job: Wanted, associations: list[list[str]], qualities: Mapping[str, list[str]]
) -> float | None:
    """GraceTime of the job's qos, in seconds, if another may preempt it."""
    default = next((row[-1] for row in associations if row[-1]), "normal")
    name = (job.qos or default).lower()
    if not any(name in row[-1].lower().split(",") for row in qualities.values()):
        return None
    return seconds(qualities[name][-2]) if name in qualities else None


def _limits_of(quality: list[str]) -> Iterator[Limit]:
    name, *tres, wall, _, _ = quality
    return read_limits(f"qos {name}", tres, wall)


def check_request(client: SlurmClient, config: Config, job: Wanted, script: str) -> Verdict:
    """Refuse what can never run. Raises `ClusterError`; `SchedulerDown` when nobody answers."""
    with ThreadPoolExecutor(max_workers=3) as beside:
        shown = beside.submit(client.must, "scontrol", "show", "config")
        tested = beside.submit(client.ask, "sbatch", "--test-only", text=script)
        shapes = beside.submit(client.ask, *SHAPES)
        known = read_partitions(client.must(*PARTITIONS), shapes.result().out)
        known = _without_excluded(client, job.exclude, known)
        answer = tested.result()
        job, words, warnings = as_placed(answer, job, chosen_partitions(job, known), known)
        partitions = chosen_partitions(job, known)
        against = list(_against_partitions(job, known))
        accounting = _Accounting(client)
        try:
            against += accounting.against(job, partitions)
        except SchedulerDown as error:
            warnings.append(f"the limits of your account could not be looked at: {error}")
    if against or (answer.code and any(words in answer.words.lower() for words in NEVER)):
        said = explained(answer.words) if answer.code else TAKEN_ALL_THE_SAME
        raise ClusterError("\n".join([said, *against] if answer.code else [*against, said]))
    warnings += _in_the_way(answer, partitions)
    kill_wait_s = read_kill_wait_s(shown.result())
    preempted = preempt_grace_s(partitions, shown.result(), accounting.preempt_grace_s)
    return Verdict(
        words=words,
        grace_s=grace_s(config, preempted, kill_wait_s),
        warnings=tuple(warnings),
        preempt_grace_s=preempted,
        kill_wait_s=kill_wait_s,
    )


TAKEN_ALL_THE_SAME = "(the scheduler would take the job all the same, to wait for ever)"


def _in_the_way(answer: Answer, partitions: list[Partition]) -> Iterator[str]:
    """What may keep the job waiting at present."""
    if answer.code:
        yield (
            f"the scheduler cannot place the job at present ({answer.words}); nothing that is "
            f"configured stands against it, so it is queued, to wait for nodes that are down, "
            f"drained, reserved or not heard of yet"
        )
    if partitions and not any(partition.up for partition in partitions):
        names = ", ".join(partition.name for partition in partitions)
        yield f"partition {names} starts no jobs at present (it is down); the job will wait"
