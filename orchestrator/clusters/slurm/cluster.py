"""The SLURM clusters: new jobs, and steps of an existing allocation.

`SlurmCluster` submits batch scripts and finds runs again by their job ids. A submitted run does not
need its launcher: `SlurmHandle` is made from the run folder alone, in any shell, days later.

`CurrentAllocation` (`cluster.allocation=current`) starts the ranks as a step of the user's existing
allocation (an salloc, a batch job). The launcher holds the run to its end, as with simulated
nodes; nothing is queued, requeued or cancelled. Its script passes USR2 on to the ranks, which is a
stop, and TERM to srun, which ends them at once; if the launcher dies, the kernel sends it TERM.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from orchestrator import snapshot
from orchestrator.agent.processes import die_with
from orchestrator.clusters.api import Admission, Cluster, Handle, Request, State
from orchestrator.clusters.slurm.admission import (
    Gres,
    Verdict,
    check_request,
    read_gres,
    too_slow,
    wanted,
)
from orchestrator.clusters.slurm.arrays import foresee, submit_as_arrays
from orchestrator.clusters.slurm.batch_script import (
    Here,
    all_options,
    batch_script,
    script_name,
    shape_of,
    step_script,
)
from orchestrator.clusters.slurm.code_copy import SCRIPT, after_node
from orchestrator.clusters.slurm.handle import SlurmHandle
from orchestrator.clusters.slurm.root_cause import culprit_without_outcome
from orchestrator.clusters.slurm.safe_values import (
    check_clusters,
    check_defaults,
    check_preamble,
    check_values,
    quoted,
)
from orchestrator.clusters.slurm.submission import UNLIKE, here, retry_unanswered
from orchestrator.clusters.slurm.task import Task, write_task
from orchestrator.clusters.slurm.trust import client_of, remember
from orchestrator.config.program import target_of
from orchestrator.config.schema import ClusterConfig, Config, gpu_count, node_range
from orchestrator.errors import ClusterError
from orchestrator.rundir.files import APPENDING, open_nofollow, write_atomically
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import read_outcome
from orchestrator.rundir.status import RunStatus
from orchestrator.slurm_client import STOP_CODES, SlurmClient, numbers, own_job_id
from orchestrator.snapshot import shorten
from orchestrator.units import plural


class OnSlurm(Cluster):
    """The machine's SLURM, or the one of `cluster.slurm_conf`."""

    def trust(self, run: RunDir, typed: Collection[str] | None = None) -> None:
        conf = self.config.cluster.slurm_conf
        if conf is not None:
            if typed is None or "cluster.slurm_conf" in typed:
                remember(conf)
            client_of(run, conf)

    def request(self, run: Path, attempt: int, copy: Path | None = None) -> Request:
        """Return the submission as a value; `text` is the exact script.

        Args:
            copy: where the code's shared copy is; None: in the run's folder.
        """
        config, folder = self.decided, RunDir(run)
        check_values(config, run, Path.cwd())
        place = here(config, copy or folder.snapshot(attempt))
        check_clusters(os.environ)
        check_defaults(place.defaults)
        check_preamble(config.cluster.preamble)
        script = self.script(folder, attempt, place)
        options = {
            k: v if v is True else str(v) for k, v in all_options(config, folder, place).items()
        }
        return Request(
            run=run,
            attempt=attempt,
            nodes=node_range(config.cluster.nodes)[1],
            ranks_per_node=config.cluster.ranks_per_node,
            environment=dict(config.cluster.environment),
            text=script,
            details={"sbatch": script, "options": options},
        )

    @abstractmethod
    def script(self, run: RunDir, attempt: int, place: Here) -> str:
        """Return the exact script that starts the ranks."""

    def lay_out(self, request: Request) -> None:
        """Write the run's code and clean-up script to its folder."""
        run = RunDir(request.run)
        if self.config.run.snapshot:
            self.copy_code(run.path, run.snapshot(request.attempt))
        self.write_epilog(run)

    def copy_code(self, run: Path, into: Path) -> None:
        """Copy the run's code, and report the files left out."""
        left_out = snapshot.take(target_of(self.config.job), run, into)
        if left_out:
            self.tell(
                f"the copy of the code leaves out what holds secrets by its name, and links "
                f"that lead elsewhere: {shorten(left_out)}"
            )

    def write_epilog(self, run: RunDir) -> None:
        """Write the script that srun starts after a node's task."""
        run.submitit.mkdir(mode=0o700, exist_ok=True)
        script = run.submitit / SCRIPT
        write_atomically(script, after_node(run, quoted(run.path)))
        script.chmod(0o700)


