"""The task that submitit runs on each node of a job: the parent of the node's agent.

Only the run folder's path is pickled. Everything else is read from the folder.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.agent.links import Port, probe_ports
from orchestrator.agent.node_spec import NodeSpec, agent_file, secret_of
from orchestrator.agent.processes import parent_of, state_of
from orchestrator.agent.topology import BATCH_PID_VARIABLE, NODE_VARIABLE, attempt_of
from orchestrator.errors import ClusterError
from orchestrator.rundir.checkpoints import Fence
from orchestrator.rundir.files import await_disk_space, read_json, write_atomically, write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.warnings import warn_of

log = logging.getLogger(__name__)

TASK = "task.pkl"  # next to submitit's own file, which is named by the job's id
FENCE_EVERY = 4
POLL_S = 0.2
QUERY_S = 1.0
PARENT_S, AGAIN_S = 5.0, 60.0
"""From an agent's loss, after which its parent would start it again, to the first request of
another one; and from that to the second."""
SCRIPT_S = 10.0
"""For the batch script to say that it lives, where it may be gone with its node."""
STOP_S = 60.0
"""For the ranks to stop after the end of a job that could not end them."""
UNREACHABLE = (
    "the slurmstepd of node {} has died, so SLURM can neither signal nor end the ranks there; they "
    "go on, and stop when the job's batch script ends"
)


def write_task(run: RunDir) -> None:
    """Write each node's task, before there is a job: it needs no job id then."""
    from submitit.core.utils import DelayedSubmission  # as slow as all of submitit

    run.submitit.mkdir(mode=0o700, exist_ok=True)
    DelayedSubmission(NodeTask(str(run.path))).dump(run.submitit / TASK)


def set_nodes(folder: Path) -> None:
    """Set SLURM's variables to the nodes of the attempt, which may be a part of an allocation.

    They are those of this step, except in the step of one agent that is started again.
    """
    index = os.environ.get(NODE_VARIABLE)
    if index is None:
        for name in ("NUM_NODES", "NODELIST"):
            os.environ[f"SLURM_JOB_{name}"] = os.environ[f"SLURM_STEP_{name}"]
        return
    run, attempt = RunDir(folder), attempt_of(os.environ)
    files = sorted(run.attempt(attempt).glob(run.node_ranks(attempt, 0).name.replace("0", "?")))
    names = [str((read_json(path) or {})["node"]) for path in files]
    os.environ["SLURM_NODEID"] = str(int(index))
    os.environ["SLURM_JOB_NUM_NODES"] = str(len(names))
    os.environ["SLURM_JOB_NODELIST"] = ",".join(names)


def find_task(folder: Path) -> None:
    """Give the task the name that submitit expects in this job, unless it has it."""
    from submitit.core.utils import JobPaths
    from submitit.slurm.slurm import SlurmJobEnvironment

    task = folder / TASK
    if task.exists():
        with contextlib.suppress(FileExistsError):  # another node, or the submitting process
            os.link(task, JobPaths(folder, job_id=SlurmJobEnvironment().job_id).submitted_pickle)


@dataclass(frozen=True, slots=True)
class NodeTask:
    """Task that submitit runs on each node."""

    run: str

    def __call__(self) -> None:
        """Run the node, or one of its workers, and end the process with its exit code.

        The process ends here, so submitit's handlers and result files play no part: the outcome
        that the coordinator writes is the result.
        """
        signal.signal(signal.SIGCONT, signal.SIG_DFL)  # submitit's handler would only print
        from orchestrator.agent.agent import Agent
        from orchestrator.agent.node import run_node
        from orchestrator.agent.processes import exit_with, leave

        run, attempt = RunDir(Path(self.run)), attempt_of(os.environ)

        def agent_of(spec: NodeSpec) -> Agent:
            if NODE_VARIABLE in os.environ and is_served(spec):
                log.info("the agent of node %s is at work again, and no second one", spec.name)
                leave(0)
            watch = _Watch(run, attempt, spec)
            return Agent(spec, on_beat=watch.beat, on_outcome=watch.on_outcome)

        exit_with(lambda: run_node(run.path, attempt, agent_of))


def is_served(spec: NodeSpec) -> bool:
    """Return whether the node has an agent that another one, which the batch script has started,
    must not replace: it was only stopped for some time.

    One that lives answers. The kernel accepts for one that is stopped, which then is replaced.
    """
    run = RunDir(spec.run)
    newest = agent_file(run, spec.attempt, spec.index)
    if newest is None:
        return False
    ports = probe_ports({spec.index: newest}, PARENT_S, secret_of(run, spec.attempt))
    return ports[spec.index] is Port.OPEN


