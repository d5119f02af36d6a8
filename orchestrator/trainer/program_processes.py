"""A program's processes, seen from outside: stopped, at work, joined to the others, left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Collection
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil

from orchestrator.agent.processes import descendants, processor_s, state_of
from orchestrator.errors import OrchestratorError, PeerLost, describe_status
from orchestrator.rundir.files import read_end

LINGER_S = 1.0  # for what ends by itself once the program has: loaders, trackers
KILL_S = 5.0


def is_stopped(pid: int) -> bool:
    """Return whether the program, or any process of it, is stopped (SIGSTOP)."""
    return any(state_of(one) == "T" for one in (pid, *descendants(pid)))


def used_s(pid: int) -> float:
    """Return the processor time of the program's processes so far, in seconds."""
    return sum(map(processor_s, (pid, *descendants(pid))))


def has_joined(pid: int, port: int) -> bool:
    """Return whether a process of the program serves the rendezvous port, or is connected to it."""
    for one in (pid, *descendants(pid)):
        try:
            found = psutil.Process(one).net_connections(kind="tcp")
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended, or became another's
            continue
        for connection in found:
            local, remote = connection.laddr, connection.raddr
            if connection.status == psutil.CONN_LISTEN and local and local.port == port:
                return True
            if connection.status == psutil.CONN_ESTABLISHED and remote and remote.port == port:
                return True
    return False


def is_served(address: str, port: int) -> bool:
    """Return whether a process listens at the rendezvous."""
    try:
        with socket.create_connection((address, port), timeout=1.0):
            return True
    except OSError:
        return False


def end_leftovers(spare: Collection[int] = ()) -> int:
    """End what the program left running, after a moment in which it may end by itself.

    Returns:
        How many had to be ended.
    """
    now = time.monotonic()
    linger, until = now + LINGER_S, now + KILL_S
    ended: set[int] = set()
    while time.monotonic() < until:
        found = [pid for pid in descendants(os.getpid()) if pid not in spare and _lives(pid)]
        if not found:
            break
        if time.monotonic() > linger:
            for pid in found:
                _kill(pid)
                ended.add(pid)
        time.sleep(0.01)
    return len(ended)


def end_all(pid: int) -> None:
    """End the program and all its processes at once."""
    for one in (*descendants(pid), pid):
        _kill(one)


def _lives(pid: int) -> bool:
    if state_of(pid) not in "ZX":
        return True
    with contextlib.suppress(ChildProcessError):  # not ours yet: its parent is to collect it
        os.waitpid(pid, os.WNOHANG)
    return False


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # it ended in this moment
        return


# ----------------------------------------------------------------------
# What a program's end means: its exit status in words, what it raised, and whose fault that is.

LOOKED_AT_BYTES = 64 * 1024
MESSAGE_LINES = 3
LONGEST_LINE = 500
RAISED = re.compile(
    r"(?:[A-Za-z_][\w.]*\.)?[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt|Warning)\b"
)
LOGGED = re.compile(
    r"\[?(?:rank\d+\]:\[)?(?:(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b|[IWEF]\d{4} \d\d:)"
)
"""Beginning of a line of a log, which threads of frameworks write while an exception is printed."""
RANK_OF_TORCH = re.compile(r"^\[rank[0-9]+\]: ?")  # before each line, once its group is formed
TRACEBACK = "Traceback (most recent call last):"
BY_SHELL = 128
PEER_LOST = re.compile(
    r"connection (?:closed|reset) by peer|connection reset|broken pipe|connection refused|"
    r"socket (?:closed|timeout)|pair closure|failed to recv, got 0 bytes|"
    r"recvvalue failed|remote process exited|ncclremoteerror|nccl.*network error|"
    r"collective operation timeout|client socket has (?:timed out|failed to connect)|"
    r"timed out waiting \d+ms for (?:recv|send) operation|the other (?:end|side) closed",
    re.IGNORECASE,
)
"""Messages of frameworks for a rank that was lost, or never came."""


class ProgramFailed(OrchestratorError):
    """Failure of a rank's program."""


def error_of(status: int, log: str, error_file: Path) -> OrchestratorError:
    """Return what ended the program, as an error: `PeerLost` if another rank's end caused it.

    Args:
        status: as of `subprocess`, not 0.
        log: the end of what the program said in this attempt.
        error_file: what torch's `record` writes, where the script is decorated with it.
    """
    raised = _of_error_file(error_file) or raised_in(log)
    said = describe_end(status)
    if raised is None:
        return ProgramFailed(said)
    kind = PeerLost if PEER_LOST.search(raised) else ProgramFailed
    return kind(f"{raised} ({said})")


def describe_end(status: int) -> str:
    """Describe an exit status; shells return 128 + n for a child that signal n killed.

    >>> describe_end(-9), describe_end(3)
    ('killed by signal 9 (SIGKILL)', 'exited with code 3')
    >>> describe_end(137)
    'exited with code 137, as a shell does whose program was killed by signal 9 (SIGKILL)'
    """
    text = describe_status(status)
    if status > BY_SHELL and status - BY_SHELL in signal.valid_signals():
        text += f", as a shell does whose program was {describe_status(BY_SHELL - status)}"
    return text


def raised_in(log: str) -> str | None:
    r"""Return the last exception in a log: its line, and the further lines of its text.

    >>> raised_in("x\nTraceback (most recent call last):\n  File …\nValueError: no\n")
    'ValueError: no'
    >>> raised_in("[rank1]: Traceback (most recent call last):\n[rank1]: OSError: 5")
    'OSError: 5'
    >>> raised_in(f"{TRACEBACK}\nValueError: no\nsuch word\n[INFO] DISTRIBUTED(1): Start]\ndone")
    'ValueError: no such word'
    >>> raised_in("all is well\n") is None
    True
    """
    _, found, after = log.rpartition(TRACEBACK)
    if not found:
        return None
    lines = [RANK_OF_TORCH.sub("", line) for line in after.splitlines()]
    place = next((i for i, line in enumerate(lines) if RAISED.match(line)), None)
    if place is None:
        return None
    said = takewhile(lambda line: not LOGGED.match(line), lines[place:][:MESSAGE_LINES])
    words = [line.strip()[:LONGEST_LINE] for line in said]
    return " ".join(word for word in words if word)


def _of_error_file(path: Path) -> str | None:
    """Return the message that torch.distributed.elastic's error handler wrote, if it did."""
    try:
        value: Any = json.loads(read_end(path, LOOKED_AT_BYTES))
        message = value["message"]
        return str(message["message"] if isinstance(message, dict) else message)[:LONGEST_LINE]
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # another program's file, or none
        return None
