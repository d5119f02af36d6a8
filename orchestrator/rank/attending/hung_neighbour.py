"""What a rank does about another of its node that gives no sign of life, under a scheduler.

A pretended node has a supervisor for this; ranks of a real one watch each other, see `siblings`.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.errors import RankHangs, RunFolderError
from orchestrator.lifecycle.signs.node_watch import ASLEEP, FROZEN, NO_SIGN, Seen
from orchestrator.lifecycle.signs.processes import asleep_in, state_of
from orchestrator.lifecycle.signs.siblings import Siblings
from orchestrator.lifecycle.signs.stacks import Frame, as_lines, ask, in_words
from orchestrator.lifecycle.survival.record import GenerationRecord
from orchestrator.lifecycle.topology import Topology
from orchestrator.rank.failure import failure_of, write_failure
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.warnings import warn


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
