"""What a rank does about another of its node that gives no sign of life, under a scheduler.

A pretended node has a supervisor for this; ranks of a real one watch each other, see `siblings`.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable

from orchestrator.errors import RankHangs, RunFolderError
from orchestrator.lifecycle.signs.node_watch import FROZEN, NO_SIGN, STACK_S, state_of
from orchestrator.lifecycle.signs.siblings import Siblings
from orchestrator.lifecycle.topology import Topology
from orchestrator.rank.failure import failure_of, write_failure
from orchestrator.run_folder.rundir import RunDir, write_json
from orchestrator.run_warnings import warn


def ranks_of_node() -> list[int]:
    """The ranks of this node, by the scheduler's own distribution."""
    return [int(rank) for rank in os.environ.get("SLURM_GTIDS", "").split(",") if rank]


def look_beside(
    run: RunDir, attempt: int, topology: Topology, *, timeout_s: float, requeue: bool
) -> Callable[[], None]:
    """A look at the next rank of this node, for every beat; it ends that rank when it is lost.

    Args:
        timeout_s: for how long it may give no sign of life.
        requeue: whether the run may go on after a stop that nobody asked for.
    """
    ranks = ranks_of_node()
    if len(ranks) < 2:  # there is none
        return lambda: None
    own = hashlib.sha256(str(run.path).encode()).hexdigest()[:16]
    name = f"orchestrator-{own}-{topology.job_id}-{attempt}-{topology.node_index}"
    try:
        siblings = Siblings(ranks, topology.local_rank, name, timeout_s)
    except (OSError, RunFolderError) as error:
        warn(f"the ranks of a node cannot watch each other: {error}", kind="no siblings")
        return lambda: None

    def look() -> None:
        if lost := siblings.beat():
            end_lost(
                run, attempt, rank=lost[0], node=topology.node, pid=lost[1],
                timeout_s=timeout_s, requeue=requeue,
            )  # fmt: skip

    return look


def end_lost(
    run: RunDir, attempt: int, *, rank: int, node: str, pid: int, timeout_s: float, requeue: bool
) -> None:
    """End a rank of this node that is lost; the others end with it, by srun. Where it was stopped,
    the run goes on, as for a silent node; to hold the interpreter is a failure.
    """
    stopped = state_of(pid) == "T"
    cause = (FROZEN if stopped else NO_SIGN).format(f"{timeout_s:g}")
    print(f"rank {rank}: {cause}", flush=True)
    failure = failure_of(rank, node, RankHangs(cause)) | {"traceback": ""}
    write_failure(run, attempt, failure)
    if not stopped:
        os.kill(pid, signal.SIGQUIT)  # it has a handler, which writes its stacks to its log
        time.sleep(STACK_S)
    elif requeue and not run.departure(attempt).exists():
        why = f"rank {rank} on {node}: {cause}"
        write_json(run.departure(attempt), {"why": why, "updates": None, "time": time.time()})
    os.kill(pid, signal.SIGKILL)
