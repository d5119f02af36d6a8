"""Idempotent submission: no job is lost and none is queued twice, whenever a command is killed.

Before sbatch runs, a note (`submitting.json`) is written to the folder of the run, or of the sweep
whose runs become an array. It is removed once each run has the job's id. SLURM knows a job by its
script's path, which is in the note. A note without an owner is resolved through the queue and the
accounting: either the job is found and recorded, or it does not exist.

sbatch inherits the note's lock, so that it is held for as long as a job may still result.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.clusters.slurm.scheduler import (
    SchedulerDown,
    SlurmClient,
    accounted_scripts,
    elements_of,
    explained,
    jobs_of_user,
    retry_unanswered,
)
from orchestrator.clusters.slurm.trust import client_of
from orchestrator.errors import ClusterError, NotNow, RunFolderError, describe_status
from orchestrator.rundir.files import (
    is_own,
    open_nofollow,
    read_json,
    write_json,
    written_together,
)
from orchestrator.rundir.folder import RunDir

ARRAYS = "arrays"  # the folder of arrays' scripts, next to the runs
NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")  # a run's folder that can be an element of an array
ALONE = ("",)  # a run that is a job of its own
SUBMIT_LIMIT = re.compile(r"\b(Assoc|QOS)\w*SubmitJob\w*Limit\b", re.IGNORECASE)
NO_NUMBER = "sbatch ended well, but printed no job's number"
PARSABLE = re.compile(r"^(\d+)(?:;(\S+))?\s*$", re.MULTILINE)
LOOKS, LOOK_S = 4, 10.0
"""For a job whose answer was lost. A busy controller makes it after sbatch has given up."""
LATE_S = LOOKS * LOOK_S
"""After which no job comes of a submission whose command was killed."""
LOST_ANSWERS = ("timed out", "zero bytes", "did not answer", NO_NUMBER)


class BeyondLimit(NotNow):
    """No room among the user's queued jobs at present."""

    @staticmethod
    def found_in(message: str) -> bool:
        """Return whether SLURM reports that: AssocMaxSubmitJobLimit, QOSGrpSubmitJobsLimit."""
        return bool(SUBMIT_LIMIT.search(message))