_answers: dict[tuple[object, ...], Verdict] = {}


class SlurmCluster(OnSlurm):
    """The machine's SLURM, or the one of `cluster.slurm_conf`."""

    attended = False
    look_every_s = 15.0  # administrators ask for at most four calls of squeue a minute

    def script(self, run: RunDir, attempt: int, place: Here) -> str:
        return batch_script(self.decided, run, attempt, place)

    @classmethod
    def chosen(cls, config: Config) -> type[Cluster]:
        if config.cluster.allocation == "new":
            return cls

        return CurrentAllocation

    def check(self, request: Request) -> Admission:
        """Ask the scheduler. Raises `ClusterError` if it would never run the request.

        Equal requests, as a sweep's points, are asked about once per process.
        """
        cluster, options = self.config.cluster, request.details["options"]
        alike = (cluster.slurm_conf, *((k, v) for k, v in options.items() if k not in UNLIKE))
        if alike not in _answers:
            client = SlurmClient(cluster.slurm_conf)
            job = wanted(
                options,
                nodes=node_range(cluster.nodes),
                cpus=cluster.ranks_per_node * cluster.cpus_per_rank,
            )
            _answers[alike] = retry_unanswered(
                lambda: check_request(client, job, request.text), tell=self.tell
            )
        said = _answers[alike]
        slow = too_slow(self.config, said.grace_s(self.config))
        return Admission(
            words=said.words + self._survives(),
            warnings=(*said.warnings, *([slow] if slow else [])),
            notice={"preempt_grace_s": said.preempt_grace_s, "kill_wait_s": said.kill_wait_s},
        )

    def _survives(self) -> str:
        """Describe which losses the run survives."""
        if not self.survival.on:
            return ""
        nodes = self.config.cluster.nodes
        least = plural(1 if isinstance(nodes, int) else node_range(nodes)[0], "node")
        return (
            f"; a rank or a node that is lost does not end it, down to {least}, but its first node "
            "set down does: it goes back to the queue then, with a checkpoint"
        )

    def submit(self, request: Request) -> SlurmHandle:
        """Queue the request, and write the job's id to the run folder."""
        from orchestrator.clusters.slurm.executor import Executor
        from orchestrator.clusters.slurm.submission import queue

        run = RunDir(request.run)
        self.lay_out(request)
        number, conf = request.attempt, self.config.cluster.slurm_conf

        def place(script: Path) -> str:
            return queue(run, script, number, conf, tell=self.tell)

        write_task(run)
        executor = Executor(run.submitit, request.text, script_name(number), place)
        executor.submit(Task(str(run.path)))
        return SlurmHandle(run)

    @classmethod
    def submit_all(
        cls, placed: Sequence[tuple[Cluster, Request]], at_once: int | None = None
    ) -> None:
        """Submit runs as arrays, see `arrays.py`."""
        submit_as_arrays([(c, r) for c, r in placed if isinstance(c, SlurmCluster)], at_once)

    @classmethod
    def foresee_all(cls, placed: Sequence[tuple[Cluster, Request]], most: int | None) -> list[str]:
        """Predict the site's limits, see `arrays.py`."""
        del most
        return foresee([(c, r) for c, r in placed if isinstance(c, SlurmCluster)])

    @classmethod
    def adopt(cls, folder: RunDir) -> str:
        """Complete an interrupted submission, see `submission.py`."""
        from orchestrator.clusters.slurm.submission import adopt

        return adopt(folder)

    @classmethod
    def cancel_all(cls, runs: Sequence[RunDir], *, now: bool) -> dict[Path, str]:
        """Cancel runs by one scancel; see `handle.py`."""
        from orchestrator.clusters.slurm.handle import cancel_all

        return cancel_all(runs, now=now)

    @classmethod
    def handle(cls, run: RunDir) -> SlurmHandle:
        return SlurmHandle(run)

    @classmethod
    def look(cls, runs: Sequence[RunDir], found: dict[Path, RunStatus]) -> Iterator[str]:
        from orchestrator.clusters.slurm.status import look

        return look(runs, found)


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


class CurrentAllocation(OnSlurm):
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
        from orchestrator.clusters.slurm.executor import Executor

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
