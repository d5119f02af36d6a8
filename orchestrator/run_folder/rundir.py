"""The run folder: private creation, atomic writes, reading back. Its names: `paths.py`.

The folder is the only channel from a run back to people, and all
that `resume`, `status` and `compare` need. What may be trusted of it: docs/reference/security.md.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
from collections.abc import Generator, Iterable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from orchestrator.errors import RunFolderError
from orchestrator.run_folder.claim import Claim
from orchestrator.run_folder.files import (
    PRIVATE_FILE,
    check_writable,
    make_folder,
    names_in,
    read_text,
    wait_for_disk,
)
from orchestrator.run_folder.paths import ATTEMPT
from orchestrator.run_folder.seal import (
    identity_in,
    is_in_every_file,
    new_identity,
    sealed_config,
    sealed_json,
    unsealed_json,
)
from orchestrator.run_folder.shapes import RESUMES, SHAPES, check_shape

CONFIG_BYTES = 1 << 20
RESUMED = "resumed"  # why an attempt was needed, when a person asked for it
CONFIG_SECTIONS = (
    "job", "optimizer", "cluster", "accumulation", "schedule", "train", "engine", "run",
    "transport",
)  # fmt: skip
INITIAL_DIGEST = "initial_weights_sha256"  # in submission.json
INITIAL_BYTES = "initial_weights_bytes"  # there, too
SEALED = "sealed"  # in submission.json: config.yaml has a seal, so one that has none is cut short
RUN = "run"  # in plan.json, submission.json, result.json and resumes.json: the run's identity
ASKED = "asked"  # in resumes.json: what each `resume` asked for, the latest last
JOB_ID = re.compile(r"[0-9]{1,19}(_[0-9]{1,10})?")
MOST_ATTEMPTS = 10**6
CODE_STATE = re.compile(rf"({ATTEMPT.pattern})\.json")
FAILURE = re.compile(r"failure-[0-9]+\.json")
BEHIND = re.compile(r"behind-[0-9]+\.json")


_together: ContextVar[bool] = ContextVar("_together", default=False)


@contextlib.contextmanager
def written_together(folders: Iterable[Path]) -> Generator[None]:
    """For many new files: inside, none waits for the disk by itself. All that is below these
    folders is on it when this is left without an error.
    """
    before = _together.set(True)
    try:
        yield
    finally:
        _together.reset(before)
    wait_for_disk(folders)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write so that a reader, or a crash at any point, sees the old file or the new one; inside
    `written_together` a crash of the machine may leave a damaged one where none was.
    """
    waits = not _together.get() or path.exists()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = os.open(temporary, flags, PRIVATE_FILE)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if waits:
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """`write_atomically` of a value as JSON, with a seal (see `seal`) where it is a table."""
    write_atomically(path, sealed_json(path.name, value))


def read_json(path: Path, *, sealed: bool = False) -> Any | None:
    """The file's value; None when there is no such file.

    Args:
        sealed: the file has to have a seal.

    Raises:
        RunFolderError: it is damaged, in whatever way, or no regular file.
    """
    try:
        text = read_text(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror}") from error
    value = unsealed_json(path, text, must=sealed)
    if path.name in SHAPES:
        check_shape(path, value, SHAPES[path.name])
    return value


def code_state_beside(snapshot: Path) -> Path:
    """The file that says which code a snapshot is, beside its archive."""
    return snapshot.with_name(f"{snapshot.name}.json")


def _nearest(missing: Path) -> str:
    """A hint at what was meant by a run folder that is not there; "" where none can be given."""
    runs = Path("runs")
    try:
        if (runs / missing.name / "config.yaml").is_file():
            return f"; did you mean {runs / missing.name}?"
        begun = {config.parent: config.stat().st_mtime for config in runs.glob("*/config.yaml")}
    except OSError:  # somebody else's: the message without a hint is right as well
        return ""
    return f"; the newest in {runs}/ is {max(begun, key=begun.__getitem__)}" if begun else ""


