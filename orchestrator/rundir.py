"""The run folder: every file name, private creation, atomic writes, reading back.

Nobody else spells a file name. The folder is the only channel from a run back to people, and all
that `resume`, `status` and `compare` need.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from orchestrator.errors import RunFolderError

PRIVATE = 0o700
RESUMED = "resumed"  # why an attempt was needed, when a person asked for it


def write_atomically(path: Path, text: str) -> None:
    """Write so that a reader, or a crash at any point, sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """`write_atomically` of a value as JSON."""
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> Any | None:
    """The file's value; None when there is no such file. Raises `RunFolderError` on broken JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except json.JSONDecodeError as error:
        raise RunFolderError(f"{path} is damaged: {error}") from error


def code_state_beside(snapshot: Path) -> Path:
    """The file that says which code a snapshot is, beside its archive."""
    return snapshot.with_name(f"{snapshot.name}.json")


class RunDir:
    """One run's folder. Making the object touches nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.plan = path / "plan.json"
        self.metrics = path / "metrics.jsonl"
        self.result = path / "result.json"
        self.environment = path / "environment.json"
        self.submission = path / "submission.json"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.attempts = path / "attempts"
        self.lock = path / ".lock"
        # A run on a scheduler: where it was placed, the code that it runs, and what it was told.
        self.handle = path / "handle.json"
        self.code = path / "code"
        self.submitit = path / "submitit"
        self.batch_log = self.logs / "batch.log"
        self.cancel = path / "cancel"
        self.newest_attempt = self.attempts / "newest"

    def attempt(self, number: int) -> Path:
        """Folder of one attempt (a start or restart): rendezvous, failures, progress."""
        return self.attempts / f"{number:03d}"

    def progress(self, attempt: int) -> Path:
        return self.attempt(attempt) / "progress"

    def failure(self, attempt: int, rank: int) -> Path:
        return self.attempt(attempt) / f"failure-{rank:05d}.json"

    def departure(self, attempt: int) -> Path:
        """Why an attempt ended although the run goes on (preempted, a node lost, …)."""
        return self.attempt(attempt) / "departure.json"

    def restart(self, attempt: int) -> Path:
        """Why this attempt was needed, and what the one before it lost."""
        return self.attempt(attempt) / "restart.json"

    def restarts(self) -> list[dict[str, Any]]:
        """The notes of all attempts that went on from an earlier one."""
        return [note for n in range(self.attempts_made()) if (note := read_json(self.restart(n)))]

    def heartbeat(self, attempt: int, node_index: int) -> Path:
        return self.attempt(attempt) / f"heartbeat-{node_index:05d}"

    def warnings(self, attempt: int, node_index: int) -> Path:
        """What the ranks of one node warn of; see `run_warnings`, which reads all of an attempt."""
        return self.attempt(attempt) / f"warnings-{node_index:05d}.jsonl"

    def node_ranks(self, attempt: int, node_index: int) -> Path:
        """Which ranks an attempt had on a node."""
        return self.attempt(attempt) / f"node-{node_index:05d}.json"

    def nodes_of_ranks(self, attempt: int) -> dict[int, str]:
        """Each rank's node by its name, node by node, as far as they said so."""
        places = [read_json(path) or {} for path in sorted(self.attempt(attempt).glob("node-*"))]
        return {rank: place["node"] for place in places for rank in place.get("ranks", ())}

    def srun_log(self, attempt: int) -> Path:
        return self.attempt(attempt) / "srun.log"

    def snapshot(self, attempt: int) -> Path:
        """The code that was submitted for this attempt and those that follow it by requeueing."""
        return self.code / f"{attempt:03d}"

    def submitted_code(self, attempt: int) -> dict[str, Any] | None:
        """The `code_state` of the copy that this attempt runs; None where there is no copy."""
        found = (read_json(code_state_beside(self.snapshot(n))) for n in range(attempt, -1, -1))
        return next((state for state in found if state is not None), None)

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:05d}.log"

    def node_log(self, node: str) -> Path:
        return self.logs / f"{node}.log"

    def attempts_made(self) -> int:
        """How many attempts were begun, judged by their folders."""
        if not self.attempts.is_dir():
            return 0
        return max(
            (int(p.name) + 1 for p in self.attempts.iterdir() if p.name.isdigit()), default=0
        )

    def create(self) -> None:
        """Make the folder, private to its owner.

        Raises:
            RunFolderError: it holds another run, is not empty, or cannot be written.
        """
        path = self.path
        fresh = not path.exists()
        try:
            if not fresh:
                if not path.is_dir():
                    raise RunFolderError(
                        f"run.dir={path} is a file; it must be a new or empty folder"
                    )
                if self.config.exists():
                    raise RunFolderError(
                        f"run.dir={path} holds another run; to continue that one: "
                        f"python -m orchestrator resume {path}; for a new run choose another folder"
                    )
                if any(path.iterdir()):
                    raise RunFolderError(
                        f"run.dir={path} is not empty; it must be a new or empty folder"
                    )
            path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            path.chmod(PRIVATE)
            for folder in (self.logs, self.checkpoints, self.attempts):
                folder.mkdir(mode=PRIVATE)
        except OSError as error:
            if fresh:
                shutil.rmtree(path, ignore_errors=True)
            raise RunFolderError(f"run.dir={path} cannot be written: {error.strerror}") from error

    def begin_attempt(self) -> int:
        """Make the next attempt's folder; its number counts from 0."""
        number = self.attempts_made()
        try:
            self.attempt(number).mkdir(mode=PRIVATE, parents=True)
        except OSError as error:
            raise RunFolderError(f"{self.path} cannot be written: {error.strerror}") from error
        return number

    def existing(self) -> RunDir:
        """Itself, once it is sure that a run lives here. Raises `RunFolderError` otherwise."""
        if not self.path.is_dir():
            raise RunFolderError(f"there is no run folder {self.path}")
        if not self.config.is_file():
            raise RunFolderError(f"{self.path} is not a run folder: it has no {self.config.name}")
        return self

    def read_config(self) -> dict[str, Any]:
        """The plain values of config.yaml; `config.read_config` makes a `Config` of them."""
        return yaml.safe_load(self.config.read_text(encoding="utf-8"))

    def read_plan(self) -> dict[str, Any]:
        return read_json(self.plan) or {}

    def read_result(self) -> dict[str, Any] | None:
        return read_json(self.result)

    def read_environment(self) -> dict[str, Any] | None:
        return read_json(self.environment)

    def failures(self, attempt: int) -> list[Mapping[str, Any]]:
        """What the attempt's ranks wrote when they failed."""
        found = sorted(self.attempt(attempt).glob("failure-*.json"))
        return [value for path in found if (value := read_json(path)) is not None]
