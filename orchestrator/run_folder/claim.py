"""How a run's folder is made and claimed, and how that is taken back."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path

from orchestrator.errors import RunFolderError
from orchestrator.run_folder.files import PRIVATE, make_folder, open_regular, remove
from orchestrator.run_folder.paths import RunPaths


class Claim(RunPaths):
    """A run's folder, which one start can own."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._made = self._claimed = False  # by this object's `create`

    def create(self) -> None:
        """Make the folder, private to its owner, and claim it: of many that try, one succeeds.

        Raises:
            RunFolderError: it holds another run, is not empty, or cannot be written.
        """
        path = self.path
        try:
            path.parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            try:
                make_folder(path)
                self._made = True
            except FileExistsError:
                self._check_empty()
            # Whoever makes the lock's file owns the folder; what happens to the others happens to
            # them alone.
            os.close(open_regular(self.lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            self._claimed = True
            path.chmod(PRIVATE)
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
                f"python -m orchestrator resume {path}; for a new run choose another folder"
            )
        if any(path.iterdir()):
            raise RunFolderError(f"run.dir={path} is not empty; it must be a new or empty folder")

    def withdraw(self) -> None:
        """Take back what `create` made, and all that was written since; never another's folder.

        The folder goes by one rename, so that nobody claims it while it is being emptied.
        """
        if not self._claimed:
            return
        self._claimed = False
        with contextlib.suppress(FileNotFoundError):  # somebody has removed it already
            if not self._made:
                for entry in self.path.iterdir():
                    remove(entry)
                return
            gone = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")
            self.path.rename(gone)
            shutil.rmtree(gone)
