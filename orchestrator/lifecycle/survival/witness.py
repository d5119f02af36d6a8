"""The process that vouches for its rank, which may live and be unable to say so.

Beats come from a thread of the rank's own process, which needs Python's interpreter. Code that
holds it (a C extension, a large pickle, a regular expression) keeps that thread from speaking, for
as long as it lasts. So each rank has a process beside it that needs nothing of it: asked over TCP,
it says what the kernel knows of the rank. It ends with its rank, and goes silent with its node.

A word is signed with the attempt's secret, and with a number that the asking rank drew, so nobody
else can speak for a dead one, nor say again what was true once. It is run as a file, with nothing
but the standard library: it has to be there in a moment, and stay small. Who asks: `vouchers.py`.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ASK_BYTES = 33
"""What is asked: a number drawn by who asks, in hexadecimal digits, and a new line."""
MOST_ASKING = 64
ASKING_S = 2.0
GONE = "X"
NOT_OURS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def sign(secret: str, member: int, number: str, letter: str) -> str:
    """What shows that the witness of this member has said this, now."""
    said = f"witness {member} {number} {letter}"
    return hmac.new(secret.encode(), said.encode(), hashlib.sha256).hexdigest()


def letter_of(pid: int) -> str:
    """The kernel's letter for a process's state (`lifecycle/signs/processes.py`)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return GONE


class Witness:
    """Of one process.

    Args:
        member: its number (`members.py`).
        listener: where it is asked.
        secret: of the attempt.
    """

    def __init__(self, pid: int, member: int, listener: socket.socket, secret: str) -> None:
        self._pid, self._member, self._secret = pid, member, secret
        self._listener, self._rank = listener, os.pidfd_open(pid)  # can be read from at its end
        self._asking: dict[socket.socket, tuple[float, bytes]] = {}  # since when, what has come

    def testify(self) -> None:
        """Until the rank has ended."""
        while True:
            asking = {one.fileno(): one for one in self._asking}
            descriptors = [self._rank, self._listener.fileno(), *asking]
            ready = select.select(descriptors, [], [], ASKING_S if asking else None)[0]
            if self._rank in ready:
                return
            if self._listener.fileno() in ready:
                self._take()
            for one in [asking[number] for number in ready if number in asking]:
                self._hear(one)
            self._tire()

    def _take(self) -> None:
        try:
            one = self._listener.accept()[0]
        except OSError:  # it has gone already
            return
        one.setblocking(False)
        self._asking[one] = time.monotonic(), b""

    def _hear(self, one: socket.socket) -> None:
        since, said = self._asking[one]
        try:
            content = one.recv(ASK_BYTES)
            said += content
            if content and len(said) < ASK_BYTES:
                self._asking[one] = since, said
                return
            if len(said) == ASK_BYTES and said.endswith(b"\n"):
                number, letter = said[:-1].decode("ascii", "replace"), letter_of(self._pid)
                one.send(f"{letter} {sign(self._secret, self._member, number, letter)}\n".encode())
        except OSError:  # who asked is gone
            pass
        self._close(one)

    def _tire(self) -> None:
        """Who asks nothing is not kept, nor more of them than there is room for."""
        now = time.monotonic()
        late = [one for one, (since, _) in self._asking.items() if now - since > ASKING_S]
        for one in [*late, *list(self._asking)[: -MOST_ASKING or None]]:
            if one in self._asking:
                self._close(one)

    def _close(self, one: socket.socket) -> None:
        del self._asking[one]
        one.close()


def begin_witness(listener: socket.socket, secret: str, member: int) -> subprocess.Popen[str]:
    """Start this process's, which is asked at `listener`."""
    words = (os.getpid(), member, listener.fileno())
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[listener.fileno()],
        start_new_session=True,
        text=True,
    )
    listener.close()
    with process.stdin or sys.stdin as pipe:
        pipe.write(secret)
    return process


def main() -> None:
    """`witness.py PID MEMBER LISTENER`, with the secret on standard input: be that process's."""
    for number in NOT_OURS:
        signal.signal(number, signal.SIG_IGN)  # a stop is the rank's to heed
    pid, member, descriptor = map(int, sys.argv[1:])
    listener = socket.socket(fileno=os.dup(descriptor))  # a small number, as `select` needs
    os.close(descriptor)
    witness = Witness(pid, member, listener, sys.stdin.read())
    if os.getppid() == pid:  # else it has ended, and its number may be another's
        witness.testify()


if __name__ == "__main__":
    main()
