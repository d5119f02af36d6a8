"""One pretended node: starts its ranks, reports their ends, and leaves no process behind.

A process of its own, as slurmstepd is on a real node: a fork of `preloaded.py`, as its ranks are of
it. Commands come on standard input (`stop`, `kill`, `end` and a rank, `start` and a rank whose
process has ended, with the next one's number, `close`), events go to standard output as JSON lines.
When its input ends, because the launcher died, however it died, everything below it is killed. It
is a sub-reaper: what a dead rank leaves behind (loader workers, say) becomes its child and is ended
too. It hears each rank's signs of life (`lifecycle/signs/node_watch.py`) and tells what they say.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import psutil

from orchestrator.lifecycle.forks import branch
from orchestrator.lifecycle.prctl import adopt_orphans
from orchestrator.lifecycle.signs.node_watch import BEAT_S, LINK_VARIABLE, NodeWatch
from orchestrator.lifecycle.signs.processes import asleep_in, state_of
from orchestrator.lifecycle.signs.stacks import ASKS, catches
from orchestrator.lifecycle.topology import REPLACES_VARIABLE

KILL_DEADLINE_S = 5.0
WAITING = (signal.SIGCHLD, signal.SIGTERM)


def _report(event: str, **values: Any) -> None:
    line = json.dumps({"event": event, "time": time.monotonic(), **values}) + "\n"
    try:
        sys.stdout.write(line)
        sys.stdout.flush()
    except BrokenPipeError:  # the launcher is gone; the end of our input says the same
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  # swallows what nobody can read


class Node:
    """The ranks of one pretended node.

    Args:
        first: the first of the node's ranks.
        silence_s: for how long a rank may give no sign of life.
        hang_s: the same of one that sleeps in the kernel.
    """

    def __init__(self, first: int, silence_s: float, hang_s: float) -> None:
        adopt_orphans()
        self._ranks: dict[int, int] = {}  # pid -> rank
        self._first = first
        self._watch = NodeWatch(silence_s, hang_s)
        self.links: dict[socket.socket, int] = {}  # to ranks
        self.selector = selectors.DefaultSelector()
        self._wake, wake_write = self._pipe = os.pipe()
        os.set_blocking(wake_write, False)
        self.selector.register(0, selectors.EVENT_READ)
        self.selector.register(self._wake, selectors.EVENT_READ)

    def start(self, processes: Mapping[int, int]) -> int | None:
        """Fork the ranks, each as the process of that number; gives each of them its rank, and the
        node None. SIGTERM and SIGCHLD have to be blocked.
        """
        for rank, process in processes.items():
            if self._forked(rank, process):
                return rank
        return None

    def start_again(self, rank: int, process: int) -> bool:
        """Fork the `process`-th process of a rank whose last one has ended. Whether this is it."""
        for link in [link for link, of in self.links.items() if of == rank]:
            self._let_go(link)
            del self.links[link]
            link.close()
        signal.pthread_sigmask(signal.SIG_BLOCK, WAITING)
        if self._forked(rank, process):
            return True
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITING)
        return False

    def _let_go(self, link: socket.socket) -> None:
        if link in self.selector.get_map():
            self.selector.unregister(link)

    def _forked(self, rank: int, process: int) -> bool:
        """Whether this is the rank's process."""
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        self.links[mine] = rank
        pid = branch()
        if not pid:
            self._become(rank, process, theirs)
            return True
        theirs.close()
        self.selector.register(mine, selectors.EVENT_READ)
        self._watch.joined(rank, pid)
        self._ranks[pid] = rank
        _report("started", rank=rank, pid=pid)
        return False

    def _become(self, rank: int, process: int, link: socket.socket) -> None:
        """In the fork: leave the node behind. SIGTERM stays blocked: a stop that comes before the
        rank has its handler waits until it has.
        """
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.selector.close()
        for end in self._pipe:
            os.close(end)
        for siblings in self.links:
            siblings.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)  # the node's log
        os.environ["SLURM_PROCID"] = str(rank)
        os.environ["SLURM_LOCALID"] = str(rank - self._first)
        os.environ[REPLACES_VARIABLE] = str(process)
        os.environ[LINK_VARIABLE] = str(link.detach())

    def wake_by_signals(self) -> None:
        """From now on a child's end, or a stop, lets `news` return."""
        signal.set_wakeup_fd(self._pipe[1])
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self.signal_ranks(signal.SIGTERM))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITING)

    def commands(self, timeout_s: float) -> list[bytes]:
        """Wait for news, hear ranks, give what the launcher wants; `kill` where it is gone."""
        found: list[bytes] = []
        for key, _ in self.selector.select(timeout_s):
            if isinstance(key.fileobj, socket.socket):
                if not self.hear(key.fileobj):
                    self._let_go(key.fileobj)
                continue
            content = os.read(key.fd, 4096)
            if key.fd != self._wake:
                found += content.splitlines() or [b"kill"]
        return found

    def hear(self, link: socket.socket) -> bool:
        """Read what a rank said. Returns whether there may be more later."""
        rank = self.links[link]
        while True:
            try:
                content = link.recv(65536)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                content = b""
            if not content:
                return False
            for line in self._watch.hear(rank, content):
                if "behind" in line:
                    _report("behind", rank=rank, behind=line["behind"])

    def lose_silent(self) -> None:
        """Report ranks that give no sign of life; of stopped ones `reap` does."""
        for rank in self._watch.silent():
            pid = self._watch.ranks[rank].pid
            if pid in self._ranks and state_of(pid) != "T":
                _report("silent", rank=rank, asleep=asleep_in(pid), seen=self._seen(rank))

    def tell_where(self, *, stacks: bool) -> None:
        """Report where each rank was last, by its own words; have them write down their `stacks`
        where one of them hangs, and the others wait for it.
        """
        for pid, rank in self._ranks.items():
            _report("seen", rank=rank, seen=self._seen(rank))
            if stacks and catches(pid):  # else it has not begun, and would end of it
                os.kill(pid, ASKS)

    def _seen(self, rank: int) -> dict[str, Any]:
        return asdict(self._watch.ranks[rank].seen)

    def obey(self, word: str, more: list[str]) -> None:
        """Do what the launcher wants of the ranks that there are."""
        if word == "kill":
            self.kill_everything()
        elif word == "stop":
            self.signal_ranks(signal.SIGTERM)
        elif word == "where":
            self.tell_where(stacks="stacks" in more)
        elif word == "end":
            self.end_rank(int(more[0]))

    def signal_ranks(self, number: int) -> None:
        for pid in self._ranks:
            os.kill(pid, number)  # not reaped yet, so the pid is still its own

    def end_rank(self, rank: int) -> None:
        """Kill one that the others go on without."""
        for pid in [pid for pid, of in self._ranks.items() if of == rank]:
            os.kill(pid, signal.SIGKILL)

    def reap(self) -> None:
        """Collect every child that ended; report those that are ranks, and ranks that were frozen
        (SIGSTOP) or thawed.
        """
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                if pid in self._ranks:
                    frozen, of = os.WIFSTOPPED(status), self._ranks[pid]
                    _report("frozen" if frozen else "thawed", rank=of, seen=self._seen(of))
                continue
            rank = self._ranks.pop(pid, None)
            if rank is not None:
                for link in [link for link, of in self.links.items() if of == rank]:
                    self.hear(link)
                code = os.waitstatus_to_exitcode(status)
                known = self._watch.ranks[rank]
                _report("exit", rank=rank, status=code, word=known.word, failure=known.failure,
                        seen=self._seen(rank))  # fmt: skip

    @property
    def running(self) -> bool:
        return bool(self._ranks)

    def kill_everything(self) -> None:
        """End all descendants, adopted ones included, and wait until none is left."""
        deadline = time.monotonic() + KILL_DEADLINE_S
        myself = psutil.Process()
        while time.monotonic() < deadline:
            found = [
                p for p in myself.children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE
            ]
            for process in found:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            self.reap()
            if not found and not self._ranks:
                return
            time.sleep(0.005)  # between two looks at processes that were just killed


def serve(
    first: int, processes: Mapping[int, int], *, silence_s: float, hang_s: float,
    stays: bool = False,
) -> int | None:  # fmt: skip
    """Be a node until its ranks have ended. Returns in the process of each rank, too, at once: with
    its number there, and None in the node.

    Args:
        first: the first of the node's ranks.
        processes: of the ranks that are there from the start, which process of its rank each is.
        stays: ranks may be started again (`start RANK PROCESS`), until there is the word `close`.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, WAITING)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _report("begun", pid=os.getpid())
    node = Node(first, silence_s, hang_s)
    rank = node.start(processes)
    if rank is not None:
        return rank
    node.wake_by_signals()
    while node.running or stays:
        for command in node.commands(BEAT_S):
            word, *numbers = command.decode().split()
            if word == "start" and node.start_again(*map(int, numbers)):
                return int(numbers[0])
            stays = stays and word not in ("kill", "close")
            node.obey(word, numbers)
        node.reap()
        node.lose_silent()
    node.kill_everything()
    _report("ended")
    return None
