"""A rehearsed run that is a SLURM job. What hurts its ranks runs in the job's own allocation, so a
user may do it on any cluster. No daemon of SLURM is touched.
"""

from __future__ import annotations

import time
from functools import cached_property
from pathlib import Path

from orchestrator.errors import ClusterError, ConfigError, RunFailed
from orchestrator.rehearse.asked import Asked
from orchestrator.rehearse.drawing import (
    KILL_SCRIPT,
    LINKS,
    NOTICE,
    REQUEUE,
    STOP,
    Fault,
)
from orchestrator.rehearse.outside import Harm, Outside
from orchestrator.rehearse.slurm.hands import Hands
from orchestrator.scheduler.client import SchedulerDown, SlurmClient
from orchestrator.scheduler.jobs import Job, queued

LOOK_S = 0.5
SOON_S, END_S = 10.0, 60.0


class OnSlurm(Outside):
    """Each launch and resume is a job."""

    def __init__(self, folder: Path, asked: Asked) -> None:
        super().__init__(folder, asked)
        self._hands: Hands | None = None
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
        if fault.kind in (STOP, KILL_SCRIPT, REQUEUE, NOTICE):
            return
        try:
            nodes = len(self._nodes())
            self._hands = Hands(self._client, self._id, nodes, str(self.run.path))
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

    def hurt(self, fault: Fault, update_s: float) -> Harm:
        try:
            return super().hurt(fault, update_s)
        except ClusterError:
            if not self._ends_soon():
                raise
            return Harm(said=f"{fault.kind}: none was left")

    def _reach(self) -> Hands:
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

    def _hurt_all(self, fault: Fault) -> Harm | None:
        if fault.kind == STOP:
            super()._start("orchestrator", "cancel", str(self.run.path))
        elif fault.kind == KILL_SCRIPT:
            self._client.must("scancel", "--batch", "--signal=KILL", self._id)
        elif fault.kind == REQUEUE:
            self._client.must("scontrol", "requeue", self._id)
        elif fault.kind == NOTICE:
            self._client.must("scancel", "--signal=USR2", self._id)
        else:
            return None
        return Harm(said=fault.kind, whole_run=True)
