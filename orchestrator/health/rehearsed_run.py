"""A rehearsed run, on simulated nodes or on SLURM, and the faults done to it."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import psutil

from orchestrator.agent.generations import GenerationRecord
from orchestrator.config.command_line import literally
from orchestrator.config.rules import planned_survival
from orchestrator.config.schema import Config, node_range
from orchestrator.errors import ClusterError, ConfigError, RunFailed
from orchestrator.health.faults import (
    ASK_TO_LEAVE,
    CUT,
    FILL_DISK,
    FREEZE_RANK,
    KILL_LAUNCHER,
    KILL_NODE,
    KILL_SCRIPT,
    KILL_TWO,
    LINKS,
    REQUEUE,
    SILENCE,
    STOP,
    Fault,
    FaultInjector,
)
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import Tail
from orchestrator.slurm_client import Job, SchedulerDown, SlurmClient, queued

AFTER_SILENCE_S = 3.0
"""How much longer than a silent rank may live the silence lasts."""
LEAST_FULL_S, FULL_S = 0.3, 5.0
NOTHING_S = 0.1
CLOSE = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalSpec:
    """Everything that the runs of a rehearsal share.

    Attributes:
        kinds: of faults.
        notes: what it goes without, and why.
    """

    config: Config
    overrides: tuple[str, ...]
    config_dir: str | None
    kinds: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def updates(self) -> int:
        return int(self.config.train.updates or 0)

    @property
    def to_the_bit(self) -> bool:
        """True if weights have to be those of the undisturbed run.

        On another number of ranks sums are rounded otherwise, unless they are reproducible.
        """
        least, most = node_range(self.config.cluster.nodes)
        same_ranks = not planned_survival(self.config).on and least == most
        return same_ranks or self.config.accumulation.reduction == "reproducible"

    @property
    def equality(self) -> str:
        """What "equal" means, in words."""
        if self.to_the_bit:
            return "the same loss in every update, and the same final weights, to the bit"
        return (
            f"the same samples in every update, and losses within {CLOSE:g}: "
            "accumulation.reduction=fast rounds otherwise on another number of ranks"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Injected:
    """A fault as it was injected.

    Attributes:
        gone: ranks that the others have to lose by it, or that lose all these others.
        others: the other ranks that lived then.
        whole_run: no rank is left by it, or all leave.
        lasts_s: it lasts until `RehearsedRun.lift`, so long at most.
    """

    text: str
    gone: frozenset[int] = frozenset()
    others: frozenset[int] = frozenset()
    whole_run: bool = False
    lasts_s: float = 0.0

    def is_complete(self, lost: AbstractSet[int]) -> bool:
        """Return True if all ranks are lost that it can take: one side of a cut."""
        return self.gone <= lost or (bool(self.others) and self.others <= lost)


class RehearsedRun(ABC):
    """One run, started as a person would."""

    def __init__(self, folder: Path, spec: RehearsalSpec) -> None:
        self.run, self._spec = RunDir(folder), spec
        self._tail = Tail(self.run.metrics)
        self.records: list[dict[str, Any]] = []
        self._output = folder.with_suffix(".log")
        self._command: subprocess.Popen[bytes] | None = None

    # ------------------------------------------------------------------ its command

    def launch(self) -> None:
        where = () if self._spec.config_dir is None else ("--config-dir", self._spec.config_dir)
        given = (*self._spec.overrides, f"run.dir={literally(str(self.run.path))}")
        self._start("orchestrator.launch", *where, *given, "-q")

    def resume(self) -> None:
        self._start("orchestrator", "resume", str(self.run.path), "-q")

    def _start(self, module: str, *words: str) -> None:
        with self._output.open("ab") as output:
            self._command = subprocess.Popen(
                [sys.executable, "-m", module, *words],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    @property
    def last_line(self) -> str:
        """The last line that its command printed."""
        lines = self._output.read_text("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """True once it does not continue by itself."""

    @property
    def is_queued(self) -> bool:
        """True while it waits in a queue, so that nothing can move."""
        return False

    @abstractmethod
    def end(self) -> None:
        """End all of it."""

    # ------------------------------------------------------------------ its folder

    def read_new(self) -> list[dict[str, Any]]:
        """Return the new records of updates."""
        new = [record for record in self._tail.read() if "loss" in record]
        self.records += new
        return new

    @property
    def current_update(self) -> int:
        return self.records[-1]["update"] + 1 if self.records else 0

    @property
    def finished(self) -> bool:
        return (self.run.read_result() or {}).get("state") == "finished"

    def noticed(self, since: float, attempt: int) -> bool:
        """Return True once the run has recorded a loss, in this attempt or by a further one."""
        generations = GenerationRecord(self.run.attempt(attempt)).since()
        if any(found["time"] >= since and found.get("gone") for found in generations):
            return True
        return self.run.attempts_made() > attempt + 1 or self.run.departure(attempt).exists()

    # ------------------------------------------------------------------ its ranks

    @abstractmethod
    def prepare(self, fault: Fault) -> None:
        """Start whatever the next fault needs, so that it comes in its moment."""

    @abstractmethod
    def _injector(self) -> LocalInjector | SlurmInjectors: ...

    @abstractmethod
    def _disturb_all(self, fault: Fault) -> bool:
        """Inject a fault that hits the whole run; return False for any other kind."""

    def inject(self, fault: Fault, update_s: float) -> Injected:
        """Inject a fault.

        Args:
            update_s: how long an update takes; a full disk lasts beyond the next checkpoint.
        """
        if self._disturb_all(fault):
            return Injected(text=fault.kind, whole_run=True)
        injector = self._injector()
        nodes = injector.nodes_of_ranks()
        if not nodes:
            return Injected(text=f"{fault.kind}: none was left")
        if fault.kind in (KILL_NODE, CUT, SILENCE):
            return self._disturb_node(fault, nodes)
        if fault.kind == FILL_DISK:
            injector.call("fill", sorted(nodes))
            updates = 1 + (self._spec.config.train.checkpoint_every or 0)
            lasts_s = min(FULL_S, max(LEAST_FULL_S, updates * update_s))
            return Injected(text=fault.kind, lasts_s=lasts_s)
        first = fault.choose(sorted(nodes))
        two = [rank for rank in sorted(nodes) if rank > first][:1] if fault.kind == KILL_TWO else []
        chosen, freeze = [first, *two], fault.kind == FREEZE_RANK
        injector.call("signal", chosen, signal.SIGSTOP if freeze else signal.SIGKILL)
        ranks = f"rank{'s' * len(two)} {' and '.join(map(str, chosen))}"
        return Injected(text=f"{'freeze' if freeze else 'kill'} {ranks}", gone=frozenset(chosen))

    def _disturb_node(self, fault: Fault, nodes: Mapping[int, str]) -> Injected:
        injector = self._injector()
        node = fault.choose(sorted(set(nodes.values())))
        ranks = sorted(rank for rank, of in nodes.items() if of == node)
        if fault.kind == KILL_NODE:
            self._kill_node(node, ranks)
            return Injected(text=f"kill {node}", gone=frozenset(ranks))
        alone = len(ranks) == len(nodes)  # no other node is left to be connected to
        outward = [] if alone else injector.call("outward", ranks)
        if not outward:
            return Injected(text=f"{fault.kind}: it had none", lasts_s=NOTHING_S)
        if fault.kind == CUT:
            injector.call("cut", ranks)
            return Injected(text=f"cut the links of {node}")  # they may be made anew at once
        injector.call("silence", outward, ranks)
        return Injected(
            text=f"silence {node}",
            gone=frozenset(ranks),
            others=frozenset(nodes.keys() - {*ranks}),
            lasts_s=self._spec.config.cluster.heartbeat_timeout_s + AFTER_SILENCE_S,
        )

    def _kill_node(self, node: str, ranks: list[int]) -> None:
        del node
        self._injector().call("signal", ranks, signal.SIGKILL)

    def renew(self) -> None:
        """Extend a lasting fault to new connections."""

    def lift(self) -> None:
        """End a lasting fault."""
        self._injector().call("lift")


RENEW_S = 0.05


class LocalInjector:
    """Fault injection into all ranks of a run on this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._injector = FaultInjector(self._ranks)

    def nodes_of_ranks(self) -> Mapping[int, str]:
        return {rank: node for rank, (_, node) in self.processes()[0].items()}

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return getattr(self._injector, method)(*arguments) or []

    def _ranks(self) -> Mapping[int, int]:
        return {rank: process.pid for rank, (process, _) in self.processes()[0].items()}

    def processes(
        self,
    ) -> tuple[dict[int, tuple[psutil.Process, str]], dict[str, psutil.Process]]:
        """Return the living ranks with their simulated nodes, and the agents by node."""
        ranks: dict[int, tuple[psutil.Process, str]] = {}
        nodes: dict[str, psutil.Process] = {}
        for process in psutil.process_iter(["name", "cmdline", "status"]):
            name = process.info["name"]
            ours = self._folder in " ".join(process.info["cmdline"] or [])
            if not ours or process.info["status"] in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
                continue
            with suppress(psutil.NoSuchProcess):  # it has ended since
                parent = process.parent()
                above = parent.name() if parent else ""
                if name.startswith("node"):
                    nodes[name] = process
                elif name.startswith("rank ") and above.startswith("node"):  # no fork of a rank's
                    ranks[int(name.removeprefix("rank "))] = process, above
        return ranks, {node: nodes[node] for _, node in ranks.values() if node in nodes}


