"""One pretended node: starts its ranks, reports their ends, and leaves no process behind.

A process of its own, as slurmstepd is on a real node: `python -m orchestrator.submit.node SPEC`.
Commands come on standard input (`stop`, `kill`), events go to standard output as JSON lines. When
its input ends, because the launcher died, however it died, everything below it is killed. It is a
sub-reaper: what a dead rank leaves behind (loader workers, say) becomes its child and is ended too.
Only the standard library is used, so that starting a node takes a few hundredths of a second.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import Any

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

    def start(self) -> None:
        spec = self._spec
        own_pid = os.getpid()

        def die_with_the_node() -> None:
            self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            # A stop that comes before the worker has its handler waits until it has.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            if os.getppid() != own_pid:
                os._exit(1)

        with open(spec["log"], "ab") as log:  # noqa: PTH123  # pathlib costs start-up time here
            for local_rank, rank in enumerate(spec["ranks"]):
                environment = {
                    **os.environ,
                    "SLURM_PROCID": str(rank),
                    "SLURM_LOCALID": str(local_rank),
                }
                process = subprocess.Popen(
                    spec["command"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                    preexec_fn=die_with_the_node,  # noqa: PLW1509  # this process has one thread
                )
                self._ranks[process.pid] = rank
                self._processes.append(process)
                _report("started", rank=rank, pid=process.pid)

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
                code = os.waitstatus_to_exitcode(status)
                _report("exit", rank=rank, status=code)

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
    while node.running:
        for key, _ in selector.select():
            content = os.read(key.fd, 4096)
            if key.fd == wake_read:
                continue
            if not content or b"kill" in content:
                node.kill_everything()
            elif b"stop" in content:
                node.signal_ranks(signal.SIGTERM)
        node.reap()
    node.kill_everything()
    _report("ended")


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
