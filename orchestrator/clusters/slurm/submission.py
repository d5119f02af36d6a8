"""Idempotent submission: no job is lost and none is queued twice, whenever a command is killed.

Before sbatch runs, a note (`submitting.json`) is written to the folder of the run, or of the sweep
whose runs become an array. It is removed once each run has the job's id. SLURM knows a job by its
script's path, which is in the note. A note without an owner is resolved through the queue and the
accounting: either the job is found and recorded, or there is none.

sbatch inherits the note's lock, so that it is held for as long as a job may still result.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from orchestrator import snapshot
from orchestrator.clusters.api import Handle, Request
from orchestrator.clusters.slurm.batch_script import Here, script_name
from orchestrator.clusters.slurm.safe_values import (
    read_defaults,
)
from orchestrator.clusters.slurm.task import write_task
from orchestrator.clusters.slurm.trust import client_of
from orchestrator.config.program import target_of
from orchestrator.config.schema import Config
from orchestrator.errors import ClusterError, Interrupted, NotNow, RunFolderError, describe_status
from orchestrator.rundir.files import (
    make_folder,
    names_in,
    open_nofollow,
    read_json,
    write_atomically,
    write_json,
    written_together,
)
from orchestrator.rundir.folder import RunDir, code_state_beside
from orchestrator.slurm_client import SchedulerDown, SlurmClient, accounted_scripts, explained, mine

ARRAYS = "arrays"  # the folder of scripts, next to the runs
NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")


def next_name(folder: Path) -> Path:
    """Return a numbered path in a folder that is not taken."""
    if not folder.is_dir():
        make_folder(folder)
    taken = [int(stem) for name in names_in(folder) if (stem := name.split(".")[0]).isdigit()]
    return folder / f"{max(taken, default=-1) + 1:03d}"


def is_element(run: Path, script: Path, job_id: str) -> bool:
    """Return whether a job is an element of an array of this run's sweep, and may be this run.

    Args:
        script: the job's script as the scheduler knows it, without links.
        job_id: as in `123_4`.
    """
    index = job_id.partition("_")[2]
    if script.parent != Path(os.path.realpath(run.parent / ARRAYS)) or not index.isdigit():
        return False
    return bool(NUMBER.fullmatch(run.name)) and int(run.name) >= int(index)


PATIENCE_S = 60.0
LONGEST_PAUSE_S = 8.0
UNLIKE = ("job-name", "output")  # differs between a sweep's points, and no limit depends on it


def retry_unanswered(
    action: Callable[[], Any], *, patience_s: float = PATIENCE_S, tell: Callable[[str], None]
) -> Any:
    """Retry a scheduler's command for a bounded time while there is no answer.

    Raises:
        NotNow: there was no answer, or `tell` raised `Interrupted` to stop waiting.
    """
    began, pause = time.monotonic(), 1.0
    while True:
        try:
            return action()
        except SchedulerDown as error:
            waited = time.monotonic() - began
            if waited + pause > patience_s:
                raise NotNow(f"{error}\nnot submitted, though tried for {waited:.0f} s") from error
            try:
                tell(f"{error}; trying again for up to {patience_s - waited:.0f} s")
            except Interrupted as ended:
                raise NotNow(f"{error}\nnot submitted: {ended}") from error
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)


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
    tell: Callable[[str], None] = lambda _: None,
) -> str:
    """Queue a batch script, and record the job's id in its runs; return the id.

    Args:
        folder: of the run, or of the sweep.
        elements: the index in the array of each run, by its folder's name.

    Raises:
        ClusterError: the scheduler refuses it, or does not answer. If that is not known, the note
            stays, and a later command resolves it.
    """
    before = (folder.read_handle() or {}).get("job_id", "") if elements is ALONE else ""
    note = {
        "kind": "slurm", "script": str(script), "attempt": attempt, "slurm_conf": slurm_conf,
        "elements": dict(elements), "before": before, "time": time.time(),
    }  # fmt: skip
    with _noted(folder, note) as lock:
        asking = _Asking(SlurmClient(slurm_conf), note, lock)
        try:
            job: str = retry_unanswered(asking, tell=tell)
        except ClusterError as error:
            if not asking.answer_lost:
                folder.submitting.unlink()
                raise
            raise ClusterError(
                f"{error.__cause__}\nwhether the job was queued is not known; once the scheduler "
                f"answers, `status` or the same line again finds out"
            ) from error
        _write_down(folder, note, job)
    return job


def adopt(folder: RunDir) -> str:
    """Complete an interrupted submission. Reads the queue, and the notes.

    Returns:
        The result, as a sentence; "" if another process has resolved it meanwhile.

    Raises:
        ClusterError: it cannot be known yet: sbatch still runs, or there is no answer.
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


class BeyondLimit(NotNow):
    """No room among the user's queued jobs at present."""

    @staticmethod
    def found_in(words: str) -> bool:
        """Return whether SLURM reports that: AssocMaxSubmitJobLimit, QOSGrpSubmitJobsLimit."""
        return bool(SUBMIT_LIMIT.search(words))