class SimulatedRun(RehearsedRun):
    """A run on simulated nodes, in a session of its own."""

    _renewed = 0.0

    @property
    def ended(self) -> bool:
        assert self._command is not None  # noqa: S101  # it was started
        return self._command.poll() is not None

    def end(self) -> None:
        """Its processes end with the command."""
        if self._command is not None and self._command.poll() is None:
            self._command.kill()
            self._command.wait()

    def prepare(self, fault: Fault) -> None:
        """Do nothing: a fault here needs no process of its own."""

    @cached_property
    def _local(self) -> LocalInjector:
        return LocalInjector(self.run.path)

    def _injector(self) -> LocalInjector:
        return self._local

    def renew(self) -> None:
        """Look through all processes now and then, which takes some milliseconds."""
        if time.monotonic() - self._renewed > RENEW_S:
            self._local.call("renew")
            self._renewed = time.monotonic()

    def _disturb_all(self, fault: Fault) -> bool:
        if fault.kind not in (STOP, KILL_LAUNCHER):
            return False
        assert self._command is not None  # noqa: S101  # it was started
        self._command.send_signal(signal.SIGTERM if fault.kind == STOP else signal.SIGKILL)
        return True

    def _kill_node(self, node: str, ranks: list[int]) -> None:
        """Kill the agent, with which its ranks end."""
        del ranks
        with suppress(KeyError, psutil.NoSuchProcess):  # it has ended by itself
            self._local.processes()[1][node].kill()


