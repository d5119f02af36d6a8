"""Backup of the files that a resume changes in a run's folder before its ranks are placed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from orchestrator.rundir.files import is_folder, names_in, read_bytes, remove, write_atomically
from orchestrator.rundir.folder import RunDir


@dataclass(frozen=True, slots=True)
class Backup:
    """The state of a run's folder before a resume.

    Attributes:
        contents: of the files that a resume writes, moves or removes.
        absent: such files, and folders, that did not exist.
        names: in the folders where a submission puts its own files.
    """

    contents: Mapping[Path, bytes]
    absent: tuple[Path, ...]
    names: Mapping[Path, frozenset[str]]

    @classmethod
    def of(cls, run: RunDir) -> Self:
        """Read it. Raises `OSError`, and `RunFolderError` for a link in the place of a file."""
        files = [
            run.config,
            run.plan,
            run.submission,
            run.resumes,
            run.speeds,
            run.handle,
            run.cancel,
            run.pruned,
            run.result,
        ]
        if attempts := run.attempts_made():  # where the configuration and the handle before go
            latest = run.attempt(attempts - 1)
            files += [latest / run.config.name, latest / run.handle.name]
        folders = [run.code, run.submitit]
        return cls(
            contents={file: read_bytes(file) for file in files if os.path.lexists(file)},
            absent=tuple(path for path in (*files, *folders) if not os.path.lexists(path)),
            names={folder: frozenset(names_in(folder)) for folder in folders if is_folder(folder)},
        )

    def restore(self) -> None:
        """Put it back, file by file; raise the last `OSError` after all files were tried."""
        failure: OSError | None = None
        new = [
            *(path for path in self.absent if os.path.lexists(path)),
            *(
                folder / name
                for folder, names in self.names.items()
                for name in names_in(folder)
                if name not in names
            ),
        ]
        for path in new:  # first: it makes room on a full disk
            try:
                remove(path)
            except OSError as error:
                failure = error
        for file, content in self.contents.items():
            try:
                if not file.exists() or read_bytes(file) != content:
                    write_atomically(file, content)
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure
