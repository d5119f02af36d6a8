"""Runs inside the user's existing allocation (`cluster.allocation=current`).

The ranks are a step of an salloc or a batch job. The launcher holds the run to its end, as with
simulated nodes; nothing is queued, requeued or cancelled. Its script passes USR2 on to the ranks,
which is a stop, and TERM to srun, which ends them at once; if the launcher dies, the kernel sends
it TERM.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from orchestrator.agent.processes import set_parent_death_signal
from orchestrator.clusters.api import Admission, Handle, Request, State
from orchestrator.clusters.slurm.base import BaseSlurmCluster
from orchestrator.clusters.slurm.batch_script import (
    SubmitHost,
    cpus_per_node,
    script_name,
    shape_of,
    step_script,
)
from orchestrator.clusters.slurm.diagnosis import culprit_of
from orchestrator.config.schema import node_range
from orchestrator.errors import ClusterError
from orchestrator.rundir.files import APPENDING, open_nofollow
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import read_outcome
from orchestrator.rundir.srun_log import STOP_CODES
from orchestrator.units import plural

END_S = 60.0  # srun waits for its ended tasks, and the scheduler for their node


class StepHandle(Handle):
    """The launcher's handle of an attempt inside an existing allocation.

    Args:
        script: starts srun, and ends with its code.
        environment: of the script.
    """

    def __init__(self, request: Request, script: Path, environment: Mapping[str, str]) -> None:
        self._run, self._attempt = RunDir(request.run), request.attempt
        self._state, self._stopping = State.RUNNING, False
        with os.fdopen(open_nofollow(self._run.batch_log, APPENDING), "ab") as log:
            self._process = subprocess.Popen(
                ["bash", str(script)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C in the terminal reaches the launcher alone
                preexec_fn=partial(set_parent_death_signal, os.getpid(), signal.SIGTERM),  # noqa: PLW1509  # no other thread of ours holds a lock
            )

    def poll(self, timeout_s: float) -> State:
        if self._state.ended:
            return self._state
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return State.RUNNING
        code = code if code >= 0 else 128 - code  # of a signal, as a shell says it
        run, attempt = self._run, self._attempt
        outcome = read_outcome(run, attempt)
        if outcome is not None:
            self._state, self.culprit = outcome.state, outcome.culprit
        elif self._stopping and code in STOP_CODES and not run.failures(attempt):
            self._state = State.STOPPED  # before there was an agent
        else:
            self._state, self.culprit = State.FAILED, culprit_of(run, attempt, code)
        return self._state

    def stop(self) -> None:
        self._stopping = True
        self._process.send_signal(signal.SIGUSR2)

    def kill(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:  # no node answers; the allocation's end ends them
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._state = State.FAILED


JOB = "SLURM_JOB_ID"
STEP = "SLURM_STEP_ID"
NODES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")


class CurrentAllocation(BaseSlurmCluster):
    """`cluster.allocation=current`."""

    def script(self, run: RunDir, attempt: int, host: SubmitHost) -> str:
        overlap = ["--overlap"] if STEP in os.environ else []  # this shell is in a step itself
        shape = [*shape_of(self.config.cluster), *overlap]
        return step_script(self.config, run, attempt, host, shape)

    def check(self, request: Request) -> Admission:  # noqa: ARG002  # the configuration has it all
        """Raise `ClusterError` if there is no allocation, or one that is too small.

        The variables of the shell say that; what a node has is left to srun.
        """
        cluster, job = self.config.cluster, os.environ.get(JOB)
        begin = " ".join(
            ["salloc", *shape_of(cluster), f"--cpus-per-task={cpus_per_node(cluster)}"]
        )
        if not job:
            raise ClusterError(
                f"cluster.allocation=current starts the ranks in an existing allocation, and "
                f"there is none here ({JOB} is not set); begin one: {begin}; or leave it out, and "
                f"the run is queued"
            )
        nodes = node_range(cluster.nodes)[1]
        most = next((int(os.environ[name]) for name in NODES if name in os.environ), nodes)
        if nodes > most:
            raise ClusterError(
                f"cluster.nodes={nodes}, but job {job} has {plural(most, 'node')}; try "
                f"cluster.nodes={most}, or begin a larger one: {begin}"
            )
        return Admission(message=f"starts at once in job {job}")

    def submit(self, request: Request) -> Handle:
        """Start the step."""
        client, job = self.client(), os.environ[JOB]
        self.submit_script(request, lambda _: job)  # it runs already
        own = {**client.environment("srun"), JOB: job}
        return StepHandle(
            request, RunDir(request.run).submitit / f"{script_name(request.attempt)}.sh", own
        )
