"""The folder of one run: its paths, its creation, and reading its files back.

The folder is the only channel from a run back to people, and all that `resume`, `status` and
`compare` need. docs/reference/security.md says what may be trusted of it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import RunFolderError
from orchestrator.rundir.files import (
    PRIVATE,
    is_folder,
    make_folder,
    make_private,
    names_in,
    open_nofollow,
    read_json,
    read_text,
    remove,
    text_digest,
    write_atomically,
)
from orchestrator.rundir.program_link import STOP_AFTER, STOP_REQUESTED

MISSING_FOLDER_CHECKS = 4
"""One a second; a network file system may deny for a moment that a folder exists."""
RESUMED = "resumed"  # why an attempt was needed, when a person asked for it
INITIAL_DIGEST = "initial_weights_sha256"  # keys of submission.json
BRANCH = "initial_state"
LABELS = ("tags", "note")  # keys of submission.json: what a person calls the run
RESUMES = "resumes"  # key of resumes.json: what each `resume` asked for, the latest last
JOB_ID = re.compile(r"[0-9]{1,19}(_[0-9]{1,10})?")
LAST_LINE = re.compile(r"\A(.*\n)# run ([0-9a-f]{32}), sha256 ([0-9a-f]{64})\n\Z", re.DOTALL)
"""Of config.yaml: the run's identity, and a digest of it and the text. A checkpoint's state.json
names the same identity."""
RANK_LOG = re.compile(r"rank-([0-9]{1,9})\.log")
ATTEMPT = re.compile(r"[0-9]{1,6}")
FAILURE = re.compile(r"failure-([0-9]+)\.json")


def _below(*names: str) -> functools.cached_property[Path]:
    """Return a path in the folder, built on first use: `status` asks a thousand runs for a few."""
    return functools.cached_property(lambda run: run.path.joinpath(*names))


def _of_attempt(name: str) -> Callable[[RunDir, int], Path]:
    """Return a method: the path of a file of one attempt."""
    return lambda run, attempt: run.attempt(attempt) / name


def _of_member(pattern: str) -> Callable[[RunDir, int, int], Path]:
    """Return a method: the path of a file of one rank or node in an attempt."""
    return lambda run, attempt, number: run.attempt(attempt) / pattern.format(number)


class RunDir:
    """One run's folder. Creating the object touches nothing."""

    config = _below("config.yaml")
    plan = _below("plan.json")
    metrics = _below("metrics.jsonl")
    result = _below("result.json")
    environment = _below("environment.json")
    submission = _below("submission.json")
    resumes = _below("resumes.json")  # what people asked for since
    initial_weights = _below("initial_weights.safetensors")
    initial_state = _below("initial_state")  # a copy of another run's checkpoint
    speeds = _below("speeds.json")  # that another run has recorded
    logs = _below("logs")
    checkpoints = _below("checkpoints")
    best = _below("best")  # the checkpoint of the best evaluation
    tensorboard = _below("tensorboard")
    mlflow = _below("mlruns")
    wandb = _below("wandb")
    attempts = _below("attempts")
    lock = _below(".lock")
    # A run on a scheduler: where it was placed, the code that it runs, and the requests to it.
    handle = _below("handle.json")
    submitting = _below("submitting.json")  # for as long as it may become a job
    code = _below("code")
    submitit = _below("submitit")
    batch_log = _below("logs", "batch.log")
    terminal_log = _below("logs", "terminal.log")  # of who holds it, where others do, too
    cancel = _below("cancel")
    newest_attempt = _below("attempts", "newest")
    pruned = _below("pruned.json")  # why a search ended it early
    # Of a search, in the sweep's folder: its trials, and what people are shown of them.
    journal = _below("search.journal")
    search = _below("search.json")
    sweep_log = _below("terminal.log")  # in a sweep's folder: of a command without a terminal

    def __init__(self, path: Path) -> None:
        self.path = path
        self._created = self._claimed = False  # by `create` of this object

    @property
    def may_be_queued(self) -> bool:
        """True if a scheduler knows the run, or may: then the folder must not be removed."""
        return self.handle.exists() or self.is_being_submitted

    @property
    def is_being_submitted(self) -> bool:
        """True during a submission, of this run or of an array, and after one that was ended."""
        of_array = self.path.parent / self.submitting.name
        return self.submitting.exists() or of_array.exists()

    def is_removed(self) -> bool:
        """Return whether the folder does not exist, asking for some seconds."""
        for check in range(MISSING_FOLDER_CHECKS):
            time.sleep(1.0 if check else 0.0)
            if self.path.exists():
                return False
        return True

    @property
    def removed_message(self) -> str:
        """The message about a folder that does not exist any more."""
        return f"the run folder {self.path} was removed or renamed while the run was using it"

    def attempt(self, number: int) -> Path:
        """Return the folder of one attempt (a start or restart)."""
        return self.attempts / f"{number:03d}"

    # Files of one attempt.
    progress = _of_attempt("progress")
    program_rendezvous = _of_attempt("program-rendezvous.json")  # its address and port
    program_end = _of_attempt("program.json")  # a program's duration, by rank 0's agent
    stop_requested = _of_attempt(STOP_REQUESTED)  # a program's rank was asked to stop
    stop_after = _of_attempt(STOP_AFTER)  # the update after which a program's ranks agreed to stop
    outcome = _of_attempt("outcome.json")  # how it ended, by its coordinator
    finalizing = _of_attempt("finalizing")  # the batch script lives, and finalizes the attempt
    stall = _of_attempt("stall.json")  # its ranks make no progress, by its coordinator
    wrong_result = _of_attempt("wrong-result.json")  # ranks that the sentinel has named
    departure = _of_attempt("departure.json")  # why its ranks left, although the run continues
    decision = _of_attempt("decision.json")  # which restart follows it, and why
    restart = _of_attempt("restart.json")  # why it began, and what the one before it lost
    srun_log = _of_attempt("srun.log")
    # Files of one rank, or of one node, in one attempt.
    failure = _of_member("failure-{:05d}.json")
    program_error = _of_member("error-{:05d}.json")  # the exception that torch's `record` writes
    warnings = _of_member("warnings-{:05d}.jsonl")  # of one node's ranks; see `rundir/warnings.py`
    start_agent = _of_member("start-agent-{:05d}")  # asks the batch script for a node's agent
    node_ranks = _of_member("node-{:05d}.json")  # the ranks that the attempt had on a node

    def srun_restarts(self, job_id: str) -> Path:
        """Return the path of the number of times that srun was restarted within a job."""
        return self.attempts / f"srun-restarts-{job_id}"

    def snapshot(self, attempt: int) -> Path:
        """Return the path of the code submitted for this attempt and its requeues."""
        return self.code / f"{attempt:03d}"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:05d}.log"

    def ranks_with_logs(self) -> list[int]:
        """Return the ranks that have a log, in order."""
        names = map(RANK_LOG.fullmatch, names_in(self.logs))
        return sorted(int(match[1]) for match in names if match)

    def node_log(self, node: str) -> Path:
        return self.logs / f"{node}.log"

    def attempt_numbers(self) -> list[int]:
        """Return the attempts that have a folder, in order."""
        names = [name for name in names_in(self.attempts) if ATTEMPT.fullmatch(name)]
        return sorted(int(name) for name in names if is_folder(self.attempts / name))

    def attempts_made(self) -> int:
        """Return how many attempts were begun."""
        return max(self.attempt_numbers(), default=-1) + 1

    @property
    def latest_attempt(self) -> int:
        """The number of the latest attempt; 0 before the first."""
        return max(self.attempt_numbers(), default=0)

    def create(self) -> None:
        """Create the folder, private to its owner, and claim it; of concurrent starts one succeeds.

        Raises:
            RunFolderError: it holds another run, is not empty, or cannot be written.
        """
        path = self.path
        if file := next((p for p in path.parents if p.exists() and not p.is_dir()), None):
            raise RunFolderError(f"run.dir={path} cannot be created: {file} is a file, no folder")
        try:
            path.parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            try:
                make_folder(path)
                self._created = True
            except FileExistsError:
                self._check_empty()
            # Creating the lock file exclusively claims the folder.
            os.close(open_nofollow(self.lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            self._claimed = True
            make_private(path)
            for folder in (self.logs, self.checkpoints, self.attempts):
                make_folder(folder)
        except FileExistsError as error:
            raise RunFolderError(
                f"run.dir={path} was taken by another start in this moment; choose another folder"
            ) from error
        except OSError as error:
            self.withdraw()
            raise RunFolderError(f"run.dir={path} cannot be written: {error.strerror}") from error

    def _check_empty(self) -> None:
        path = self.path
        if not path.is_dir():
            raise RunFolderError(f"run.dir={path} is a file; it must be a new or empty folder")
        if self.config.exists():
            raise RunFolderError(
                f"run.dir={path} holds another run; to continue that one: "
                f"python -m orchestrator resume {shlex.quote(str(path))}; for a new run choose "
                "another folder"
            )
        if any(path.iterdir()):
            raise RunFolderError(f"run.dir={path} is not empty; it must be a new or empty folder")

    def withdraw(self) -> None:
        """Remove what `create` made and all written since; never another run's folder.

        One rename removes the folder, so that no other start claims it while it is emptied.
        """
        if not self._claimed:
            return
        self._claimed = False
        with contextlib.suppress(FileNotFoundError):  # removed already
            if not self._created:
                for entry in self.path.iterdir():
                    remove(entry)
                return
            gone = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")
            self.path.rename(gone)
            shutil.rmtree(gone)

    def restarts(self) -> list[dict[str, Any]]:
        """Return the notes of all attempts that continued an earlier one, and whether a person had
        `asked` for each: its reason may still be the loss that ended the attempt before.
        """
        asked = {int(entry["attempt"]) for entry in self.read_resumes()}
        notes = (read_json(self.restart(number)) for number in self.attempt_numbers())
        return [
            {**note, "asked": note["attempt"] in asked or note["why"] == RESUMED}
            for note in notes
            if note
        ]

    def begin_attempt(self) -> int:
        """Create the next attempt's folder and return its number, from 0."""
        number = self.attempts_made()
        try:
            make_folder(self.attempt(number))
        except FileExistsError as error:
            raise RunFolderError(
                f"attempt {number} of {self.path} was begun by another start in this moment"
            ) from error
        except OSError as error:
            raise RunFolderError(f"{self.path} cannot be written: {error.strerror}") from error
        return number

    def existing(self) -> RunDir:
        """Return self after checking that a run is here.

        Raises:
            RunFolderError: there is none, or a folder that it writes in is a link or a file.
        """
        if not self.path.is_dir():
            raise RunFolderError(
                f"there is no run folder {self.path}; `python -m orchestrator status` lists them"
            )
        try:
            if not self.config.is_file():
                raise RunFolderError(
                    f"{self.path} is not a run folder: it has no {self.config.name}"
                )
            written = (
                self.logs,
                self.checkpoints,
                self.best,
                self.tensorboard,
                self.mlflow,
                self.wandb,
            )
            for folder in (*written, self.attempts, self.code, self.submitit):
                is_folder(folder)
            self.attempt_numbers()
        except OSError as error:
            raise RunFolderError(f"{self.path} cannot be read: {error.strerror}") from error
        return self

    def write_config(self, text: str) -> None:
        """Write config.yaml with its checksum; the run keeps its identity, or gets one."""
        identity = self.identity if self.config.exists() else secrets.token_hex(16)
        text = text.rstrip("\n") + "\n"
        last_line = f"# run {identity}, sha256 {text_digest(identity, text)}\n"
        write_atomically(self.config, text + last_line)

    def read_config(self) -> dict[str, Any]:
        """Return the plain values of config.yaml; `config.reading.read_config` makes a `Config`.

        Raises:
            RunFolderError: it is damaged.
        """
        import yaml  # `status` needs no YAML

        text, _ = self._checked_config()
        # libyaml's is ten times as fast; not every build of PyYAML has it
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506

    def _checked_config(self) -> tuple[str, str]:
        """Return the text of config.yaml without its last line, and the identity in that line."""
        try:
            match = LAST_LINE.match(read_text(self.config))
        except OSError as error:
            raise RunFolderError(f"{self.config} cannot be read: {error.strerror}") from error
        if match is None:
            raise RunFolderError(f"{self.config} is damaged: its digest is missing")
        text, identity, digest = match.groups()
        if digest != text_digest(identity, text):
            raise RunFolderError(f"{self.config} is damaged: its digest is not that of its content")
        return text, identity

    @functools.cached_property
    def identity(self) -> str:
        """The run's identity in config.yaml. Raises `RunFolderError` if that is damaged."""
        return self._checked_config()[1]

    def read_plan(self) -> dict[str, Any]:
        return read_json(self.plan) or {}

    def read_submission(self) -> dict[str, Any]:
        return read_json(self.submission) or {}

    def read_handle(self) -> dict[str, Any] | None:
        """Return where a run on a scheduler was placed; None before it was."""
        handle = read_json(self.handle)
        if handle is not None and not JOB_ID.fullmatch(handle["job_id"]):
            # it becomes a word of scancel's command line
            raise RunFolderError(f"{self.handle} is damaged: {handle['job_id']!r} is no job's id")
        return handle

    def read_result(self) -> dict[str, Any] | None:
        return read_json(self.result)

    def read_search(self) -> dict[str, Any] | None:
        """Return the table of a search in its folder; None if the folder is of no search."""
        return read_json(self.search)

    def read_environment(self) -> dict[str, Any] | None:
        return read_json(self.environment)

    def read_resumes(self) -> list[dict[str, Any]]:
        """Return what each `resume` asked for, the latest last."""
        return (read_json(self.resumes) or {RESUMES: []})[RESUMES]

    def failures(self, attempt: int, besides: Container[int] = ()) -> list[Mapping[str, Any]]:
        """Return what the attempt's ranks wrote when they failed; not of the ranks `besides`."""
        folder = self.attempt(attempt)
        matches = filter(None, map(FAILURE.fullmatch, names_in(folder)))
        paths = [folder / match[0] for match in matches if int(match[1]) not in besides]
        return [value for path in paths if (value := read_json(path)) is not None]
