"""Faults: drawn from a seed, and injected into the processes of a run from outside."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import psutil

PER_RUN = 4
EARLY = 0.7  # of a fault's own part of the run; the rest is for its consequences

KILL_RANK, KILL_TWO, KILL_NODE = "kill a rank", "kill two ranks", "kill a node"
FREEZE_RANK, FREEZE_NODE = "freeze a rank", "freeze a node"
STOP, KILL_LAUNCHER = "stop, resume", "kill the launcher"
KILL_SCRIPT, REQUEUE, ASK_TO_LEAVE = "kill the batch script", "requeue", "ask to leave"
ON_ALL = (KILL_RANK, KILL_NODE, FREEZE_RANK, STOP, KILL_TWO)
SIMULATED = (*ON_ALL, FREEZE_NODE, KILL_LAUNCHER)
ON_SLURM = (*ON_ALL, KILL_SCRIPT, REQUEUE, ASK_TO_LEAVE)
ORDERLY = (STOP, REQUEUE, ASK_TO_LEAVE)  # after these, ranks leave between two updates

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault, in numbers from 0 to below 1 that fit any run.

    Attributes:
        number: from 0; those of one run follow each other.
        at: position in this fault's part of the run's updates.
        late: position in that update.
        target: position among the ranks or nodes that live then.
    """

    number: int
    kind: str
    at: float
    late: float
    target: float

    def update(self, updates: int) -> int:
        """Return in which update of a run it happens; never the first, nor the last.

        >>> [Fault(number=n, kind="", at=0.99, late=0, target=0).update(20) for n in range(4)]
        [4, 8, 13, 17]
        """
        part = self.number % PER_RUN + EARLY * self.at
        return 1 + int(part / PER_RUN * (updates - 2))


def choose(candidates: Sequence[Item], target: float) -> Item:
    return candidates[int(target * len(candidates))]


def draws(seed: int, kinds: Sequence[str]) -> Iterator[Fault]:
    """Yield all kinds in turn, each time in another order. More faults begin with the same ones."""
    chance = random.Random(seed)  # noqa: S311  # it must repeat
    number = 0
    while True:
        for kind in chance.sample(kinds, len(kinds)):
            at, late, target = chance.random(), chance.random(), chance.random()
            yield Fault(number=number, kind=kind, at=at, late=late, target=target)
            number += 1


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A worker's process. `agent` is the process that started it."""

    pid: int
    agent: int
    node: str


RANK_NAME = re.compile(r"rank (\d+)")  # as agents name their workers


def processes_of(run: str) -> list[psutil.Process]:
    """Return the processes on this machine whose command lines name a run's folder."""
    processes = psutil.process_iter(["name", "cmdline", "status"])
    return [process for process in processes if run in " ".join(process.info["cmdline"] or ())]


def find_ranks(run: str, job: str = "", node: str = "") -> dict[int, RankProcess]:
    """Return the ranks of a run on this machine that live and are not stopped.

    Args:
        run: its folder.
        job, node: only ranks of this job on this SLURM node; simulated nodes share a machine.
    """
    ranks: dict[int, RankProcess] = {}
    for process in processes_of(run):
        name = RANK_NAME.fullmatch(process.info["name"])
        if name is None or process.info["status"] in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
            continue
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            parent, env = process.parent(), process.environ() if node else {}
            own = (env.get("SLURM_JOB_ID", ""), env.get("SLURMD_NODENAME", "")) == (job, node)
            if parent is not None and parent.name() != name[0] and own:  # no fork of a rank's
                ranks[int(name[1])] = RankProcess(process.pid, parent.pid, node or parent.name())
    return ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Injected:
    """A fault as it was injected.

    Attributes:
        gone: ranks that the others lose by it.
        whole_run: no rank survives it, or all leave.
    """

    text: str
    gone: frozenset[int] = frozenset()
    whole_run: bool = False


def inject(kind: str, target: float, ranks: Mapping[int, RankProcess]) -> Injected:
    """Kill or freeze processes of this machine.

    Args:
        target: chooses among these ranks, or among their nodes: from 0 to below 1.
    """
    if not ranks:
        return Injected(text=f"{kind}: none was left")
    if kind in (KILL_NODE, FREEZE_NODE):
        text = choose(sorted({process.node for process in ranks.values()}), target)
        hit = {rank: process for rank, process in ranks.items() if process.node == text}
        # Agents first: one that still runs would report the end of its ranks.
        pids = [*{process.agent for process in hit.values()}, *(p.pid for p in hit.values())]
    else:
        first = choose(sorted(ranks), target)
        two = [rank for rank in sorted(ranks) if rank > first][:1] if kind == KILL_TWO else []
        hit = {rank: ranks[rank] for rank in (first, *two)}
        pids = [process.pid for process in hit.values()]
        text = f"rank{'s' * len(two)} {' and '.join(map(str, hit))}"
    freeze = kind in (FREEZE_RANK, FREEZE_NODE)
    for pid in pids:
        with suppress(ProcessLookupError):  # it has ended by itself
            os.kill(pid, signal.SIGSTOP if freeze else signal.SIGKILL)
    return Injected(text=f"{'freeze' if freeze else 'kill'} {text}", gone=frozenset(hit))


def main(run: str, kind: str, target: str) -> None:
    """Inject a fault into the ranks of this SLURM node, and report it; see `SlurmRun`."""
    ranks = find_ranks(run, os.environ["SLURM_JOB_ID"], os.environ["SLURMD_NODENAME"])
    injected = inject(kind, float(target), ranks)
    sys.stdout.write(json.dumps({"text": injected.text, "gone": sorted(injected.gone)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
