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
from typing import Any, Protocol, cast

import psutil

from orchestrator.config.command_line import literally
from orchestrator.errors import ClusterError, ConfigError, RunFailed
from orchestrator.health.faults import FaultInjector
from orchestrator.health.rehearsal import (
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
    RehearsalSpec,
)
from orchestrator.lifecycle.survival.record import GenerationRecord
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import Tail
from orchestrator.slurm_client import Job, SchedulerDown, SlurmClient, queued

AFTER_SILENCE_S = 3.0
"""How much longer than a silent rank may live the silence lasts."""
LEAST_FULL_S, FULL_S = 0.3, 5.0
NOTHING_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Injected:
    """What was done.

    Attributes:
        said: in words.
        gone: ranks that the others have to lose by it, or that lose all these others.
        others: those that lived beside them.
        whole_run: no rank is left by it, or all leave.
        lasts_s: it lasts until `RehearsedRun.lift`, so long at most.
    """

    said: str
    gone: frozenset[int] = frozenset()
    others: frozenset[int] = frozenset()
    whole_run: bool = False
    lasts_s: float = 0.0

    def is_over(self, lost: AbstractSet[int]) -> bool:
        """Whether all are lost that this harm can take: one of both sides of a cut."""
        return self.gone <= lost or (bool(self.others) and self.others <= lost)


class Reach(Protocol):
    """Fault injection into the ranks of a run."""

    def where(self) -> Mapping[int, str]:
        """The living ranks, by their numbers, with their nodes."""
        ...

    def tell(self, word: str, *what: Any) -> list[Any]:
        """Have every hand do what its method `word` does; what they give, one after another."""
        ...


