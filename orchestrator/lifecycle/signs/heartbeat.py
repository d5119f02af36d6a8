"""The heartbeat file of a node: a number that grows, for `status` where the scheduler is silent."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.rundir.files import open_nofollow
from orchestrator.rundir.status import BEAT_BYTES


def write_beat(path: Path, beat: int) -> None:
    """Write the node's newest beat over the one before it."""
    try:
        descriptor = open_nofollow(path, os.O_WRONLY | os.O_CREAT)
        try:
            os.pwrite(descriptor, f"{beat:<{BEAT_BYTES}}".encode("ascii"), 0)
        finally:
            os.close(descriptor)
    except OSError as error:  # a full disk: the heartbeat file alone decides nothing
        print(f"no heartbeat could be written: {error.strerror}", flush=True)
