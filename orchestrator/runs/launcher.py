"""Commands of ours in a process of their own, for callers from Python.

The process is started as from a shell, in a session of its own: it shares nothing with the caller
but the environment, the working folder, and the folders in which it finds modules.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator import errors
from orchestrator.client.run import current_run
from orchestrator.errors import ConfigError, OrchestratorError, describe_status, require_cwd
from orchestrator.report.caller import CALLER_VARIABLE, ERROR, FOLDER, MESSAGE
from orchestrator.source.modules import is_in_interpreter

POLL_S = 0.2
TERMINAL_VARIABLES = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE")
"""A notebook's kernel sets them for its own output. The command writes to a file, whose lines are
read: colours and breaks would hide its warnings.
"""


class LauncherProcess:
    """A launcher, one of our commands in a process of its own, which reports how it has begun."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._read, its_end = os.pipe()
        os.set_blocking(self._read, False)
        weakref.finalize(self, os.close, self._read)
        self._text = b""
        self._error: Mapping[str, str] | None = None
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  # until it has a folder
        weakref.finalize(self, self._printed.close)
        environment = {**os.environ, CALLER_VARIABLE: str(its_end)}
        for name in TERMINAL_VARIABLES:
            environment.pop(name, None)
        environment["PYTHONPATH"] = os.pathsep.join(_own_paths())
        try:
            self._process = subprocess.Popen(  # our own command
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=self._printed,
                pass_fds=[its_end],
                env=environment,
                start_new_session=True,
            )
        finally:
            os.close(its_end)
        # The caller need not wait for the process, which must not stay as a zombie then.
        threading.Thread(target=self._process.wait, daemon=True).start()

    def await_begin(self, depth: int) -> Path | None:
        """Return the folder of the run or sweep that has begun; None if there was nothing to begin.

        Args:
            depth: see `launch`.

        Raises:
            OrchestratorError: what the command refused.
        """
        readable = select.poll()  # select() takes no descriptor above 1023
        readable.register(self._read, select.POLLIN)
        try:
            while True:
                ended = self._process.poll() is not None  # before the pipe is read
                if (message := self._next()) is not None:
                    self._raise(message)
                    self._warn(depth)
                    self._printed.close()  # it writes to the run's folder now
                    return Path(message[FOLDER])
                if ended:
                    break
                readable.poll(1000 * POLL_S)
        except KeyboardInterrupt:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()
            raise
        if self._process.returncode == 0:
            self._warn(depth)
            return None
        raise OrchestratorError(
            f"the command that starts runs {describe_status(self._process.returncode)}:\n"
            f"{self.text_printed().strip() or 'it printed nothing'}"
        )

    def raise_error(self, wait_s: float = 0.0) -> None:
        """Raise the error that the command has ended with, if any.

        Args:
            wait_s: at most, for its end.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        if (message := self._next()) is not None:
            self._error = message
        if self._error is not None:
            self._raise(self._error)

    def _next(self) -> Mapping[str, str] | None:
        """Return the command's next report, if there is one."""
        with contextlib.suppress(BlockingIOError):
            while more := os.read(self._read, 65_536):
                self._text += more
        line, end, rest = self._text.partition(b"\n")
        if not end:
            return None
        self._text = rest
        return json.loads(line)

    @staticmethod
    def _raise(message: Mapping[str, str]) -> None:
        if ERROR not in message:
            return
        kind = getattr(errors, message[ERROR], OrchestratorError)
        try:
            error = kind(message[MESSAGE])
        except TypeError:  # one that carries more than its message
            error = OrchestratorError(message[MESSAGE])
        raise error

    def _warn(self, depth: int) -> None:
        """Repeat the command's warnings at the line of the user's call."""
        for line in self.text_printed().splitlines():
            if line.startswith("warning: "):
                warnings.warn(line.removeprefix("warning: "), stacklevel=4 + depth)

    def text_printed(self) -> str:
        """Return the command's output until it began, or all of it if it did not begin."""
        size = os.fstat(self._printed.fileno()).st_size
        return os.pread(self._printed.fileno(), size, 0).decode(errors="replace")


def _own_paths() -> list[str]:
    """Return the folders where this process finds modules, besides those of Python and of installed
    packages: a script's, say. The process that it starts searches them, too.
    """
    here = Path.cwd()
    paths = (Path(entry).absolute() for entry in sys.path if entry)
    own = [path for path in paths if path != here and path.is_dir() and not is_in_interpreter(path)]
    inherited_paths = [
        entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry
    ]
    return [*dict.fromkeys([*map(str, own), *inherited_paths])]


def launch(
    arguments: Sequence[str], caller: str, depth: int = 1
) -> tuple[Path | None, LauncherProcess]:
    """Run a command of ours until it has begun.

    Args:
        caller: the function that the user has called, for messages.
        depth: how many functions of ours there are between the user's line and this one.
    """
    require_cwd()
    if current_run:
        raise ConfigError(
            f"{caller} was called in rank {current_run.rank} of {current_run.folder}: every rank "
            "imports the job's module, or runs the program, and would start a run of its own; "
            'call it in another script, or below if __name__ == "__main__":'
        )
    launcher = LauncherProcess(arguments)
    return launcher.await_begin(depth), launcher