class RehearsedRun(ABC):
    """One run, started as a person would."""

    def __init__(self, folder: Path, asked: RehearsalSpec) -> None:
        self.run, self._asked = RunDir(folder), asked
        self._tail = Tail(self.run.metrics)
        self.records: list[dict[str, Any]] = []
        self._output = folder.with_suffix(".log")
        self._command: subprocess.Popen[bytes] | None = None

    # ------------------------------------------------------------------ its command

    def launch(self) -> None:
        where = () if self._asked.config_dir is None else ("--config-dir", self._asked.config_dir)
        given = (*self._asked.overrides, f"run.dir={literally(str(self.run.path))}")
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
    def last_words(self) -> str:
        """Of its command."""
        lines = self._output.read_text("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether it goes on no more by itself."""

    @property
    def waits(self) -> bool:
        """Whether it waits for its turn, so that nothing can move."""
        return False

    @abstractmethod
    def end(self) -> None:
        """End all of it."""

    # ------------------------------------------------------------------ its folder

    def look(self) -> list[dict[str, Any]]:
        """Lines of updates that are new."""
        new = [record for record in self._tail.read() if "loss" in record]
        self.records += new
        return new

    @property
    def finished(self) -> bool:
        return (self.run.read_result() or {}).get("state") == "finished"

    def noticed(self, since: float, attempt: int) -> bool:
        """Whether the run, in this attempt or by another one, has taken note of a loss."""
        generations = GenerationRecord(self.run.attempt(attempt)).since()
        if any(found["time"] >= since and found.get("gone") for found in generations):
            return True
        return self.run.attempts_made() > attempt + 1 or self.run.departure(attempt).exists()

    # ------------------------------------------------------------------ its ranks

    @abstractmethod
    def arm(self, fault: Fault) -> None:
        """Make ready for what comes next, so that it comes in its moment."""

    @abstractmethod
    def _reach(self) -> Reach: ...

    @abstractmethod
    def _hurt_all(self, fault: Fault) -> Injected | None:
        """Do what is not done to ranks; None of any other kind."""

    def hurt(self, fault: Fault, update_s: float) -> Injected:  # noqa: PLR0911  # a kind of fault each
        """Do it.

        Args:
            update_s: how long an update takes; a full disk lasts beyond the next checkpoint.
        """
        done = self._hurt_all(fault)
        if done is not None:
            return done
        reach = self._reach()
        where = reach.where()
        if not where:
            return Injected(said=f"{fault.kind}: none was left")
        if fault.kind in (KILL_NODE, CUT, SILENCE):
            node = fault.of(sorted(set(where.values())))
            its = sorted(rank for rank, of in where.items() if of == node)
            if fault.kind == KILL_NODE:
                self._kill_node(node, its)
                return Injected(said=f"kill {node}", gone=frozenset(its))
            if len(its) == len(where):  # no other node is left to be connected to
                return Injected(said=f"{fault.kind}: it had none", lasts_s=NOTHING_S)
            return self._part(fault, node, its, sorted({*where} - {*its}))
        if fault.kind == FILL_DISK:
            reach.tell("fill", sorted(where))
            updates = 1 + (self._asked.config.train.checkpoint_every or 0)
            return Injected(
                said=fault.kind, lasts_s=min(FULL_S, max(LEAST_FULL_S, updates * update_s))
            )
        first = fault.of(sorted(where))
        two = [rank for rank in sorted(where) if rank > first][:1] if fault.kind == KILL_TWO else []
        chosen, freeze = [first, *two], fault.kind == FREEZE_RANK
        reach.tell("signal", chosen, signal.SIGSTOP if freeze else signal.SIGKILL)
        said = f"rank{'s' * len(two)} {' and '.join(map(str, chosen))}"
        return Injected(said=f"{'freeze' if freeze else 'kill'} {said}", gone=frozenset(chosen))

    def _part(self, fault: Fault, who: str, ranks: list[int], others: list[int]) -> Injected:
        """Part these from the others."""
        reach = self._reach()
        outward = reach.tell("outward", ranks)
        if not outward:
            return Injected(said=f"{fault.kind}: it had none", lasts_s=NOTHING_S)
        if fault.kind == CUT:
            reach.tell("cut", ranks)
            return Injected(said=f"cut the links of {who}")  # they are whole again at once
        reach.tell("silence", outward, ranks)
        lasts_s = self._asked.config.cluster.heartbeat_timeout_s + AFTER_SILENCE_S
        return Injected(
            said=f"silence {who}", gone=frozenset(ranks), others=frozenset(others), lasts_s=lasts_s
        )

    def _kill_node(self, node: str, ranks: list[int]) -> None:
        del node
        self._reach().tell("signal", ranks, signal.SIGKILL)

    @abstractmethod
    def keep_up(self) -> None:
        """While something lasts: it holds for what is new as well."""

    def lift(self) -> None:
        """End what lasts."""
        self._reach().tell("lift")


KEEP_UP_S = 0.05


class LocalInjector:
    """The hand at all ranks of a run folder; there is one machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._hand = FaultInjector(self._ranks)

    def where(self) -> Mapping[int, str]:
        return {rank: node for rank, (_, node) in self.processes()[0].items()}

    def tell(self, word: str, *what: Any) -> list[Any]:
        return getattr(self._hand, word)(*what) or []

    def _ranks(self) -> Mapping[int, int]:
        return {rank: process.pid for rank, (process, _) in self.processes()[0].items()}

    def processes(
        self,
    ) -> tuple[dict[int, tuple[psutil.Process, str]], dict[str, psutil.Process]]:
        """Its living ranks, by their numbers, with their simulated nodes; and these, by name."""
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
    """In a session of its own."""

    _kept_up = 0.0

    @property
    def ended(self) -> bool:
        assert self._command is not None  # noqa: S101  # it was started
        return self._command.poll() is not None

    def end(self) -> None:
        """Its processes end with the command."""
        if self._command is not None and self._command.poll() is None:
            self._command.kill()
            self._command.wait()

    def arm(self, fault: Fault) -> None:
        """What is needed is here."""

    @cached_property
    def _near(self) -> LocalInjector:
        return LocalInjector(self.run.path)

    def _reach(self) -> LocalInjector:
        return self._near

    def keep_up(self) -> None:
        """Looking through all processes takes some milliseconds, and is of use now and then."""
        if time.monotonic() - self._kept_up > KEEP_UP_S:
            self._near.tell("renew")
            self._kept_up = time.monotonic()

    def _hurt_all(self, fault: Fault) -> Injected | None:
        if fault.kind not in (STOP, KILL_LAUNCHER):
            return None
        assert self._command is not None  # noqa: S101  # it was started
        self._command.send_signal(signal.SIGTERM if fault.kind == STOP else signal.SIGKILL)
        return Injected(said=fault.kind, whole_run=True)

    def _kill_node(self, node: str, ranks: list[int]) -> None:
        """By its own process, as `node` is its ranks' parent: these end with it."""
        del ranks
        with suppress(KeyError, psutil.NoSuchProcess):  # it has ended by itself
            self._near.processes()[1][node].kill()


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

    def where(self) -> Mapping[int, str]:
        """The ranks that lived when it was started, with their nodes."""
        return self._where

    def tell(self, word: str, *what: Any) -> list[Any]:
        """Raises `ClusterError` where not all nodes answer."""
        pipe = cast("Any", self._process.stdin)
        try:
            pipe.write(json.dumps({"word": word, "what": what}).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError as error:
            raise self._silent() from error
        return [given for one in self._answers() for given in one["gives"]]

    def close(self) -> None:
        """What lasts is lifted, where the nodes still hear it."""
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
        """One line of each node."""
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
        return ClusterError(f"no hand on all nodes of the job: {words or 'srun does not answer'}")


LOOK_S = 0.5
SOON_S, END_S = 10.0, 60.0


class SlurmRun(RehearsedRun):
    """Each launch and resume is a job."""

    def __init__(self, folder: Path, asked: RehearsalSpec) -> None:
        super().__init__(folder, asked)
        self._hands: SlurmInjectors | None = None
        self._looked, self._job, self._settled = 0.0, None, False

    _job: Job | None

    @cached_property
    def _client(self) -> SlurmClient:
        return SlurmClient(self._asked.config.cluster.slurm_conf)

    def _start(self, module: str, *words: str) -> None:
        """Raises `RunFailed` where it is not queued."""
        super()._start(module, *words)
        assert self._command is not None  # noqa: S101  # it was started
        if self._command.wait():
            raise RunFailed(f"{' '.join(words)}: {self.last_words}")
        self._looked, self._settled = 0.0, False

    def resume(self) -> None:
        self._let_go()
        super().resume()

    @property
    def _id(self) -> str:
        handle = self.run.read_handle()
        if handle is None:
            raise RunFailed(f"{self.run.path} has no job")
        return str(handle["job_id"])

    def _ask(self) -> Job | None:
        """The job, as squeue knew it a moment ago; one that waits for a person is let go."""
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
    def waits(self) -> bool:
        job = self._ask()
        return job is not None and job.waiting

    def end(self) -> None:
        self._let_go()
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

    def arm(self, fault: Fault) -> None:
        self._let_go()
        if fault.kind in (STOP, KILL_SCRIPT, REQUEUE, ASK_TO_LEAVE):
            return
        try:
            nodes = len(self._nodes())
            self._hands = SlurmInjectors(self._client, self._id, nodes, str(self.run.path))
        except ClusterError:
            if not self._ends_soon():
                raise
            return
        if fault.kind in LINKS and self._hands.refused:
            raise ConfigError(f"{fault.kind}: {self._hands.refused}; leave it out by --only")

    def _ends_soon(self) -> bool:
        """Whether a command failed since the job is over, or all but that."""
        deadline = time.monotonic() + SOON_S
        while not self.ended and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return self.ended

    def hurt(self, fault: Fault, update_s: float) -> Injected:
        try:
            return super().hurt(fault, update_s)
        except ClusterError:
            if not self._ends_soon():
                raise
            return Injected(said=f"{fault.kind}: none was left")

    def _reach(self) -> SlurmInjectors:
        assert self._hands is not None  # noqa: S101  # it was armed
        return self._hands

    def _let_go(self) -> None:
        if self._hands is not None:
            self._hands.close()
            self._hands = None

    def keep_up(self) -> None:
        """The hands do it by themselves."""

    def lift(self) -> None:
        """The hands' end is the end of what they hold."""
        self._let_go()

    def _hurt_all(self, fault: Fault) -> Injected | None:
        if fault.kind == STOP:
            super()._start("orchestrator", "cancel", str(self.run.path))
        elif fault.kind == KILL_SCRIPT:
            self._client.must("scancel", "--batch", "--signal=KILL", self._id)
        elif fault.kind == REQUEUE:
            self._client.must("scontrol", "requeue", self._id)
        elif fault.kind == ASK_TO_LEAVE:
            self._client.must("scancel", "--signal=USR2", self._id)
        else:
            return None
        return Injected(said=fault.kind, whole_run=True)