class _Asking:
    """A retried sbatch; never called again before the result of the first call is known.

    Attributes:
        answer_lost: sbatch was called, and may have succeeded, but its answer was lost.
    """

    def __init__(self, client: SlurmClient, note: Mapping[str, Any], lock: int) -> None:
        self._client, self._note, self._lock = client, note, lock
        self.answer_lost = False

    def __call__(self) -> str:
        if self.answer_lost and (job := _job_of(self._client, self._note)) is not None:
            return job
        self.answer_lost = False
        try:
            return self._ask()
        except SchedulerDown as error:
            self.answer_lost = any(words in str(error).lower() for words in LOST_ANSWERS)
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
    """Return the job, or the array, made from a note's script. Raises `SchedulerDown`."""
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
    """Refuse a note that leads to another folder."""
    names, indices = note["elements"].keys(), note["elements"].values()
    alone = dict(note["elements"]) == ALONE
    if not alone and not all(NUMBER.fullmatch(str(word)) for word in (*names, *indices)):
        raise RunFolderError(f"{folder.submitting} is damaged: it names no runs of this folder")


def _write_down(folder: RunDir, note: Mapping[str, Any], job: str) -> None:
    """Record the job's handle in each run; then the note is not needed any more."""
    with written_together([folder.path]):
        for name, index in note["elements"].items():
            handle = {
                "kind": "slurm",
                "job_id": f"{job}_{index}" if index else job,
                "attempt": note["attempt"],
                "slurm_conf": note["slurm_conf"],
                "time": time.time(),
            }
            if (folder.path / name).is_dir():
                write_json(RunDir(folder.path / name).handle, handle)
    folder.submitting.unlink()


CODE = "code"  # a folder next to the runs


class Member(Protocol):
    """Interface of `SlurmCluster` that is used here."""

    config: Config
    tell: Callable[[str], None]

    def request(self, run: Path, attempt: int, copy: Path | None = None) -> Request: ...
    def submit(self, request: Request) -> Handle: ...
    def copy_code(self, run: Path, into: Path) -> None: ...
    def write_epilog(self, run: RunDir) -> None: ...


Placed = tuple[Member, Request]
Script = Callable[[Member, Request, Path | None], str]
"""A run's own batch script. The path: of the code that it shares with others, if it is a copy."""


def number_of(member: Placed) -> int | None:
    """Return the number in its folder's name, if it is one."""
    return int(member[1].run.name) if NUMBER.fullmatch(member[1].run.name) else None


def group_equal(placed: Sequence[Placed]) -> list[list[Placed]]:
    """Group equal runs in one parent folder, in order; each other run alone."""
    groups: dict[object, list[Placed]] = {}
    for number, (cluster, request) in enumerate(placed):
        options = request.details["options"]
        key: object = (
            cluster.config.cluster.slurm_conf,
            request.run.parent,
            request.attempt,
            tuple((k, v) for k, v in options.items() if k not in UNLIKE),
        )
        numbered = number_of((cluster, request)) is not None
        groups.setdefault(key if numbered else number, []).append((cluster, request))
    return list(groups.values())


def lay_out(sweep: Path, part: Sequence[Placed], script: Script) -> Path | None:
    """Write all that runs of one sweep are started from, except their scripts.

    Returns:
        The copy of the code that the first of them starts from; None without one.
    """
    copies: dict[object, Path] = {}
    states: dict[tuple[Path, str], Path] = {}
    for member, _ in part:
        if member.config.run.snapshot and _source(member) not in copies:
            copies[_source(member)] = next_name(sweep / CODE)
            member.copy_code(sweep, copies[_source(member)])
    with written_together([sweep]):
        for member, asked in part:
            copy = copies.get(_source(member))
            _lay_out(member, asked, script(member, asked, copy))
            if copy is not None:
                _write_code_id(copy, RunDir(asked.run), asked.attempt, states)
    return copies.get(_source(part[0][0]))


def _source(member: Member) -> object:
    """Return what distinguishes one copy of code from another."""
    target = target_of(member.config.job)
    return target if isinstance(target, str) else target.command


def _lay_out(member: Member, asked: Request, text: str) -> None:
    """Write what its script starts to the run's folder."""
    run = RunDir(asked.run)
    member.write_epilog(run)
    write_task(run)
    write_atomically(run.submitit / f"{script_name(asked.attempt)}.sh", text)


def _write_code_id(
    copy: Path, run: RunDir, attempt: int, states: dict[tuple[Path, str], Path]
) -> None:
    """Write which code it is to the run's folder, for readers of this run alone.

    Its differences from git may be large, so runs share the file; not the copy's digest, which
    includes its name.

    Args:
        states: what was written so far, by the copy and the file's name.
    """
    run.code.mkdir(mode=0o700, exist_ok=True)
    state = code_state_beside(run.snapshot(attempt))
    first = states.setdefault((copy, state.name), state)
    if first is state:
        write_json(state, read_json(code_state_beside(copy)) or {})
    else:
        state.unlink(missing_ok=True)
        os.link(first, state)


def here(config: Config, copy: Path) -> Here:
    """Return the submitting side as it is now.

    Args:
        copy: where the copy of the code goes, if there is to be one.
    """
    target = target_of(config.job)
    roots = snapshot.source_roots(target)
    if config.run.snapshot:
        places = snapshot.copies(target, copy)
    else:
        places = {root: root for root in roots}
    package = snapshot.PACKAGE
    own = places.get(package.parent)
    path = [*places.values(), Path.cwd()]
    return Here(
        python=sys.executable,
        folder=Path.cwd(),
        package=own / package.name if own else package,
        path=tuple(dict.fromkeys(path)),
        unpacked=copy if config.run.snapshot else None,
        defaults=read_defaults(os.environ),
        copies=None if isinstance(target, str) else places if config.run.snapshot else {},
    )