class RunDir(Claim):
    """One run's folder. Making the object touches nothing."""

    def restarts(self) -> list[dict[str, Any]]:
        """The notes of all attempts that went on from an earlier one."""
        notes = (self.read(self.restart(number)) for number in self.attempt_numbers())
        return [note for note in notes if note]

    def nodes_of_ranks(self, attempt: int) -> dict[int, str]:
        """Each rank's node by its name, node by node, as far as they said so."""
        places = [self.read(path) or {} for path in sorted(self.attempt(attempt).glob("node-*"))]
        return {rank: place["node"] for place in places for rank in place.get("ranks", ())}

    def submitted_code(self, attempt: int) -> dict[str, Any] | None:
        """The `code_state` of the copy that this attempt runs; None where there is no copy."""
        names = map(CODE_STATE.fullmatch, names_in(self.code))
        ours = sorted({int(n[1]) for n in names if n and int(n[1]) <= attempt}, reverse=True)
        found = (self.read(code_state_beside(self.snapshot(number))) for number in ours)
        return next((state for state in found if state is not None), None)

    def check_writable(self) -> None:
        """Raises `RunFolderError` when a start would write into a file that is not its run's alone:
        a link, a fifo, one with a second name.
        """
        for path in (self.lock, self.metrics, self.newest_attempt, *self.all_logs()):
            check_writable(path)

    def begin_attempt(self) -> int:
        """Make the next attempt's folder; its number counts from 0."""
        number = self.attempts_made()
        if number >= MOST_ATTEMPTS:
            raise RunFolderError(f"{self.attempts} is damaged: it has an attempt {number - 1}")
        try:
            make_folder(self.attempt(number))
        except OSError as error:
            raise RunFolderError(f"{self.path} cannot be written: {error.strerror}") from error
        return number

    def existing(self) -> RunDir:
        """Itself, once it is sure that a run lives here, in folders of its own.

        Raises:
            RunFolderError: there is none, or some folder in it is a link to elsewhere.
        """
        if not self.path.is_dir():
            raise RunFolderError(f"there is no run folder {self.path}{_nearest(self.path)}")
        try:
            if not self.config.is_file():
                raise RunFolderError(
                    f"{self.path} is not a run folder: it has no {self.config.name}"
                )
            self.check_own_folders()
        except OSError as error:
            raise RunFolderError(f"{self.path} cannot be read: {error.strerror}") from error
        return self

    def write_config(self, text: str) -> None:
        """Write config.yaml and its seal; the run keeps its identity, or gets one."""
        before = self._config_text() if self.config.exists() else ""
        identity = identity_in(self.config, before) or new_identity()
        write_atomically(self.config, sealed_config(text, identity))

    def read_config(self) -> dict[str, Any]:
        """The plain values of config.yaml; `config.schema.read_config` makes a `Config` of them.

        Raises:
            RunFolderError: it is damaged.
        """
        from orchestrator.run_folder.strict_yaml import load_table  # `status` needs no YAML

        text = self._config_text()
        self._identity_in(text)
        return load_table(self.config, text, needed=CONFIG_SECTIONS)

    def _config_text(self) -> str:
        try:
            return read_text(self.config, at_most=CONFIG_BYTES)
        except OSError as error:
            raise RunFolderError(f"{self.config} cannot be read: {error.strerror}") from error

    def _identity_in(self, text: str) -> str | None:
        """Raises `RunFolderError` when the text is not as it was written."""
        identity = identity_in(self.config, text)
        if identity is None and (read_json(self.submission) or {}).get(SEALED):
            raise RunFolderError(f"{self.config} is damaged: its digest is missing")
        return identity

    @functools.cached_property
    def identity(self) -> str | None:
        """What tells this run from others; None for one made before files had digests.

        Raises:
            RunFolderError: config.yaml, which holds it, is damaged.
        """
        return self._identity_in(self._config_text())

    @property
    def sealed(self) -> bool:
        """Whether the files of this run have to have seals: all that were made since they exist."""
        known = "identity" in self.__dict__ or self.config.exists()
        return known and self.identity is not None

    def read(self, path: Path) -> Any | None:
        """`read_json` of a table in this run's folder, which has a seal if the run has any."""
        return read_json(path, sealed=self.sealed)

    def write_own(self, path: Path, value: Mapping[str, Any]) -> None:
        """`write_json` of what only this run may read back: plan, submission, result, resumes."""
        write_json(path, {**value, RUN: self.identity} if self.sealed else dict(value))

    def _read_own(self, path: Path) -> dict[str, Any] | None:
        """Raises `RunFolderError` when the file is damaged, or another run's."""
        found = self.read(path)
        own = self.identity if self.sealed else None
        unsaid = None if own is None or is_in_every_file(own) else own
        if found is not None and found.pop(RUN, unsaid) != own:
            raise RunFolderError(f"{path} is damaged: it is of another run")
        return found

    def read_plan(self) -> dict[str, Any]:
        return self._read_own(self.plan) or {}

    def read_submission(self) -> dict[str, Any]:
        return self._read_own(self.submission) or {}

    def read_handle(self) -> dict[str, Any] | None:
        """Where a run on a scheduler was placed; None for one that never was."""
        handle = self.read(self.handle)
        if handle is not None and not JOB_ID.fullmatch(handle["job_id"]):
            # it becomes a word of scancel's command line
            raise RunFolderError(f"{self.handle} is damaged: {handle['job_id']!r} is no job's id")
        return handle

    def read_result(self) -> dict[str, Any] | None:
        return self._read_own(self.result)

    def read_environment(self) -> dict[str, Any] | None:
        return self.read(self.environment)

    def read_resumes(self) -> list[dict[str, Any]]:
        """What each `resume` asked for, the latest last."""
        own = self.identity if self.sealed else None
        older = None if own is not None and is_in_every_file(own) else read_json(self.resumes)
        # it had no seal when it was a list
        told = {ASKED: older} if isinstance(older, list) else self._read_own(self.resumes)
        if told is None:
            return []
        check_shape(self.resumes, told, RESUMES)
        return told[ASKED]

    def failures(self, attempt: int) -> list[Mapping[str, Any]]:
        """What the attempt's ranks wrote when they failed."""
        return self._of_ranks(attempt, FAILURE)

    def all_behind(self, attempt: int) -> list[Mapping[str, Any]]:
        """What the attempt's ranks wrote that stood still at its end."""
        return self._of_ranks(attempt, BEHIND)

    def _of_ranks(self, attempt: int, names: re.Pattern[str]) -> list[Mapping[str, Any]]:
        folder = self.attempt(attempt)
        found = [folder / name for name in names_in(folder) if names.fullmatch(name)]
        return [value for path in found if (value := self.read(path)) is not None]
