"""What a rank does about another of its node that gives no sign of life, under a scheduler.

A simulated node has a supervisor for this; ranks of a real one watch each other, see `siblings`.
"""

from __future__ import annotations

import hashlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import EXIT_FAILED, RankHangs, RunFolderError
from orchestrator.lifecycle.prctl import die_with
from orchestrator.lifecycle.signs.node_watch import (
    ASLEEP,
    BEAT_S,
    FAILED,
    FROZEN,
    LINK_VARIABLE,
    NO_SIGN,
    NodeWatch,
    Seen,
)
from orchestrator.lifecycle.signs.processes import asleep_in, state_of
from orchestrator.lifecycle.signs.siblings import Siblings
from orchestrator.lifecycle.signs.stacks import Frame, as_lines, ask, in_words
from orchestrator.lifecycle.stopping.departure import requeues
from orchestrator.lifecycle.survival.record import GenerationRecord
from orchestrator.lifecycle.topology import Topology
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.warnings import warn
from orchestrator.trainer.failure import failure_of, write_failure


def ranks_of_node() -> list[int]:
    """The ranks of this node, by the scheduler's own distribution."""
    return [int(rank) for rank in os.environ.get("SLURM_GTIDS", "").split(",") if rank]


@dataclass(frozen=True, slots=True)
class Limits:
    """When a rank of this node counts as lost, and what then.

    Attributes:
        silence_s: for how long it may give no sign of life.
        hang_s: the same of one that sleeps in the kernel.
        requeue: whether the run may go on after a stop that nobody asked for.
    """

    silence_s: float
    hang_s: float
    requeue: bool


def look_beside(
    run: RunDir, attempt: int, topology: Topology, limits: Limits, seen: Callable[[], Seen]
) -> Callable[[], None]:
    """A look at the next rank of this node, for every beat; it ends that rank when it is lost.

    Args:
        seen: where this rank is.
    """
    ranks = ranks_of_node()
    if len(ranks) < 2:  # there is none
        return lambda: None
    own = hashlib.sha256(str(run.path).encode()).hexdigest()[:16]
    name = f"orchestrator-{own}-{topology.job_id}-{attempt}-{topology.node_index}"
    try:
        siblings = Siblings(ranks, topology.local_rank, name, limits.silence_s, limits.hang_s)
    except (OSError, RunFolderError) as error:
        warn(f"the ranks of a node cannot watch each other: {error}", kind="no siblings")
        return lambda: None

    def look() -> None:
        if lost := siblings.beat(seen().at):
            rank, pid, at = lost
            Lost(run, attempt, rank, topology.node, pid).end(limits, Seen(at=at))

    return look


@dataclass(frozen=True, slots=True)
class Lost:
    """A rank of this node that gives no sign of life."""

    run: RunDir
    attempt: int
    rank: int
    node: str
    pid: int

    def end(self, limits: Limits, seen: Seen) -> None:
        """The others end with it, by srun, unless they go on without it. Where it was stopped, the
        run goes on, as for a silent node; to hold the interpreter is a failure.

        Args:
            seen: where it was last.
        """
        stopped, kernel = state_of(self.pid) == "T", asleep_in(self.pid)
        if stopped or kernel:
            cause = FROZEN.format(f"{limits.silence_s:g}")
            if kernel:
                cause = ASLEEP.format(kernel, f"{limits.hang_s:g}")
            cause, stack = seen.told(cause), [Frame(*frame) for frame in seen.stack]
        else:
            cause = NO_SIGN.format(f"{limits.silence_s:g}")
            stack = ask([self.pid], self.run.rank_log(self.rank)).get(self.pid, [])
            cause = f"{cause}; it is {in_words(stack)}" if stack else seen.told(cause)
        print(f"rank {self.rank}: {cause}", *as_lines(stack), sep="\n", flush=True)
        if GenerationRecord(self.run.attempt(self.attempt)).begun:
            os.kill(self.pid, signal.SIGKILL)
            return
        failure = failure_of(self.rank, self.node, RankHangs(cause)) | {"traceback": ""}
        write_failure(self.run, self.attempt, failure)
        departure = self.run.departure(self.attempt)
        if stopped and limits.requeue and not departure.exists():
            why = f"rank {self.rank} on {self.node}: {cause}"
            write_json(departure, {"why": why, "updates": None, "time": time.time()})
        os.kill(self.pid, signal.SIGKILL)


# ----------------------------------------------------------------------
# The process beside a node's first rank under a scheduler, which sees it stop or fall silent.

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


# ----------------------------------------------------------------------
# End at once when a signal finds a rank waiting for one that has failed, under a scheduler.

LOOK_S = 0.5


def heed_signals(run: RunDir, attempt: int, last_word: Callable[[str], None]) -> None:
    """From now on. `last_word` says how this rank ended."""
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)

    def heed() -> None:
        os.read(heard, 1)
        while not any(run.attempt(attempt).glob("failure-*.json")):
            time.sleep(LOOK_S)
        print("ended with the rank that failed", flush=True)
        last_word(FAILED)
        os._exit(EXIT_FAILED)

    threading.Thread(target=heed, name="signals", daemon=True).start()
