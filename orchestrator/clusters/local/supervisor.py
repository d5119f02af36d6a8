"""One pretended node: starts its ranks, reports their ends, and leaves no process behind.

A process of its own, as slurmstepd is on a real node:
`python -m orchestrator.clusters.local.supervisor SPEC`. Commands come on standard input (`stop`,
`kill`), events go to standard output as JSON lines. When its input ends, because the launcher died,
however it died, everything below it is killed. It is a sub-reaper: what a dead rank leaves behind
(loader workers, say) becomes its child and is ended too.
It hears each rank's signs of life (`lifecycle/signs/node_watch.py`) and tells what they say.
Only the standard library is used, so that starting a node takes a few hundredths of a second.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from orchestrator.lifecycle.signs.node_watch import (
    BEAT_S,
    LINK_VARIABLE,
    STACK_S,
    NodeWatch,
    state_of,
)

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_DEADLINE_S = 5.0


def _report(event: str, **values: Any) -> None:
    line = json.dumps({"event": event, "time": time.monotonic(), **values}) + "\n"
    try:
        sys.stdout.write(line)
        sys.stdout.flush()
    except BrokenPipeError:  # the launcher is gone; the end of our input says the same
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  # swallows what nobody can read


class Node:
    """The ranks of one pretended node."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._ranks: dict[int, int] = {}  # pid -> rank
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watch = NodeWatch(spec["silence_s"])
        self.links: dict[socket.socket, int] = {}  # to ranks

    def start(self) -> None:
        spec = self._spec
        own_pid = os.getpid()

        def die_with_the_node() -> None:
            self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            # A stop that comes before the worker has its handler waits until it has.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            if os.getppid() != own_pid:
                os._exit(1)

        for local_rank, rank in enumerate(spec["ranks"]):
            mine, theirs = socket.socketpair()
            mine.setblocking(False)
            environment = {
                **os.environ,
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(local_rank),
                LINK_VARIABLE: str(theirs.fileno()),
            }
            process = subprocess.Popen(
                spec["command"],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,  # the node's log
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                preexec_fn=die_with_the_node,  # noqa: PLW1509  # this process has one thread
            )
            theirs.close()
            self.links[mine] = rank
            self._watch.joined(rank, process.pid)
            self._ranks[process.pid] = rank
            self._processes.append(process)
            _report("started", rank=rank, pid=process.pid)

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
        """Report ranks that give no sign of life, and have them write down where they are; those
        that are stopped cannot, and were reported as frozen.
        """
        for rank in self._watch.silent():
            pid = self._watch.ranks[rank].pid
            if pid in self._ranks and state_of(pid) != "T":
                os.kill(pid, signal.SIGQUIT)  # see `Life`: it has a handler by now
                time.sleep(STACK_S)
                _report("silent", rank=rank)

    def signal_ranks(self, number: int) -> None:
        for pid in self._ranks:
            os.kill(pid, number)  # not reaped yet, so the pid is still its own

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
                    frozen = os.WIFSTOPPED(status)
                    _report("frozen" if frozen else "thawed", rank=self._ranks[pid])
                continue
            rank = self._ranks.pop(pid, None)
            if rank is not None:
                for link in [link for link, of in self.links.items() if of == rank]:
                    self.hear(link)
                code = os.waitstatus_to_exitcode(status)
                known = self._watch.ranks[rank]
                _report("exit", rank=rank, status=code, word=known.word, failure=known.failure)

    @property
    def running(self) -> bool:
        return bool(self._ranks)

    def kill_everything(self) -> None:
        """End all descendants, adopted ones included, and wait until none is left."""
        import psutil

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


def serve(spec: dict[str, Any]) -> None:
    node = Node(spec)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: node.signal_ranks(signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    node.start()
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(wake_read, selectors.EVENT_READ)
    for link in node.links:
        selector.register(link, selectors.EVENT_READ)
    while node.running:
        for key, _ in selector.select(BEAT_S):
            if isinstance(key.fileobj, socket.socket):
                if not node.hear(key.fileobj):
                    selector.unregister(key.fileobj)
                continue
            content = os.read(key.fd, 4096)
            if key.fd == wake_read:
                continue
            if not content or b"kill" in content:
                node.kill_everything()
            elif b"stop" in content:
                node.signal_ranks(signal.SIGTERM)
        node.reap()
        node.lose_silent()
    node.kill_everything()
    _report("ended")


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
