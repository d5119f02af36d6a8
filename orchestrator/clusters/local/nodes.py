"""The launcher's end of its pretended nodes: pipes, and the process that they are forks of."""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, cast

from orchestrator.clusters.api import Request
from orchestrator.lifecycle.signs.processes import processor_s, state_of
from orchestrator.lifecycle.signs.stacks import STACK_S
from orchestrator.lifecycle.signs.standstill import Patience, Standstill
from orchestrator.rundir.files import APPENDING, open_nofollow
from orchestrator.rundir.folder import RunDir

END_S = 1.0


@dataclass(slots=True)
class Node:
    """One node's pipes, and the unread part of what it tells."""

    name: str
    ranks: range
    commands: int
    events: int
    unread: bytes = b""
    begun: bool = False
    ended: bool = False
    pid: int | None = None
    stopped_at: float | None = None

    def frozen(self, silence_s: float) -> bool:
        """Whether its process has been stopped for so long, as far as was looked; told once."""
        if self.ended or self.pid is None or state_of(self.pid) != "T":
            self.stopped_at = None
            return False
        now = time.monotonic()
        self.stopped_at = now if self.stopped_at is None else self.stopped_at
        if now - self.stopped_at < silence_s:
            return False
        self.stopped_at = math.inf
        return True

    def command(self, word: str) -> None:
        if self.ended:
            return
        try:
            os.write(self.commands, word.encode() + b"\n")
        except BrokenPipeError:  # it ended in this moment; its end is read from its output
            return

    def read(self) -> list[dict[str, Any]] | None:
        """What it told meanwhile; None at its end."""
        content = os.read(self.events, 65536)
        if not content:
            self.ended = True
            os.close(self.commands)
            os.close(self.events)
            return None
        self.begun = True
        *lines, self.unread = (self.unread + content).split(b"\n")
        events = [json.loads(line) for line in lines]
        for event in events:
            if event["event"] == "begun":
                self.pid = event["pid"]
        return events


