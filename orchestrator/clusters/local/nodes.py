"""The launcher's end of its pretended nodes: pipes, and the process that they are forks of."""

from __future__ import annotations

import json
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
from orchestrator.lifecycle.signs.processes import processor_s
from orchestrator.lifecycle.signs.stacks import STACK_S
from orchestrator.lifecycle.signs.standstill import Patience, Standstill
from orchestrator.run_folder.files import APPENDING, open_regular
from orchestrator.run_folder.rundir import RunDir

END_S = 1.0


@dataclass(slots=True)
class Node:
    """One node's pipes, and the unread part of what it tells."""

    name: str
    ranks: range
    commands: int
    events: int
    unread: bytes = b""
    ended: bool = False

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
        *lines, self.unread = (self.unread + content).split(b"\n")
        return [json.loads(line) for line in lines]


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
        self.all: list[Node] = []
        theirs: list[dict[str, Any]] = []
        width = request.ranks_per_node
        for index, environment in enumerate(environments):
            ranks = range(index * width, (index + 1) * width)
            (commands, own_commands), (own_events, events) = os.pipe(), os.pipe()
            node = Node(f"node{index}", ranks, own_commands, own_events)
            self.all.append(node)
            self.told.register(own_events, selectors.EVENT_READ, node)
            theirs.append(
                {
                    "name": node.name,
                    "ranks": list(ranks),
                    "environment": dict(environment),
                    "pipes": [commands, events],
                }
            )
        order = {
            "launcher": os.getpid(),
            "run": str(request.run),
            "attempt": request.attempt,
            "silence_s": request.details["silence_s"],
            "hang_s": request.details["hang_s"],
            "replaces": request.details["replacements"] > 0,
            "nodes": theirs,
        }
        hang_s = request.details["hang_s"]
        self._importing = Standstill(Patience(notice_s=hang_s, most_s=hang_s, hang_s=hang_s))
        self._process = self._start(order)

    def _start(self, order: dict[str, Any]) -> subprocess.Popen[bytes]:
        """Start the process that will fork the nodes, and tell it what they are."""
        first, pipes = order["nodes"][0], [end for node in order["nodes"] for end in node["pipes"]]
        with os.fdopen(open_regular(self._run.node_log(first["name"]), APPENDING), "ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator.clusters.local.preloaded", order["run"]],
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
                pipe.write(json.dumps(order).encode())
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

    def kill_import(self) -> None:
        """While there is no rank: what was forked meanwhile dies with the process it is of."""
        self._process.kill()

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
        self._process.send_signal(signal.SIGCONT)  # somebody may have stopped it
        for line in self._process.stdout or ():
            end = json.loads(line)
            if end["node"] == node.name:
                return end["status"]
        return self._process.wait()

    def close(self) -> None:
        """All have ended, so their parent ends by itself, unless somebody has stopped it."""
        with self._process as process:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
