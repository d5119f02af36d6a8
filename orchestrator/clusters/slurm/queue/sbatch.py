"""sbatch so that no job is lost, and none is queued twice, whoever ends us in whichever moment.

What is about to be queued is noted first (`submitting.json`, in the folder of a run, or in that of
the sweep whose runs become an array), and the note goes once each run has the job's id. SLURM
knows a job by its script's path, which is in the note. So where a note is found that nobody holds,
its job is looked for in the queue, and in the accounting; either it is noted now, or there is none.

The note's lock is handed to sbatch, too: it is held for as long as a job may still come of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.clusters.slurm.queue.elements import NUMBER
from orchestrator.clusters.slurm.queue.scripts import patiently
from orchestrator.clusters.slurm.trust import client_of
from orchestrator.errors import ClusterError, NotNow, RunFolderError, describe_status
from orchestrator.rundir.files import open_nofollow, read_json, write_json, written_together
from orchestrator.rundir.folder import RunDir
from orchestrator.scheduler.client import SchedulerDown, SlurmClient, explained
from orchestrator.scheduler.jobs import accounted_scripts, mine

SUBMIT_LIMIT = re.compile(r"\b(Assoc|QOS)\w*SubmitJob\w*Limit\b", re.IGNORECASE)
LOST_ANSWERS = ("timed out", "zero bytes", "did not answer")
ALONE: Mapping[str, str] = {"": ""}  # a run that is a job of its own


def queue(
    folder: RunDir,
    script: Path,
    attempt: int,
    slurm_conf: str | None,
    elements: Mapping[str, str] = ALONE,
    *,
    pack: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> str:
    """Have a batch script queued, and note the job's id in the runs that it is of; give the id.

    Args:
        folder: of the run, or of the sweep.
        elements: the index in the array of each run, by its folder's name.
        pack: they are no elements, but share the job; their indices are "".

    Raises:
        ClusterError: the scheduler refuses it, or is silent. Where it is not known which, the note
            stays, and a later look finds out.
    """
    before = (folder.read_handle() or {}).get("job_id", "") if elements is ALONE else ""
    note = {
        "kind": "slurm", "script": str(script), "attempt": attempt, "slurm_conf": slurm_conf,
        "elements": dict(elements), "pack": pack, "before": before, "time": time.time(),
    }  # fmt: skip
    with _noted(folder, note) as lock:
        asking = _Asking(SlurmClient(slurm_conf), note, lock)
        try:
            job: str = patiently(asking, tell=tell)
        except ClusterError as error:
            if not asking.unheard:
                folder.submitting.unlink()
                raise
            raise ClusterError(
                f"{error.__cause__}\nwhether the job was queued is not known; once the scheduler "
                f"answers, `status` or the same line again finds out"
            ) from error
        _write_down(folder, note, job)
    return job


def adopt(folder: RunDir) -> str:
    """Finish what a submitting command could not that was ended. Reads the queue, and the notes.

    Returns:
        What was found out, as a sentence; "" where another has done it meanwhile.

    Raises:
        ClusterError: it cannot be known yet: sbatch is still at it, or nobody answers.
        RunFolderError: the note is damaged.
    """
    try:
        lock = open_nofollow(folder.submitting, os.O_RDWR)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ClusterError(f"{folder.submitting} cannot be opened: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ClusterError(f"{folder.path} is being submitted at this moment") from None
        note: dict[str, Any] | None = read_json(folder.submitting, checked=True)
        if note is None:
            return ""
        _check(folder, note)
        job = _job_of(client_of(folder, note["slurm_conf"]), note)
        if job is None:
            folder.submitting.unlink()
            return f"{folder.path}: the command that was to submit it was ended before sbatch did"
        _write_down(folder, note, job)
    finally:
        os.close(lock)
    return f"{folder.path}: job {job} was queued by a command that was ended before it noted that"


@contextlib.contextmanager
def _noted(folder: RunDir, note: Mapping[str, Any]) -> Generator[int]:
    """Write the note; give the descriptor that holds its lock."""
    lock = None
    while lock is None:
        write_json(folder.submitting, note)
        lock = open_nofollow(folder.submitting, os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)  # somebody may have found it in this moment
        if not folder.submitting.exists():
            os.close(lock)
            lock = None
    try:
        yield lock
    finally:
        os.close(lock)


class BeyondLimit(NotNow):
    """There is no room for it now among the jobs that one may have queued."""

    @staticmethod
    def found_in(words: str) -> bool:
        """Whether SLURM complains of that: AssocMaxSubmitJobLimit, QOSGrpSubmitJobsLimit."""
        return bool(SUBMIT_LIMIT.search(words))


class _Asking:
    """sbatch, asked again and again; never a second time before it is known what became of the
    first.

    Attributes:
        unheard: sbatch was asked, and may have been heeded, but its answer was lost.
    """

    def __init__(self, client: SlurmClient, note: Mapping[str, Any], lock: int) -> None:
        self._client, self._note, self._lock = client, note, lock
        self.unheard = False

    def __call__(self) -> str:
        if self.unheard and (job := _job_of(self._client, self._note)) is not None:
            return job
        self.unheard = False
        try:
            return self._ask()
        except SchedulerDown as error:
            self.unheard = any(words in str(error).lower() for words in LOST_ANSWERS)
            raise

    def _ask(self) -> str:
        script = str(self._note["script"])
        answer = self._client.ask("sbatch", "--parsable", script, holding=self._lock)
        if answer.code < 0:
            raise SchedulerDown(f"sbatch did not answer: it was {describe_status(answer.code)}")
        job_id, _, elsewhere = answer.out.strip().partition(";")
        if answer.code and BeyondLimit.found_in(answer.words):
            raise BeyondLimit(explained(answer.words))
        if answer.code or not job_id.isdigit():
            raise ClusterError(explained(answer.words))
        if elsewhere and elsewhere != self._client.cluster_name():
            self._client.must("scancel", f"--clusters={elsewhere}", job_id)
            raise ClusterError(
                f"sbatch queued it on another cluster of the federation, {elsewhere}, where this "
                f"run would not be found again; that job ({job_id}) was cancelled. Submit it on a "
                f"login node of {elsewhere}, or choose the cluster by cluster.slurm_conf"
            )
        return job_id


def _job_of(client: SlurmClient, note: Mapping[str, Any]) -> str | None:
    """The job, or the array, that was made of a note's script. Raises `SchedulerDown`."""
    script = os.path.realpath(note["script"])
    before = int(note["before"].partition("_")[0] or 0)
    for job in mine(client, os.getuid()).values():
        number = job.id.partition("_")[0]
        if os.path.realpath(job.command) == script and (job.alive or int(number) > before):
            return number
    past = accounted_scripts(client, os.getuid(), since=float(note["time"]))
    numbers = {int(number) for number, text in past if os.path.realpath(text) == script}
    return str(max(numbers)) if numbers and max(numbers) > before else None


def _check(folder: RunDir, note: Mapping[str, Any]) -> None:
    """A note leads to no other folder, whatever it says."""
    names, indices = note["elements"].keys(), note["elements"].values()
    alone = dict(note["elements"]) == ALONE
    words = names if note.get("pack") else (*names, *indices)
    if not alone and not all(NUMBER.fullmatch(str(word)) for word in words):
        raise RunFolderError(f"{folder.submitting} is damaged: it names no runs of this folder")


def _write_down(folder: RunDir, note: Mapping[str, Any], job: str) -> None:
    """What anybody finds the job by, in each run; then the note is not needed any more."""
    with written_together([folder.path]):
        for name, index in note["elements"].items():
            handle = {
                "kind": "slurm",
                "job_id": f"{job}_{index}" if index and not note.get("pack") else job,
                "attempt": note["attempt"],
                "slurm_conf": note["slurm_conf"],
                "time": time.time(),
            }
            if note.get("pack"):
                names = list(note["elements"])
                handle["pack"] = {"script": Path(note["script"]).name, "runs": names}
            if (folder.path / name).is_dir():
                write_json(RunDir(folder.path / name).handle, handle)
    folder.submitting.unlink()
