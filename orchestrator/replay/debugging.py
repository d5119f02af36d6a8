"""pdb in a rank of a replay, with this command's terminal."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import tempfile
from pathlib import Path

from orchestrator.api import Run
from orchestrator.errors import RunFailed, UsageError
from orchestrator.replay.scratch import Request, Scratch, stop_on_signals

POLL_S = 0.2
BYTES = 65_536


def debug(scratch: Scratch, request: Request, checkpoint: Path | None) -> None:
    """Stop in the user's code at a micro-step, and relay pdb until it ends.

    Args:
        request: without a socket.

    Raises:
        RunFailed: the replay ended before it came there.
    """
    # A socket's path has to be short.
    with stop_on_signals(), tempfile.TemporaryDirectory(prefix="replay-") as place:
        path = f"{place}/pdb"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen(1)
            server.settimeout(POLL_S)
            run = scratch.start(_with_socket(request, path), checkpoint)
            try:
                link = _accepted(server, run)
                with link:
                    _relay(link)
            finally:
                with contextlib.suppress(UsageError):
                    if not run.has_ended:
                        run.cancel(now=True)
                run.wait()


def _with_socket(request: Request, path: str) -> Request:
    return Request(
        update=request.update, last=request.last, debug_step=request.debug_step, socket=path
    )


def _accepted(server: socket.socket, run: Run) -> socket.socket:
    while True:
        with contextlib.suppress(TimeoutError):
            return server.accept()[0]
        if run.has_ended:
            log = run.logs(lines=15).strip()
            raise RunFailed(f"the replay ended before it could stop in pdb; its log ends:\n{log}")


def _relay(link: socket.socket) -> None:
    """Copy what is typed to pdb, and what pdb prints to the terminal, until either ends."""
    watched = [link.fileno(), sys.stdin.fileno()]
    while True:
        ready, _, _ = select.select(watched, [], [])
        if link.fileno() in ready:
            text = link.recv(BYTES)
            if not text:
                return
            os.write(sys.stdout.fileno(), text)
        if sys.stdin.fileno() in ready:
            typed = os.read(sys.stdin.fileno(), BYTES)
            if typed:
                link.sendall(typed)
            else:  # the end of what is typed; pdb quits, and may still print
                link.shutdown(socket.SHUT_WR)
                watched = [link.fileno()]
