"""A rehearsed run, on simulated nodes or on SLURM, and the faults injected into it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from orchestrator.clusters.slurm.scheduler import ScheduledJob, SchedulerDown, SlurmClient, queued
from orchestrator.config.command_line import quote_for_hydra
from orchestrator.config.rules import planned_survival
from orchestrator.config.schema import Config, node_range
from orchestrator.errors import ClusterError, RunFailed
from orchestrator.rehearse.faults import (
    ASK_TO_LEAVE,
    FREEZE_NODE,
    KILL_LAUNCHER,
    KILL_SCRIPT,
    REQUEUE,
    STOP,
    Fault,
    Injected,
    choose,
    find_ranks,
    inject,
    processes_of,
)
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.generations import GenerationRecord
from orchestrator.rundir.metrics import Kind, Tail, updates_of
from orchestrator.runs.cancel import cancel
from orchestrator.runs.status import statuses

CLOSE = 1e-4
END_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalSpec:
    """The values that all runs of a rehearsal share.

    Attributes:
        flags: that choose the configuration's files.
        kinds: of faults.
        notes: what the runs go without, and why.
    """

    config: Config
    overrides: tuple[str, ...]
    flags: tuple[str, ...]
    kinds: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def updates(self) -> int:
        return int(self.config.train.updates or 0)

    @property
    def to_the_bit(self) -> bool:
        """True if a run with faults must end with the weights of the fault-free one.

        On another number of ranks sums are rounded otherwise, unless they are reproducible.
        """
        least, most = node_range(self.config.cluster.nodes)
        same_ranks = not planned_survival(self.config).on and least == most
        return same_ranks or self.config.accumulation.reduction == "reproducible"

    @property
    def equality(self) -> str:
        """Describe the meaning of "equal"."""
        if self.to_the_bit:
            return "the same loss in every update, and the same final weights, to the bit"
        return (
            f"the same samples in every update, and losses within {CLOSE:g}: "
            "accumulation.reduction=fast rounds otherwise on another number of ranks"
        )


class RehearsedRun(ABC):
    """One run, started by the commands that a person would type."""

    def __init__(self, folder: Path, spec: RehearsalSpec) -> None:
        self.run, self._spec = RunDir(folder), spec
        self._tail = Tail(self.run.metrics)
        self.records: list[dict[str, Any]] = []
        self._output = folder.with_suffix(".log")

    def launch(self) -> None:
        overrides = (*self._spec.overrides, f"run.dir={quote_for_hydra(str(self.run.path))}")
        self._start("orchestrator.launch", *self._spec.flags, *overrides, "-q")

    def resume(self) -> None:
        self._start("orchestrator", "resume", str(self.run.path), "-q")

    @abstractmethod
    def _start(self, module: str, *arguments: str) -> None:
        """Start the run by a command."""

    def _begin(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        with self._output.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def last_line(self) -> str:
        """The last line that its commands printed."""
        lines = self._output.read_text("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""

    def read_new(self) -> list[dict[str, Any]]:
        """Return the new records of updates and of changes of the group."""
        shown = (Kind.UPDATE, Kind.CHANGE)
        new = [record for record in self._tail.read() if Kind.of(record) in shown]
        self.records += new
        return new

    @property
    def current_update(self) -> int:
        updates = updates_of(self.records)
        return updates[-1]["update"] + 1 if updates else 0

    @property
    def finished(self) -> bool:
        return (self.run.read_result() or {}).get("state") == "finished"

    def noticed(self, since: float, attempt: int) -> bool:
        """Return True once the run has recorded a loss, in this attempt or by a further one."""
        generations = GenerationRecord(self.run.attempt(attempt)).since()
        if any(
            generation["time"] >= since and generation.get("gone") for generation in generations
        ):
            return True
        ends = (self.run.departure(attempt), self.run.decision(attempt))
        return self.run.attempts_made() > attempt + 1 or any(path.exists() for path in ends)

    @property
    @abstractmethod
    def ended(self) -> bool:
        """True once the run does not continue by itself."""

    @property
    def is_queued(self) -> bool:
        """True while the run waits in a queue."""
        return False

    @abstractmethod
    def end(self) -> None:
        """End all processes of the run."""

    def inject(self, fault: Fault) -> Injected:
        if self._disturb_all(fault.kind):
            return Injected(text=fault.kind, whole_run=True)
        return self._disturb_ranks(fault)

    @abstractmethod
    def _disturb_all(self, kind: str) -> bool:
        """Inject a fault that hits the whole run; return False for any other kind."""

    @abstractmethod
    def _disturb_ranks(self, fault: Fault) -> Injected:
        """Inject a fault that hits some ranks."""


class SimulatedRun(RehearsedRun):
    """A run on simulated nodes, whose launcher is a process of ours."""

    _launcher: subprocess.Popen[bytes]

    def _start(self, module: str, *arguments: str) -> None:
        self._launcher = self._begin(module, *arguments)

    @property
    def ended(self) -> bool:
        return self._launcher.poll() is not None

    def end(self) -> None:
        """Kill the launcher, and wait for the run's processes; they end with their launcher.

        Raises:
            ClusterError: some do not.
        """
        self._launcher.kill()
        self._launcher.wait()
        # A stopped node is given some seconds before it is killed.
        named = processes_of(str(self.run.path))
        nodes = [
            process
            for process in named
            if "orchestrator.agent.local_nodes" in process.info["cmdline"]
        ]
        _, left = psutil.wait_procs(nodes, END_S)
        if left:
            pids = ", ".join(str(process.pid) for process in left)
            raise ClusterError(f"processes of {self.run.path} do not end: {pids}")

    def _disturb_all(self, kind: str) -> bool:
        if kind not in (STOP, KILL_LAUNCHER):
            return False
        self._launcher.send_signal(signal.SIGTERM if kind == STOP else signal.SIGKILL)
        return True

    def _disturb_ranks(self, fault: Fault) -> Injected:
        ranks = find_ranks(str(self.run.path))
        if fault.kind == FREEZE_NODE and len({process.node for process in ranks.values()}) == 1:
            return Injected(text=f"{fault.kind}: only one was left")
        return inject(fault.kind, fault.target, ranks)


SRUN_OPTIONS = (
    "--overlap",
    "--ntasks=1",
    "--mem=0",
    "--gres=none",
    "--input=none",
    "--no-kill",
    "--kill-on-bad-exit=0",
    "--job-name=rehearsal",
)
POLL_S = 0.5
ANSWER_S, SOON_S = 30.0, 10.0


class SlurmRun(RehearsedRun):
    """A run on SLURM: each launch and resume is a job."""

    def __init__(self, folder: Path, spec: RehearsalSpec) -> None:
        super().__init__(folder, spec)
        self._client = SlurmClient(spec.config.cluster.slurm_conf)
        self._job: ScheduledJob | None = None
        self._polled = 0.0

    def _start(self, module: str, *arguments: str) -> None:
        """Run a command to its end. Raises `RunFailed` if it fails."""
        if self._begin(module, *arguments).wait():
            raise RunFailed(f"{' '.join(arguments)}: {self.last_line}")
        self._polled = 0.0

    @property
    def job_id(self) -> str:
        handle = self.run.read_handle()
        if handle is None:
            raise RunFailed(f"{self.run.path} has no job")
        return str(handle["job_id"])

    def _poll(self) -> ScheduledJob | None:
        """Return the job as squeue knew it a moment ago; release it if it is held."""
        if time.monotonic() - self._polled > POLL_S:
            try:
                self._job = queued(self._client, [self.job_id]).get(self.job_id)
            except SchedulerDown:  # it will answer later
                return self._job
            finally:
                self._polled = time.monotonic()
            if self._job is not None and self._job.held:
                self._client.check_output("scontrol", "release", self.job_id)
        return self._job

    @property
    def ended(self) -> bool:
        job = self._poll()
        if job is None or job.alive:
            return False
        if self.run.read_result() is not None:
            return True
        statuses([self.run])  # finalizes it, or returns it to the queue
        self._polled = 0.0
        return False

    @property
    def is_queued(self) -> bool:
        job = self._poll()
        return job is not None and job.waiting

    def nodes(self) -> list[str]:
        """Return the nodes that the job has. Raises `ClusterError`."""
        listed = self._client.check_output("squeue", "-h", "-j", self.job_id, "-o", "%N").strip()
        return self._client.check_output("scontrol", "show", "hostnames", listed).split()

    def end(self) -> None:
        if self.run.read_handle() is None:
            return
        self._client.run("scancel", self.job_id)
        deadline = time.monotonic() + END_S
        while (job := queued(self._client, [self.job_id]).get(self.job_id)) and job.alive:
            if time.monotonic() > deadline:
                raise ClusterError(f"job {self.job_id} is {job.state} a minute after scancel")
            time.sleep(POLL_S)

    def _disturb_all(self, kind: str) -> bool:
        commands = {
            KILL_SCRIPT: ("scancel", "--batch", "--signal=KILL", self.job_id),
            REQUEUE: ("scontrol", "requeue", self.job_id),
            ASK_TO_LEAVE: ("scancel", "--signal=USR2", self.job_id),
        }
        if kind == STOP:
            with suppress(ClusterError):  # it has ended by itself
                cancel(self.run)
        elif kind in commands:
            self._client.check_output(*commands[kind])
        else:
            return False
        return True

    def _disturb_ranks(self, fault: Fault) -> Injected:
        """Run `faults.main` on one node of the job.

        Raises:
            ClusterError: it does not run there, although the job continues.
        """
        try:
            return self._run_step(fault, choose(self.nodes(), fault.target))
        except ClusterError:
            deadline = time.monotonic() + SOON_S
            while not self.ended:  # the step failed because the job is over, or nearly so
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)
            return Injected(text=f"{fault.kind}: none was left")

    def _run_step(self, fault: Fault, node: str) -> Injected:
        module = (sys.executable, "-m", "orchestrator.rehearse.faults")
        arguments = (str(self.run.path), fault.kind, str(fault.target))
        try:
            done = subprocess.run(
                [
                    *("srun", f"--jobid={self.job_id}", f"--nodelist={node}", "--nodes=1"),
                    *(*SRUN_OPTIONS, *module, *arguments),
                ],
                env=self._client.environment("srun"),
                capture_output=True,
                text=True,
                timeout=ANSWER_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"srun on {node} does not answer") from error
        if not done.stdout:
            raise ClusterError(f"fault injection does not run on {node}: {done.stderr.strip()}")
        injected = json.loads(done.stdout)
        return Injected(text=injected["text"], gone=frozenset(injected["gone"]))
