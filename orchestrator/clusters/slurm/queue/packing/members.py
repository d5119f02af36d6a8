"""Which runs share a job, as their folders tell it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.clusters.slurm.queue.elements import ARRAYS, NUMBER
from orchestrator.rundir.folder import RunDir
from orchestrator.scheduler.client import SlurmClient

STEPS = ("squeue", "-h", "-s", "-o", "%i|%j")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """A job that runs share: the script that it was queued by, and the runs it began with."""

    job_id: str
    script: Path
    runs: tuple[RunDir, ...]

    def left(self) -> list[RunDir]:
        """Those that are not over, and have not been submitted anew."""
        found: list[RunDir] = []
        for run in self.runs:
            handle = run.read_handle() if run.path.is_dir() else None
            here = handle is not None and handle["job_id"] == self.job_id
            found += [run] if here and run.read_result() is None else []
        return found


def pack_of(run: RunDir) -> Pack | None:
    """The job that a run shares with others; None where it has one to itself."""
    handle = run.read_handle() or {}
    if not (pack := handle.get("pack")):
        return None
    sweep = run.path.parent
    names = [str(name) for name in pack["runs"] if NUMBER.fullmatch(str(name))]
    return Pack(
        job_id=str(handle["job_id"]),
        script=sweep / ARRAYS / Path(pack["script"]).name,
        runs=tuple(RunDir(sweep / name) for name in names),
    )


def is_packed_in(run: RunDir, script: Path, job_id: str) -> bool:
    """Whether a job is one that a run shares.

    Args:
        script: that the scheduler knows the job by, without links.
    """
    pack = pack_of(run)
    if pack is None or pack.job_id != job_id:
        return False
    return script == Path(os.path.realpath(pack.script))


def is_over(run: RunDir) -> bool:
    """Whether a run that shares its job has ended, whatever the others do."""
    return pack_of(run) is not None and run.read_result() is not None


def title_of(run: RunDir, job_id: str) -> str:
    """What people know it by."""
    shared = f"point {run.path.name}, in job {job_id}," if pack_of(run) else ""
    return shared or f"job {job_id}"


def waits_for_others(run: RunDir) -> bool:
    """Whether its ranks have ended, and it starts again when its job does, for all of them."""
    left = run.departure(max(0, run.attempts_made() - 1)).exists()
    return left and run.read_result() is None and bool(others_left(run))


def others_left(run: RunDir) -> list[RunDir]:
    """Those of a run's job that are not over, without itself."""
    pack = pack_of(run)
    return [other for other in pack.left() if other.path != run.path] if pack else []


def steps(client: SlurmClient, job_ids: Iterable[str]) -> dict[tuple[str, str], str]:
    """The steps of jobs that run now, by (job, the step's name). Raises `SchedulerDown`."""
    answer = client.must(*STEPS, "-j", ",".join(job_ids))
    found: dict[tuple[str, str], str] = {}
    for line in answer.splitlines():
        step, _, name = line.partition("|")
        found[step.partition(".")[0], name] = step
    return found
