"""The process beside a node's first rank under a scheduler, which sees it stop or fall silent.

Ranks of a node watch each other (`hung_neighbour.py`); of one that is alone there, or of all that
are stopped at once, nobody would know. It is started before the rank imports anything, hears the
lines of `Life` as the supervisor of a pretended node does, and dies with its rank.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from pathlib import Path

from orchestrator.lifecycle.prctl import die_with
from orchestrator.lifecycle.signs.node_watch import BEAT_S, LINK_VARIABLE, NodeWatch, Seen
from orchestrator.lifecycle.signs.processes import state_of
from orchestrator.lifecycle.stopping.departure import requeues
from orchestrator.rank.attending.hung_neighbour import Limits, Lost
from orchestrator.rundir.folder import RunDir

LINE_BYTES = 65536


def start_watcher(entry: str, run: Path, attempt: int, rank: int, node: str) -> None:
    """Start one for this process, which is that rank.

    Args:
        entry: the file that runs `watch` when its first argument is that word.
    """
    ours, theirs = socket.socketpair()
    theirs.set_inheritable(True)
    ours.set_inheritable(True)  # until `link_to_supervisor` takes it
    words = ("watch", run, attempt, rank, node, os.getpid(), theirs.fileno())
    # It is not that rank: who looks for a rank's process by its number must not find it.
    environment = {k: v for k, v in os.environ.items() if k not in ("SLURM_PROCID", LINK_VARIABLE)}
    os.posix_spawn(
        sys.executable,
        [sys.executable, entry, *map(str, words)],
        environment,
        file_actions=[
            (os.POSIX_SPAWN_CLOSE, ours.fileno()),
            # The step ends when nobody holds its output any more.
            *((os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_RDWR, 0) for n in range(3)),
        ],
        setsid=True,
    )
    theirs.close()
    os.environ[LINK_VARIABLE] = str(ours.detach())


def watch(path: str, attempt: str, rank: str, node: str, pid: str, link: str) -> None:
    """Be the watcher of the process `pid`, whose lines come from the socket `link`."""
    die_with(int(pid))
    run = RunDir(Path(path))
    cluster = run.read_config()["cluster"]
    limits = Limits(
        float(cluster["heartbeat_timeout_s"]),
        float(cluster["hang_timeout_s"]),
        requeues(cluster.get("requeue"), cluster.get("allocation", "new")),
    )
    seen = _lost(socket.socket(fileno=int(link)), int(pid), limits)
    if seen is not None:
        Lost(run, int(attempt), int(rank), node, int(pid)).end(limits, seen)


def _lost(link: socket.socket, pid: int, limits: Limits) -> Seen | None:
    """Where the process was last, if it becomes lost before it ends. Before its first line, which
    comes after its imports, it is only lost when it is stopped.
    """
    neighbours, heard = NodeWatch(limits.silence_s, limits.hang_s), False
    neighbours.joined(0, pid)
    neighbours.hear(0, b"")
    while True:
        if select.select([link], [], [], BEAT_S)[0]:
            content = link.recv(LINE_BYTES)
            if not content:
                return None
            neighbours.hear(0, content)
            heard = True
        if neighbours.silent():
            if heard or state_of(pid) == "T":
                return neighbours.ranks[0].seen
            neighbours.hear(0, b"")
