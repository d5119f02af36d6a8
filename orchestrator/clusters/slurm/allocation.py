"""In an allocation that one has (an salloc, a batch job): the ranks are a step of it, at once.

The launcher holds the run to its end, as it does on pretended nodes. The allocation is the person's
own: nothing is queued, requeued or cancelled, and it is there afterwards.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from orchestrator.clusters.api import Admission, Handle, Request
from orchestrator.clusters.slurm.admission.partitions import Gres, read_gres
from orchestrator.clusters.slurm.on_slurm import OnSlurm
from orchestrator.clusters.slurm.request.batch_script import Here, step_script
from orchestrator.clusters.slurm.request.srun_lines import shape_of
from orchestrator.clusters.slurm.step import StepHandle
from orchestrator.clusters.slurm.task import Task
from orchestrator.config.schema import ClusterConfig, gpu_count, node_range
from orchestrator.errors import ClusterError
from orchestrator.rundir.folder import RunDir
from orchestrator.scheduler.client import SlurmClient
from orchestrator.scheduler.environment import own_job_id
from orchestrator.scheduler.srun_words import numbers

JOB = "SLURM_JOB_ID"
STEP = "SLURM_STEP_ID"
HET = "SLURM_HET_SIZE"
SHARE = re.compile(r"\bNodes=(\S+) CPU_IDs=([\d,-]+) Mem=\S+ GRES=(\S*)")
STATE = re.compile(r"\bJobState=(\S+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What an allocation has of some of its nodes, each."""

    nodes: str
    cpus: int
    gres: Gres


def read_shares(text: str) -> list[Share]:
    """`scontrol show job -d -o` of one job.

    >>> read_shares("NumCPUs=6 Nodes=n[0-2] CPU_IDs=0-1 Mem=0 GRES=gpu:2(IDX:0-1) MinCPUsNode=2")
    [Share(nodes='n[0-2]', cpus=2, gres={('gpu', ''): 2})]
    """
    return [
        Share(nodes=nodes, cpus=len(list(numbers(cpus))), gres=read_gres(gres))
        for nodes, cpus, gres in SHARE.findall(text)
    ]


def one_of(env: Mapping[str, str]) -> str:
    """What scontrol calls the one allocation that a shell is in, and srun begins steps of.

    An element of an array may have the array's number, of a job of several components (`salloc … :
    …`) the first one has the job's: by these scontrol would show all of them.

    >>> one_of({"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2"})
    '7+0'
    """
    return f"{env[JOB]}+0" if HET in env else own_job_id(env)


class CurrentAllocation(OnSlurm):
    """`cluster.allocation=current`."""

    def script(self, run: RunDir, attempt: int, place: Here) -> str:
        beside = ["--overlap"] if STEP in os.environ else []  # with the step that this shell is
        shape = [*shape_of(self.config.cluster), *beside]
        return step_script(self.config, run, attempt, place, shape)

    def check(self, request: Request) -> Admission:  # noqa: ARG002  # the configuration has it all
        """Raises `ClusterError` where there is no allocation, or one that is too small."""
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
        from orchestrator.clusters.slurm.queue.executor import Executor

        run = RunDir(request.run)
        self.lay_out(request)
        client, name = SlurmClient(self.config.cluster.slurm_conf), f"{request.attempt:03d}"
        # it is queued already, and runs
        Executor(run.submitit, request.text, name, lambda _: os.environ[JOB]).submit(
            Task(str(run.path))
        )
        own = {**client.environment("srun"), JOB: os.environ[JOB]}
        return StepHandle(request, run.submitit / f"{name}.sh", own)


def _too_small(asked: ClusterConfig, job: str, shares: Mapping[str, Share]) -> Iterator[str]:
    """What an allocation lacks, a sentence each; its nodes may differ."""
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
