"""Daemons that outlive this process: start, identify, signal and end them by pid.

A pid in a file proves nothing: after a restart of the machine it may be another user's. A process
is ours only if it runs the program that we started *and* its environment names our slurm.conf. No
other process is ever signalled.
"""

import os
import signal
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from slurm.errors import DevClusterError
from slurm.polling import first_true, wait_until

_SPAWN_SECONDS = 10
_EXEC_SECONDS = 5
_LOG_LINES = 12

# The process writes its own pid before it becomes the daemon: there is no moment at which a
# daemon runs unrecorded, whenever we are killed. The rename makes the file whole.
_RECORD_AND_BECOME = 'echo $$ >"$0.new" && mv "$0.new" "$0" && exec "$@"'


@dataclass(frozen=True, kw_only=True)
class Daemon:
    """Command, environment and files of one daemon; the first two identify its process."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    pid_file: Path
    output: Path
    log: Path

    @property
    def program(self) -> str:
        return Path(self.argv[0]).name

    @property
    def marker(self) -> str:
        return self.environment["SLURM_CONF"]


def start(daemon: Daemon) -> int:
    """Start a daemon in its own session, without a parent, and return its pid."""
    daemon.pid_file.unlink(missing_ok=True)
    with daemon.output.open("wb") as output:
        subprocess.run(
            ["setsid", "--fork", "sh", "-c", _RECORD_AND_BECOME, daemon.pid_file, *daemon.argv],
            env=dict(daemon.environment),
            cwd=daemon.folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=True,
        )
    wait_until(
        daemon.pid_file.exists,
        seconds=_SPAWN_SECONDS,
        what=f"{daemon.name} was started (see {daemon.output})",
    )
    return int(daemon.pid_file.read_text())


def running_pid(daemon: Daemon) -> int | None:
    """Return the pid of the daemon if it lives and is ours, else None."""
    try:
        pid = int(daemon.pid_file.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return pid if _is(pid, daemon) else None


def _is(pid: int, daemon: Daemon) -> bool:
    command: list[str] = []
    environment: dict[str, str] = {}

    def readable() -> bool:
        process = psutil.Process(pid)
        command[:] = process.cmdline()
        environment.update(process.environ())
        return bool(command and environment) or process.status() == psutil.STATUS_ZOMBIE

    try:
        # In the middle of exec both are empty for a moment (and for kernel threads, always).
        if not first_true(readable, seconds=_EXEC_SECONDS):
            return False
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    # Between the record and exec it is still the shell, with the daemon among its arguments.
    ours = environment.get("SLURM_CONF") == daemon.marker
    return ours and any(Path(word).name == daemon.program for word in command)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not, even where init never reaps it."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def send(pid: int, number: signal.Signals) -> None:
    """Signal a process that may have ended by now."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def end(pids: Iterable[int], *, patience_seconds: float) -> None:
    """Send TERM, and KILL after `patience_seconds`; return when all are dead."""
    remaining = [pid for pid in pids if is_alive(pid)]
    for pid in remaining:
        send(pid, signal.SIGTERM)
    if first_true(lambda: not any(map(is_alive, remaining)), seconds=patience_seconds):
        return
    kill(remaining)


def kill(pids: Iterable[int]) -> None:
    """Send KILL, and return when all are dead."""
    remaining = list(pids)
    for pid in remaining:
        send(pid, signal.SIGKILL)
    wait_until(
        lambda: not any(map(is_alive, remaining)),
        seconds=_SPAWN_SECONDS,
        what=f"processes {remaining} ended after SIGKILL",
    )


def why_it_ended(daemon: Daemon) -> DevClusterError:
    """Return an error with the daemon's last output, so that users need not search for it."""
    said: list[str] = []
    for file in (daemon.output, daemon.log):
        if file.exists():
            said += file.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    tail = "\n".join(dict.fromkeys(said))
    return DevClusterError(f"{daemon.name} ended at its start; {daemon.log} says:\n{tail}")