def queue(
    folder: RunDir,
    script: Path,
    attempt: int,
    slurm_conf: str | None,
    elements: Sequence[str] = ALONE,
    *,
    requeue: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> str:
    """Queue a batch script, and record the job's id in its runs; return the id.

    Args:
        folder: of the run, or of the sweep.
        elements: the names of an array's runs, which are their indices.
        requeue: the script asks for that; a warning says if the site has cleared it.

    Raises:
        ClusterError: the scheduler refuses it, or does not answer. If that is not known, the note
            stays, and a later command resolves it.
    """
    before = (folder.read_handle() or {}).get("job_id", "") if elements is ALONE else ""
    note = {
        "kind": "slurm",
        "script": str(script),
        "attempt": attempt,
        "slurm_conf": slurm_conf,
        "elements": elements,
        "before": before,
        "time": time.time(),
    }
    client = SlurmClient(slurm_conf)
    with _noted(folder, note) as lock:
        # From now on a job of this folder waits for its record; one that began before trains, and
        # the note stays. By a run's its job is found; an array's script is a new one.
        begun = [run for run in _runs_of(folder, elements) if run.attempts_made() > attempt]
        if begun:
            how = "`status` finds it"
            if elements is not ALONE:
                how = "`squeue --me` shows its number"
            raise ClusterError(
                f"{begun[0].path}: an earlier job, whose answer was lost, has begun attempt "
                f"{attempt} meanwhile, so no second one is queued; {how}"
            )
        answer_lost = False  # sbatch was called, and may have queued the job
        unnumbered = ""  # the message of an sbatch that ended well, without a job's number

        def submit() -> str:
            nonlocal answer_lost, unnumbered
            if answer_lost and (job_id := _late_job_of(client, note)) is not None:
                return job_id
            answer_lost = False
            if unnumbered:
                raise ClusterError(f"{unnumbered}\nno job of {script} is queued")
            try:
                return _sbatch(client, str(script), lock)
            except SchedulerDown as error:
                message = str(error)
                unnumbered = message if message.startswith(NO_NUMBER) else ""
                answer_lost = any(phrase in message.lower() for phrase in LOST_ANSWERS)
                if answer_lost:
                    os.utime(lock)  # for `adopt`, if this command is killed while it looks
                raise

        try:
            job = retry_unanswered(submit, tell=tell)
        except ClusterError as error:
            if not answer_lost:
                folder.submitting.unlink()
                raise
            raise ClusterError(
                f"{error.__cause__}\nwhether the job was queued is not known; once the scheduler "
                f"answers, `status` or the same line again finds out"
            ) from error
        _write_handles(folder, note, job)
    if requeue and (warning := _requeue_warning(client, job)):
        tell(f"warning: {warning}")
    return job


def _requeue_warning(client: SlurmClient, job: str) -> str:
    """Return a sentence if the site has cleared the job's Requeue (by a job_submit plugin, say)."""
    try:
        queued = elements_of(client, job)
    except ClusterError as error:  # the job is queued all the same
        return f"whether job {job} may be requeued is not known: {error}"
    if all(element.requeue for element in queued):
        return ""
    return (
        f"the site has cleared Requeue of job {job}: a preemption, a lost node or the time limit "
        "ends the run, and `resume` continues it"
    )


def _sbatch(client: SlurmClient, script: str, lock: int) -> str:
    """Return the id of the job that sbatch has queued."""
    answer = client.run("sbatch", "--parsable", script, holding=lock)
    if answer.code < 0:
        raise SchedulerDown(f"sbatch did not answer: it was {describe_status(answer.code)}")
    if answer.code and BeyondLimit.found_in(answer.message):
        raise BeyondLimit(explained(answer.message))
    if answer.code:
        raise ClusterError(explained(answer.message))
    matches = set(PARSABLE.findall(answer.out))  # a site's wrapper may print more
    if len(matches) != 1:
        raise SchedulerDown(f"{NO_NUMBER}: {answer.message or answer.out.strip()}")
    [(job_id, elsewhere)] = matches
    if elsewhere and elsewhere != client.settings().get("ClusterName"):
        client.check_output("scancel", f"--clusters={elsewhere}", job_id)
        raise ClusterError(
            f"sbatch queued it on another cluster of the federation, {elsewhere}, where this "
            f"run would not be found again; that job ({job_id}) was cancelled. Submit it on a "
            f"login node of {elsewhere}, or choose the cluster by cluster.slurm_conf"
        )
    return job_id


def adopt(folder: RunDir) -> str:
    """Complete an interrupted submission. Reads the queue, and the notes.

    Returns:
        The result, as a sentence; "" if another process has resolved it meanwhile.

    Raises:
        ClusterError: it cannot be known yet: sbatch still runs, or there is no answer.
        RunFolderError: the note is damaged.
    """
    if not is_own(folder.path) and folder.submitting.exists():
        raise ClusterError(f"{folder.path} is being submitted, which only its owner can complete")
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
        note: dict[str, Any] | None = read_json(folder.submitting)
        if note is None:
            return ""
        elements = tuple(map(str, note["elements"]))
        if elements != ALONE and not all(map(NUMBER.fullmatch, elements)):
            raise RunFolderError(f"{folder.submitting} is damaged: it names no runs of this folder")
        job = _job_of(client_of(folder, note["slurm_conf"]), note)
        age_s = time.time() - max(float(note["time"]), os.fstat(lock).st_mtime)
        if job is None and abs(age_s) < LATE_S:  # beyond it if clocks differ
            raise ClusterError(
                f"the command that submitted {folder.path} was ended, and a busy scheduler may "
                f"still make its job; ask again in {math.ceil(LATE_S - age_s)} s"
            )
        if job is None:
            folder.submitting.unlink()
            runs = _runs_of(folder, elements)
            if begun := [run for run in runs if run.attempts_made() > note["attempt"]]:
                if elements != ALONE:  # perhaps in an array of an earlier script
                    return (
                        f"{begun[0].path} has begun in a job that is not recorded; if that still "
                        f"runs, `squeue --me` shows its number"
                    )
                return f"{folder.path}: its job has ended, and the accounting does not know it"
            return f"{folder.path}: the command that was to submit it was ended before sbatch did"
        _write_handles(folder, note, job)
    finally:
        os.close(lock)
    return f"{folder.path}: job {job} was queued by a command that was ended before it noted that"


def _runs_of(folder: RunDir, elements: Sequence[str]) -> list[RunDir]:
    return [RunDir(folder.path / name) for name in elements]


@contextlib.contextmanager
def _noted(folder: RunDir, note: Mapping[str, Any]) -> Generator[int]:
    """Write the note; return the descriptor that holds its lock."""
    lock = None
    while lock is None:
        write_json(folder.submitting, note)
        lock = open_nofollow(folder.submitting, os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may have just found it
        if not folder.submitting.exists():
            os.close(lock)
            lock = None
    try:
        yield lock
    finally:
        os.close(lock)


def _job_of(client: SlurmClient, note: Mapping[str, Any]) -> str | None:
    """Return the job, or the array, made from a note's script. Raises `SchedulerDown`."""
    script = os.path.realpath(note["script"])
    before = int(note["before"].partition("_")[0] or 0)
    for job in jobs_of_user(client, os.getuid()).values():
        number = job.id.partition("_")[0]
        if os.path.realpath(job.command) == script and (job.alive or int(number) > before):
            return number
    past = accounted_scripts(client, os.getuid(), since=float(note["time"]))
    numbers = {int(number) for number, text in past if os.path.realpath(text) == script}
    return str(max(numbers)) if numbers and max(numbers) > before else None


def _late_job_of(client: SlurmClient, note: Mapping[str, Any]) -> str | None:
    """Return the job made from a note's script, after some time if need be; None if there is none.

    Raises:
        SchedulerDown: there is no answer.
    """
    for look in range(LOOKS):
        time.sleep(LOOK_S if look else 0.0)
        if (job_id := _job_of(client, note)) is not None:
            return job_id
    return None


def _write_handles(folder: RunDir, note: Mapping[str, Any], job: str) -> None:
    """Record the job in each run's handle.json; then the note is not needed any more."""
    with written_together([folder.path]):
        for name in note["elements"]:
            if (folder.path / name).is_dir():
                handle = {
                    "kind": "slurm",
                    "job_id": f"{job}_{name}" if name else job,
                    "attempt": note["attempt"],
                    "slurm_conf": note["slurm_conf"],
                    "time": time.time(),
                }
                write_json(RunDir(folder.path / name).handle, handle)
    folder.submitting.unlink()