class _Watch:
    """An agent's additional work on SLURM: the fence, lost agents, and lost batch scripts; and the
    end of a job whose node has lost its slurmstepd.
    """

    def __init__(self, run: RunDir, attempt: int, spec: NodeSpec) -> None:
        self._run, self._attempt, self._spec = run, attempt, spec
        self._step_daemon = parent_of(os.getppid())  # in a container another process, or 0
        self._unreachable, self._job_ended = False, math.inf
        self._beats = 0
        self._fence = Fence(run.newest_attempt, attempt)
        self._starts: dict[int, tuple[float, float]] = {}  # of lost agents: next time, and pause

    def beat(self, lost: Collection[int]) -> bool:
        """Return whether a newer attempt has begun, or the job has ended without this node; called
        once a second.

        Args:
            lost: the nodes whose agents are lost, by the coordinator; () in other agents.
        """
        self._beats += 1
        self._restart_agents(lost)
        if self._spec.index == 0 and self._step_daemon > 1 and self._outlives_job():
            return True
        return self._beats % FENCE_EVERY == 0 and self._fence.is_stale

    def _outlives_job(self) -> bool:
        """Return whether the job ended some time ago, and no signal could reach this node.

        SLURM signals and ends a node's processes through the node's slurmstepd. Without it the
        ranks continue: srun of a single node does not notice the loss. Once the batch script has
        ended, they are asked to stop, as SLURM would ask them.
        """
        if not self._unreachable and parent_of(os.getppid()) != self._step_daemon:
            self._unreachable = True
            path, rank = self._run.warnings(self._attempt, 0), self._spec.ranks_of(0)[0]
            warn_of(path, rank, UNREACHABLE.format(self._spec.name))
        if self._unreachable and self._job_ended == math.inf and self._is_script_gone():
            log.info("the job has ended; the ranks are asked to stop")
            self._job_ended = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)
        return time.monotonic() - self._job_ended > STOP_S

    def _is_script_gone(self) -> bool:
        """Return whether the batch script, on this node, the first, has ended."""
        pid = os.environ.get(BATCH_PID_VARIABLE)
        return pid is not None and state_of(int(pid)) in "ZX"

    def _restart_agents(self, lost: Collection[int]) -> None:
        """Have the batch script start lost agents again, where their nodes' parents do not.

        A node that is gone refuses that; it is tried again, ever more seldom.
        """
        now = time.monotonic()
        for index in self._starts.keys() - set(lost):  # the script may not have seen it yet
            del self._starts[index]
            self._run.start_agent(self._attempt, index).unlink(missing_ok=True)
        for index in lost:
            due_at, pause_s = self._starts.setdefault(index, (now + PARENT_S, AGAIN_S))
            if now >= due_at:
                self._starts[index] = now + pause_s, 2 * pause_s
                node = self._spec.name_of(index)
                log.info("the batch script is asked to start the agent of node %s again", node)
                write_atomically(self._run.start_agent(self._attempt, index), f"{node}\n")

    def on_outcome(self, outcome: Mapping[str, Any], first_node_gone: bool) -> None:
        """Write the outcome if the disk was full before; do a lost batch script's work."""
        from orchestrator.clusters.slurm.finalize import finalize_without_script, print_note

        path = self._run.outcome(self._attempt)
        if not path.exists():
            await_disk_space(lambda: write_json(path, outcome), print_note)
        gone = self._spec.index == 0 and self._is_script_gone()
        why = "its batch script was killed" if gone else "its batch script went with its node"
        if first_node_gone and not gone:
            gone = self._is_script_lost()
        if gone:
            finalize_without_script(self._run, self._attempt, why)

    def _is_script_lost(self) -> bool:
        """Return whether the script, whose node's agent is lost, does not finalize the attempt.

        Where SLURM ends the job already, it has ended the script, and these ranks follow within
        KillWait. Else the script may live, and says so within some seconds.
        """
        from orchestrator.agent.topology import own_job_id
        from orchestrator.clusters.slurm.scheduler import SlurmClient, queued

        job_id = own_job_id(os.environ)
        deadline = time.monotonic() + SCRIPT_S
        while not self._run.finalizing(self._attempt).exists():
            if time.monotonic() > deadline:
                return True
            try:
                job = queued(SlurmClient(), [job_id]).get(job_id)
            except ClusterError as error:  # in a container, say, without SLURM's commands
                log.info("whether the batch script lives is not known: %s", error)
                job = None
            if job is not None and not job.at_work:
                return True
            time.sleep(POLL_S if job is None else QUERY_S)
        return False