class Nodes:
    """All nodes of an attempt.

    Args:
        environments: each node's, whole.

    Attributes:
        told: selects the nodes that have told something, as the keys' data.
    """

    def __init__(self, request: Request, environments: list[Mapping[str, str]]) -> None:
        self._run = RunDir(request.run)
        self.told = selectors.DefaultSelector()
        self._environments = environments
        self._width = request.ranks_per_node
        self._silence_s: float = request.details["silence_s"]
        self.all: list[Node] = []
        theirs: list[dict[str, Any]] = []
        for index in range(len(environments)):
            node, told = self._made(index, dict.fromkeys(self._ranks_of(index), 0))
            self.all.append(node)
            theirs.append(told)
        self._order = {
            "launcher": os.getpid(),
            "run": str(request.run),
            "attempt": request.attempt,
            "silence_s": self._silence_s,
            "hang_s": request.details["hang_s"],
            "replaces": request.details["replacements"] > 0,
        }
        hang_s = request.details["hang_s"]
        self._importing = Standstill(Patience(notice_s=hang_s, most_s=hang_s, hang_s=hang_s))
        self._process = self._start(theirs)
        self._parents = {node.name: self._process for node in self.all}
        self._statuses: dict[tuple[int, str], int] = {}  # of nodes that ended, by their parents

    def _ranks_of(self, index: int) -> range:
        return range(index * self._width, (index + 1) * self._width)

    def _made(self, index: int, processes: Mapping[int, int]) -> tuple[Node, dict[str, Any]]:
        """This end of a node, and what the node is told: of its ranks, which process each is."""
        (commands, own_commands), (own_events, events) = os.pipe(), os.pipe()
        node = Node(f"node{index}", self._ranks_of(index), own_commands, own_events)
        self.told.register(own_events, selectors.EVENT_READ, node)
        told = {
            "name": node.name,
            "first": node.ranks[0],
            "processes": list(processes.items()),
            "environment": dict(self._environments[index]),
            "pipes": [commands, events],
        }
        return node, told

    def start_again(self, index: int, processes: Mapping[int, int]) -> None:
        """Another process for a node that has ended, with some of its ranks, each with the number
        of its process. It imports the framework by itself, as a node that was set up anew.
        """
        self.all[index], told = self._made(index, processes)
        before = self._parents[told["name"]]
        self._parents[told["name"]] = self._start([told])
        if before not in self._parents.values():
            self._wait_for(before)

    def _start(self, nodes: list[dict[str, Any]]) -> subprocess.Popen[bytes]:
        """Start the process that will fork the nodes, and tell it what they are."""
        first, pipes = nodes[0], [end for node in nodes for end in node["pipes"]]
        with os.fdopen(open_nofollow(self._run.node_log(first["name"]), APPENDING), "ab") as errors:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "orchestrator.clusters.local.preloaded",
                    str(self._run.path),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=first["environment"],
                pass_fds=pipes,
                start_new_session=True,  # Ctrl-C in the terminal reaches the launcher alone
            )
        for end in pipes:
            os.close(end)
        try:
            with cast("IO[bytes]", process.stdin) as pipe:
                pipe.write(json.dumps({**self._order, "nodes": nodes}).encode())
        except BrokenPipeError:  # it has ended already, which is read from the nodes' pipes
            pass
        return process

    def news_of(self, node: Node) -> list[dict[str, Any]] | None:
        """What a node that was selected told; None when it has ended."""
        news = node.read()
        if news is None:
            self.told.unregister(node.events)
        return news

    def command(self, word: str) -> None:
        for node in self.all:
            node.command(word)

    def kill(self, *nodes: Node) -> None:
        """These end all that they have, and themselves; all where none is named."""
        for node in nodes or self.all:
            node.command("kill")
        self.wake()

    def frozen(self) -> list[Node]:
        """Those that have been stopped for longer than a rank may be."""
        return [node for node in self.all if node.frozen(self._silence_s)]

    def wake(self) -> None:
        """A node that somebody has stopped goes on, and reads what it is told."""
        for parent in self._parents.values():
            parent.send_signal(signal.SIGCONT)  # which it hands on

    def kill_imports(self, *, of_newcomers: bool = False) -> None:
        """Where there is no rank yet: what was forked meanwhile dies with the process it is of.

        Args:
            of_newcomers: only where a node is started again.
        """
        begun = {id(self._parents[node.name]) for node in self.all if node.begun}
        for process in self._parents.values():
            if id(process) not in begun and not (of_newcomers and process is self._process):
                process.kill()

    @property
    def ended(self) -> bool:
        return all(node.ended for node in self.all)

    def import_hangs(self) -> bool:
        """Whether the import has used no processor for `hang_s`; its stack is in the log then."""
        if not self._importing.hangs(time.monotonic(), processor_s(self._process.pid)):
            return False
        self._process.send_signal(signal.SIGQUIT)
        time.sleep(STACK_S)
        return True

    def status_of(self, node: Node) -> int:
        """How the process of an ended node ended; its parent's own status if that cannot tell."""
        parent = self._parents[node.name]
        parent.send_signal(signal.SIGCONT)  # somebody may have stopped it
        while (parent.pid, node.name) not in self._statuses:
            line = parent.stdout.readline() if parent.stdout else b""
            if not line:
                return parent.wait()
            end = json.loads(line)  # of another that ended at the same time, perhaps
            self._statuses[parent.pid, end["node"]] = end["status"]
        return self._statuses[parent.pid, node.name]

    def close(self) -> None:
        """All have ended, so their parents end by themselves, unless somebody has stopped one."""
        for parent in (self._process, *self._parents.values()):
            self._wait_for(parent)

    def _wait_for(self, parent: subprocess.Popen[bytes]) -> None:
        with parent:
            try:
                parent.wait(END_S)
            except subprocess.TimeoutExpired:
                parent.kill()