ANSWER_S = 30.0


class SlurmInjectors:
    """Started ahead of a fault, since srun and Python take a moment; `close` when it is done."""

    def __init__(self, client: SlurmClient, job: str, nodes: int, run: str) -> None:
        count = str(nodes)
        self._nodes, self._unread = nodes, b""
        self._process = subprocess.Popen(
            ["srun", f"--jobid={job}", "--overlap", "--nodes", count, "--ntasks", count,
             "--ntasks-per-node=1", "--mem=0", "--gres=none", "--input=all", "--unbuffered",
             "--no-kill", "--kill-on-bad-exit=0", "--job-name=rehearsal",
             sys.executable, "-m", "orchestrator.health.faults", run],
            env=client.environment("srun"), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        said = self._answers()
        self._where = {rank: one["node"] for one in said for rank in one["ranks"]}
        self.refused = next((one["refused"] for one in said if one["refused"]), "")

    def nodes_of_ranks(self) -> Mapping[int, str]:
        """Return the ranks that lived when it was started, with their nodes."""
        return self._where

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on each node. Raises `ClusterError` if not all answer."""
        pipe = cast("Any", self._process.stdin)
        try:
            pipe.write(json.dumps({"word": method, "what": arguments}).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError as error:
            raise self._silent() from error
        return [given for one in self._answers() for given in one["gives"]]

    def close(self) -> None:
        """End the injectors, and with them the faults that last."""
        if self._process.poll() is None:
            cast("Any", self._process.stdin).close()
            try:
                self._process.wait(3.0)
            except subprocess.TimeoutExpired:  # it waits for a node that is gone
                self._process.kill()
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None and not pipe.closed:
                pipe.close()

    def _answers(self) -> list[dict[str, Any]]:
        """Return one answer of each node."""
        pipe, found = cast("Any", self._process.stdout), list[dict[str, Any]]()
        deadline = time.monotonic() + ANSWER_S
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while len(found) < self._nodes:
                left = deadline - time.monotonic()
                content = os.read(pipe.fileno(), 65536) if selector.select(left) else b""
                if not content:
                    raise self._silent()
                *lines, self._unread = (self._unread + content).split(b"\n")
                found += [json.loads(line) for line in lines if line.startswith(b"{")]
        return found

    def _silent(self) -> ClusterError:
        self._process.kill()
        words = cast("Any", self._process.stderr).read().decode("utf-8", "replace").strip()
        why = words or "srun does not answer"
        return ClusterError(f"fault injection does not run on all nodes of the job: {why}")


LOOK_S = 0.5
SOON_S, END_S = 10.0, 60.0


class SlurmRun(RehearsedRun):
    """Each launch and resume is a job."""

    def __init__(self, folder: Path, spec: RehearsalSpec) -> None:
        super().__init__(folder, spec)
        self._injectors: SlurmInjectors | None = None
        self._looked, self._job, self._settled = 0.0, None, False

    _job: Job | None

    @cached_property
    def _client(self) -> SlurmClient:
        return SlurmClient(self._spec.config.cluster.slurm_conf)

    def _start(self, module: str, *words: str) -> None:
        """Run a command that queues a job. Raises `RunFailed` if it does not."""
        super()._start(module, *words)
        assert self._command is not None  # noqa: S101  # it was started
        if self._command.wait():
            raise RunFailed(f"{' '.join(words)}: {self.last_line}")
        self._looked, self._settled = 0.0, False

    def resume(self) -> None:
        self._close_injectors()
        super().resume()

    @property
    def _id(self) -> str:
        handle = self.run.read_handle()
        if handle is None:
            raise RunFailed(f"{self.run.path} has no job")
        return str(handle["job_id"])

    def _ask(self) -> Job | None:
        """Return the job as squeue knew it a moment ago; release it if it is held."""
        if time.monotonic() - self._looked > LOOK_S:
            try:
                self._job = queued(self._client, [self._id]).get(self._id)
            except SchedulerDown:  # what is not known now will be later
                return self._job
            finally:
                self._looked = time.monotonic()
            if self._job is not None and self._job.held and not self.finished:
                self._client.must("scontrol", "release", self._id)
        return self._job

    @property
    def ended(self) -> bool:
        job = self._ask()
        if job is None or job.alive:
            return False
        if self.run.read_result() is None and not self._settled:  # as a person would look
            super()._start("orchestrator", "status", str(self.run.path))
            assert self._command is not None  # noqa: S101  # it was started
            self._command.wait()
            self._looked, self._settled = 0.0, True
            return False
        return True

    @property
    def is_queued(self) -> bool:
        job = self._ask()
        return job is not None and job.waiting

    def end(self) -> None:
        self._close_injectors()
        if self.run.read_handle() is not None:
            self._cancel()

    def _cancel(self) -> None:
        self._client.ask("scancel", self._id)
        deadline = time.monotonic() + END_S
        while (job := queued(self._client, [self._id]).get(self._id)) and job.alive:
            if time.monotonic() > deadline:
                raise ClusterError(f"job {self._id} is {job.state} a minute after scancel")
            time.sleep(LOOK_S)

    # ------------------------------------------------------------------ its ranks

    def _nodes(self) -> list[str]:
        listed = self._client.must("squeue", "-h", "-j", self._id, "-o", "%N").strip()
        return self._client.must("scontrol", "show", "hostnames", listed).split() if listed else []

    def prepare(self, fault: Fault) -> None:
        self._close_injectors()
        if fault.kind in (STOP, KILL_SCRIPT, REQUEUE, ASK_TO_LEAVE):
            return
        try:
            nodes = len(self._nodes())
            self._injectors = SlurmInjectors(self._client, self._id, nodes, str(self.run.path))
        except ClusterError:
            if not self._ends_soon():
                raise
            return
        if fault.kind in LINKS and self._injectors.refused:
            raise ConfigError(f"{fault.kind}: {self._injectors.refused}; leave it out by --only")

    def _ends_soon(self) -> bool:
        """Return True if a command failed because the job is over, or nearly so."""
        deadline = time.monotonic() + SOON_S
        while not self.ended and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return self.ended

    def inject(self, fault: Fault, update_s: float) -> Injected:
        try:
            return super().inject(fault, update_s)
        except ClusterError:
            if not self._ends_soon():
                raise
            return Injected(text=f"{fault.kind}: none was left")

    def _injector(self) -> SlurmInjectors:
        assert self._injectors is not None  # noqa: S101  # it was armed
        return self._injectors

    def _close_injectors(self) -> None:
        if self._injectors is not None:
            self._injectors.close()
            self._injectors = None

    def lift(self) -> None:
        """End the injectors, and with them what they hold."""
        self._close_injectors()

    def _disturb_all(self, fault: Fault) -> bool:
        if fault.kind == STOP:
            super()._start("orchestrator", "cancel", str(self.run.path))
        elif fault.kind == KILL_SCRIPT:
            self._client.must("scancel", "--batch", "--signal=KILL", self._id)
        elif fault.kind == REQUEUE:
            self._client.must("scontrol", "requeue", self._id)
        elif fault.kind == ASK_TO_LEAVE:
            self._client.must("scancel", "--signal=USR2", self._id)
        else:
            return False
        return True
