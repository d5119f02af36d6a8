"""Runs inside the user's existing allocation (`cluster.allocation=current`).

The ranks are a step of an salloc or a batch job. The launcher holds the run to its end, as with
simulated nodes; nothing is queued, requeued or cancelled. Its script passes USR2 on to the ranks,
which is a stop, and TERM to srun, which ends them at once; if the launcher dies, the kernel sends
it TERM.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from orchestrator.agent.processes import die_with
from orchestrator.clusters.api import Admission, Handle, Request, State
from orchestrator.clusters.slurm.admission import Gres, read_gres
from orchestrator.clusters.slurm.base import BaseSlurmCluster
from orchestrator.clusters.slurm.batch_script import Here, script_name, shape_of, step_script
from orchestrator.clusters.slurm.root_cause import culprit_without_outcome
from orchestrator.config.schema import ClusterConfig, gpu_count, node_range
from orchestrator.errors import ClusterError
from orchestrator.rundir.files import APPENDING, open_nofollow
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import read_outcome
from orchestrator.slurm_client import STOP_CODES, SlurmClient, numbers, own_job_id

END_S = 60.0  # srun waits for its ended tasks, and the scheduler for their node


class StepHandle(Handle):
    """The nodes of an attempt, as their launcher holds them.

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
                preexec_fn=partial(die_with, os.getpid(), signal.SIGTERM),  # noqa: PLW1509  # no other thread of ours holds a lock
            )

    def poll(self, timeout_s: float) -> State:
        if not self._state.ended:
            try:
                self._state = self._meaning(self._process.wait(timeout_s))
            except subprocess.TimeoutExpired:
                return State.RUNNING
        return self._state

    def _meaning(self, code: int) -> State:
        run, attempt = self._run, self._attempt
        outcome = read_outcome(run, attempt)
        if outcome is not None:
            self.culprit = outcome.culprit
            return outcome.state
        if self._stopping and code in STOP_CODES and not run.failures(attempt):
            return State.STOPPED  # before there was an agent
        self.culprit = culprit_without_outcome(run, attempt, code)
        return State.FAILED

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
HET = "SLURM_HET_SIZE"
SHARE = re.compile(r"\bNodes=(\S+) CPU_IDs=([\d,-]+) Mem=\S+ GRES=(\S*)")
STATE = re.compile(r"\bJobState=(\S+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """An allocation's resources on some of its nodes, each."""

    nodes: str
    cpus: int
    gres: Gres


def read_shares(text: str) -> list[Share]:
    """Parse `scontrol show job -d -o` of one job.

    >>> read_shares("NumCPUs=6 Nodes=n[0-2] CPU_IDs=0-1 Mem=0 GRES=gpu:2(IDX:0-1) MinCPUsNode=2")
    [Share(nodes='n[0-2]', cpus=2, gres={('gpu', ''): 2})]
    """
    return [
        Share(nodes=nodes, cpus=len(list(numbers(cpus))), gres=read_gres(gres))
        for nodes, cpus, gres in SHARE.findall(text)
    ]


def one_of(env: Mapping[str, str]) -> str:
    """Return scontrol's id of the one allocation of this shell, in which srun starts steps.

    An element of an array may have the array's number, of a job of several components (`salloc … :
    …`) the first one has the job's: by these scontrol would show all of them.

    >>> one_of({"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2"})
    '7+0'
    """
    return f"{env[JOB]}+0" if HET in env else own_job_id(env)


class CurrentAllocation(BaseSlurmCluster):
    """`cluster.allocation=current`."""

    def script(self, run: RunDir, attempt: int, place: Here) -> str:
        beside = ["--overlap"] if STEP in os.environ else []  # this shell is in a step itself
        shape = [*shape_of(self.config.cluster), *beside]
        return step_script(self.config, run, attempt, place, shape)

    def check(self, request: Request) -> Admission:  # noqa: ARG002  # the configuration has it all
        """Raise `ClusterError` if there is no allocation, or one that is too small."""
        asked, job = self.config.cluster, os.environ.get(JOB)
        begin = " ".join(["salloc", *shape_of(asked), f"--cpus-per-task={asked.cpus_per_rank}"])
        if not job:
            raise ClusterError(
                f"cluster.allocation=current starts the ranks in an allocation that one is in, and "
                f"here is none ({JOB} is not set); begin one: {begin}; or leave it out, and the "
                f"run is queued"
            )
        client = SlurmClient(asked.slurm_conf)
        answer = client.ask("scontrol", "show", "job", "-d", "-o", one_of(os.environ))
        state = STATE.search(answer.out)
        if answer.code or state is None or state[1] != "RUNNING":
            raise ClusterError(
                f"job {job}, which this shell was in ({JOB}), is over"
                + (f" ({state[1].lower()})" if state else "")
                + f"; begin another: {begin}"
            )
        shares = {
            node: share
            for share in read_shares(answer.out)
            for node in client.must("scontrol", "show", "hostnames", share.nodes).split()
        }
        if refusals := list(_too_small(asked, job, shares)):
            raise ClusterError("\n".join([*refusals, f"a larger one: {begin}"]))
        return Admission(words=f"starts at once in job {job}, on {', '.join(shares)}")

    def submit(self, request: Request) -> Handle:
        """Start the step."""
        client, job = SlurmClient(self.config.cluster.slurm_conf), os.environ[JOB]
        self.place(request, lambda _: job)  # it runs already
        own = {**client.environment("srun"), JOB: job}
        return StepHandle(
            request, RunDir(request.run).submitit / f"{script_name(request.attempt)}.sh", own
        )


def _too_small(asked: ClusterConfig, job: str, shares: Mapping[str, Share]) -> Iterator[str]:
    """Yield what an allocation lacks, a sentence each; its nodes may differ."""
    nodes = node_range(asked.nodes)[1]
    if nodes > len(shares):
        have = f"{len(shares)} node{'s' * (len(shares) > 1)} ({', '.join(shares)})"
        yield f"cluster.nodes={nodes}, but job {job} has {have}; try cluster.nodes={len(shares)}"
        return
    width, cpus = asked.ranks_per_node, asked.ranks_per_node * asked.cpus_per_rank
    most = sorted((share.cpus for share in shares.values()), reverse=True)[nodes - 1]
    if cpus > most:
        fits = most // asked.cpus_per_rank
        hint = f"; try cluster.ranks_per_node={fits}" if fits else ""
        yield (
            f"cluster.ranks_per_node={width} x cluster.cpus_per_rank={asked.cpus_per_rank} takes "
            f"{cpus} CPUs of a node, but job {job} has {most}{hint}"
        )
    wanted = gpu_count(asked.gpus_per_node)
    there = sorted((_gpus(share.gres) for share in shares.values()), reverse=True)[nodes - 1]
    if wanted > there:
        yield f"cluster.gpus_per_node={asked.gpus_per_node}, but job {job} has {there} on a node"


def _gpus(gres: Gres) -> int:
    return sum(count for (name, _), count in gres.items() if name == "gpu")
