"""The local cluster: pretended nodes on this machine, each with its name and its loopback address.

Every rank is a real process with the environment that SLURM would give it, so a job that runs here
runs there: a fork of its node, which is one of a process that has imported the framework, which
`Nodes` starts (`preloaded`). The first rank that dies ends the run; whatever happens to the
launcher, no process is left (see `supervisor`).
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.clusters.api import Cluster, Culprit, Handle, Request, State
from orchestrator.clusters.local.losses import Losses
from orchestrator.clusters.local.nodes import Node, Nodes
from orchestrator.clusters.local.replacements import Replacements, most_of
from orchestrator.clusters.local.standing import Standing
from orchestrator.clusters.machine import share_gpus, visible_gpus
from orchestrator.clusters.request import Share
from orchestrator.clusters.root_cause import End, blame, tail
from orchestrator.config.frameworks import check_installed, check_tracker
from orchestrator.config.program import is_program
from orchestrator.config.schema import node_range
from orchestrator.errors import ClusterError, TransportError
from orchestrator.lifecycle.signs.node_watch import FENCED, FINISHED, FROZEN, STOPPED
from orchestrator.lifecycle.signs.stacks import STACK_S
from orchestrator.plan.plan import Plan
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.warnings import warn_of

GRACE_S = 1.0
IMPORT_HANGS = (
    "the import of the framework has used no processor for {} s (cluster.hang_timeout_s); the "
    "node's log has its stack"
)
ON_CPUS = ("gloo", "mccl")
NODES_LIMIT = 254 * 254


def node_address(index: int) -> str:
    """Loopback address of a pretended node.

    >>> node_address(0), node_address(253), node_address(254)
    ('127.0.1.1', '127.0.1.254', '127.0.2.1')
    """
    return f"127.0.{1 + index // 254}.{1 + index % 254}"


class LocalHandle(Handle):
    """The nodes of a local run, as their launcher holds them."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._run = RunDir(request.run)
        self._ends: list[End] = []  # those that should not have been
        self._words: dict[int, str] = {}  # the last of those that ended
        self._failures: list[dict[str, Any]] = []
        self._losses = Losses(self._run, request)
        self._replacements = Replacements(self._run, request)
        self._living: set[int] = set()
        details = request.details
        self._standing = Standing(self._run, details["silence_s"], details["hang_s"])
        self._give_up_at: float | None = None
        self._ending = False
        self._state = State.RUNNING
        self.pids: dict[int, int] = {}
        self._nodes = Nodes(request, [self._environment(i) for i in range(request.nodes)])

    def _environment(self, index: int) -> dict[str, str]:
        request = self._request
        names = [f"node{i}" for i in range(request.nodes)]
        environment = request.node_environment(index, names, node_address(index))
        gpus = request.details["gpus"]
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[index])
        return environment

    def poll(self, timeout_s: float) -> State:
        if self._state.ended:
            return self._state
        if self._give_up_at is not None:
            timeout_s = max(0.0, min(timeout_s, self._give_up_at - time.monotonic()))
        if (wait_s := self._replacements.wait_s) is not None:
            timeout_s = min(timeout_s, wait_s)
        self._read(timeout_s)
        self._replace()
        for culprit in self._standing.too_long_frozen():
            self._lose(culprit)
        for node in self._nodes.frozen():
            self._lose_frozen(node)
        if not self.pids and self.culprit is None and self._nodes.import_hangs():
            hang_s = self._request.details["hang_s"]
            name = self._nodes.all[0].name
            said = tail(self._run.node_log(name))
            cause = IMPORT_HANGS.format(f"{hang_s:g}")
            self._lose(Culprit(rank=None, node=name, cause=cause, log_tail=said))
        if self._give_up_at is not None and time.monotonic() >= self._give_up_at:
            self._end_all()
        if self._nodes.ended:
            self._settle()
        return self._state

    def stop(self) -> None:
        self._no_more()
        self._nodes.command("stop")

    def kill(self) -> None:
        self._end_all()
        while not self._nodes.ended:
            self._read(1.0)
            self._nodes.wake()
        self._settle()

    def _replace(self) -> None:
        """Start again whose time has come, and the node where that is gone as well."""
        due = self._replacements.due()
        for index, node in enumerate(self._nodes.all):
            its = {rank: process for rank, process in due if rank in node.ranks}
            self._losses.ranks.difference_update(its)
            self._living.update(its)
            if its and node.ended:
                self._nodes.start_again(index, its)
            for rank, process in its.items():
                node.command(f"start {rank} {process}")

    def _no_more(self) -> None:
        """No rank is started again, or let in: nodes end with those that train."""
        if not self._replacements.over:
            self._replacements.stop()
            self._nodes.command("close")
            self._nodes.kill_imports(of_newcomers=True)
        for rank in self._living - self._replacements.training(self._living):
            self._node_of(rank).command(f"end {rank}")

    def _node_of(self, rank: int) -> Node:
        return self._nodes.all[rank // self._request.ranks_per_node]

    def _end_all(self) -> None:
        self._ending = True
        self._nodes.kill_imports()  # nobody may be there yet to read a command
        self._nodes.kill()

    def _read(self, timeout_s: float) -> None:
        for key, _ in self._nodes.told.select(timeout_s):  # here the launcher waits
            node, news = key.data, self._nodes.news_of(key.data)
            if news is None:
                self._node_ended(node)
            for event in news or ():
                self._heed(node, event)

    def _heed(self, node: Node, event: dict[str, Any]) -> None:
        self._standing.heed(node.name, event)
        if event["event"] == "started":
            self.pids[event["rank"]] = event["pid"]
            self._living.add(event["rank"])
        elif event["event"] == "exit":
            self._ended(node.name, event)
        elif event["event"] == "silent":
            self._lose(self._standing.silent(node.name, event))

    def _node_ended(self, node: Node) -> None:
        self._living.difference_update(node.ranks)
        self._standing.gone(node.ranks)
        if any(rank not in self._words.keys() | self._losses.ranks for rank in node.ranks):
            status = self._nodes.status_of(node)
            end = End(time=time.monotonic(), node=node.name, rank=None, status=status)
            self._ended_badly(end, list(node.ranks))

    def _ended(self, node: str, event: dict[str, Any]) -> None:
        """One rank. An end without a last word is a failure, whatever its status."""
        rank, word = event["rank"], event["word"]
        self._words[rank] = word
        self._living.discard(rank)
        if event["failure"] is not None and word != FENCED:
            self._failures.append(event["failure"])
        if word in (FINISHED, STOPPED):
            self._no_more()
        else:
            end = End(time=event["time"], node=node, rank=rank, status=event["status"])
            self._ended_badly(end, [rank], word)

    def _ended_badly(self, end: End, ranks: list[int], word: str = "") -> None:
        """A failure, or a loss that the other ranks survive."""
        members = {rank: self._replacements.member(rank) for rank in ranks}
        before = set(self._losses.ranks)
        out = not any(map(self._replacements.let_in, ranks))
        if self._ending or not self._losses.take(end, members, FENCED if out else word):
            self._failed(end)
            return
        for rank in ranks:
            self._words.pop(rank, None)
            if rank not in before and (why_not := self._replacements.lost(rank)):
                self._warn_of(rank, why_not)
        if not self._replacements.training(self._living):
            self._no_more()

    def _lose(self, culprit: Culprit) -> None:
        """One that hangs: the run fails of it, or the others go on without it. Its end is then a
        loss like others.
        """
        if culprit.rank is not None and self._losses.survived:
            told = self._standing.told(culprit).cause
            self._warn_of(culprit.rank, f"{told}; it is ended, and the others go on without it")
            self._node_of(culprit.rank).command(f"end {culprit.rank}")
        elif self.culprit is None and not self._ends:
            self.culprit = culprit
            self._nodes.command("where stacks")
            self._give_up_at = time.monotonic() + STACK_S

    def _lose_frozen(self, node: Node) -> None:
        """A node that is stopped itself: it would hear nothing, and never end."""
        cause = FROZEN.format(f"{self._request.details['silence_s']:g}")
        if self._losses.survived or {FINISHED, STOPPED} & set(self._words.values()):
            told = f"{node.name}: {cause}; it is ended, with its ranks"
            warn_of(self._run.warnings(self._request.attempt, 0), 0, told)
            self._nodes.kill(node)
        else:
            self._lose(Culprit(rank=None, node=node.name, cause=cause))

    def _warn_of(self, rank: int, sentence: str) -> None:
        index = rank // self._request.ranks_per_node
        warn_of(self._run.warnings(self._request.attempt, index), rank, sentence)

    def _failed(self, end: End) -> None:
        """Note a failure; give the other ranks a moment to write down theirs."""
        if self._ending:  # it was us who ended this one
            return
        self._no_more()
        self._ends.append(end)
        if self._give_up_at is None:
            hangs = any(failure.get("hangs") for failure in self._failures)
            self._nodes.command("where stacks" if hangs else "where")
            self._give_up_at = time.monotonic() + GRACE_S

    def _settle(self) -> None:
        """Finished is what every rank said; nothing else is."""
        self._nodes.close()
        words = set(self._words.values())
        ends = [*self._ends, *self._losses.blamed]
        if self.culprit is None and ends and (self._ends or not words):  # without words: all gone
            behind = list(self._standing.behind.values())
            told = [*self._run.failures(self._request.attempt), *self._failures]
            done = [rank for rank, word in self._words.items() if word == FINISHED]
            self.culprit = blame(self._run, told, ends, behind, done)
        self.culprit = self.culprit and self._standing.told(self.culprit)
        if self.culprit is not None or not words <= {FINISHED, STOPPED}:
            self._state = State.FAILED
        elif STOPPED in words:
            self._state = State.STOPPED
        else:
            self._state = State.FINISHED


class LocalCluster(Cluster):
    """Pretended nodes on this machine."""

    def refuse(self, plan: Plan, framework: str | None) -> None:
        """Raises `JobError` where the framework is not installed here, `ConfigError` where the
        tracker's package is not, `TransportError` where there are too few GPUs.
        """
        check_installed(framework)
        check_tracker(self.config.tracker.kind)
        gpus = len(visible_gpus(os.environ))
        if self.config.transport == "nccl" and gpus < plan.ranks:
            on_cpus = "mccl" if framework == "mindspore" else "gloo"
            raise TransportError(
                f"transport=nccl needs a GPU for each of the {plan.ranks} ranks, but this machine "
                f"has {gpus}; try transport={on_cpus}"
            )

    def request(self, run: Path, attempt: int) -> Request:
        asked = super().request(run, attempt)
        if asked.nodes > NODES_LIMIT:
            raise ClusterError(
                f"cluster.nodes={asked.nodes}: a local cluster has at most {NODES_LIMIT}"
            )
        gpus = share_gpus(visible_gpus(os.environ), asked.nodes, asked.ranks_per_node)
        details = {
            "gpus": gpus,
            "silence_s": self.config.cluster.heartbeat_timeout_s,
            "survive": self.survival.on,
            "replacements": most_of(self.config.run) if self.survival.on else 0,
            "hang_s": self.config.cluster.hang_timeout_s,
        }
        return replace(asked, details=details)

    @property
    def share(self) -> Share:
        asked = self.config.cluster
        ranks = node_range(asked.nodes)[1] * asked.ranks_per_node
        on_gpus = is_program(self.config.job) or self.config.transport not in ON_CPUS
        cores = ranks * asked.cpus_per_rank
        return Share(ranks=ranks, cores=cores, gpus=ranks if on_gpus else 0)

    def submit(self, request: Request) -> LocalHandle:
        return LocalHandle(request)
