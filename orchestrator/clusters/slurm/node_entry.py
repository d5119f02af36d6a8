"""Entry points of the batch script: `node_entry.py node FOLDER | after RUN ATTEMPT CODE SIGNAL`.

Run as a file, so that the first entry of Python's path is this file's folder, which is removed:
with `-m` it would be the user's working folder, whose files may have been edited since.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# As in `start_from_copy`, which started this if the code is a copy.
PLACE_VARIABLE, LOCK_VARIABLE = "ORCHESTRATOR_CODE", "ORCHESTRATOR_CODE_LOCK"


def node(folder: str) -> None:
    """Run one node. Stop signals wait until its agent has handlers; they would be fatal before."""
    import signal

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    # We know only our own step, which may be a part of a user's allocation.
    for ours in ("NUM_NODES", "NODELIST"):
        os.environ[f"SLURM_JOB_{ours}"] = os.environ[f"SLURM_STEP_{ours}"]
    if LOCK_VARIABLE in os.environ:  # child processes of a worker must not keep its code there
        os.set_inheritable(int(os.environ[LOCK_VARIABLE]), False)
    from submitit.core.submission import process_job

    from orchestrator.clusters.slurm.task import find_task

    find_task(Path(folder))
    process_job(folder)


def after(run: str, attempt: str, code: str, stop_signal: str) -> None:
    """Settle the attempt after srun; exit with 1 if the run has failed.

    Args:
        stop_signal: the first signal that the script got, or "".
    """
    from orchestrator.clusters.slurm.outcome import Next, finish
    from orchestrator.errors import START_AGAIN
    from orchestrator.rundir.folder import RunDir

    try:
        follows = finish(Path(run), int(attempt), int(code), stop_signal)
    finally:
        _leave_copy()
    if follows is Next.NEW_SRUN:
        sys.exit(START_AGAIN)
    ended = RunDir(Path(run)).read_result()
    well = follows is Next.REQUEUE or (ended is not None and ended["state"] != "failed")
    sys.exit(0 if well else 1)


def _leave_copy() -> None:
    """Remove this node's copy of the code, unless a rank still runs from it."""
    if LOCK_VARIABLE not in os.environ:
        return
    from orchestrator.start_from_copy import remove

    os.close(int(os.environ[LOCK_VARIABLE]))
    remove(Path(os.environ[PLACE_VARIABLE]))


if __name__ == "__main__":
    if sys.path[0] == str(Path(__file__).resolve().parent):
        del sys.path[0]
    {"node": node, "after": after}[sys.argv[1]](*sys.argv[2:])
