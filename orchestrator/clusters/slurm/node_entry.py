"""Entry points of the batch script: `node_entry.py node FOLDER | after RUN ATTEMPT CODE SIGNAL`.

`python -P` runs this file, so neither its own folder nor the user's working folder, whose files
may have been edited since, comes first in Python's path: the run's code does.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path


def put_own_code_first() -> None:
    """Begin the search path of this process and of its child processes with the run's code."""
    # As `agent.topology` names them, which cannot be imported yet.
    own, outer = os.environ["ORCHESTRATOR_PYTHONPATH"], os.environ.get("PYTHONPATH", "")
    sys.path[:0] = own.split(os.pathsep)
    os.environ["ORCHESTRATOR_OUTER_PYTHONPATH"] = outer
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [own, outer]))


def node(folder: str) -> None:
    """Run one node. Stop signals wait until its agent has handlers; they would be fatal before."""
    import signal

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    from submitit.core.submission import process_job

    from orchestrator.clusters.slurm.task import find_task, set_nodes

    set_nodes(Path(folder).parent)
    find_task(Path(folder))
    process_job(folder)


def after(run: str, attempt: str, code: str, stop_signal: str) -> None:
    """Finalize the attempt after srun; exit with 3 if the run was stopped, 1 if it failed.

    So `afterok` of another job waits for a run that finished. Standard input gets a line for each
    stop signal that the script gets meanwhile.

    Args:
        stop_signal: the first signal that the script got, or "".
    """
    from orchestrator.agent.processes import wait_readable
    from orchestrator.clusters.slurm.finalize import Next, finalize_in_job, finalize_patiently
    from orchestrator.errors import (
        EXIT_FAILED,
        EXIT_STOPPED,
        START_AGAIN,
        ClusterError,
        RunFolderError,
    )
    from orchestrator.notify import Notifier
    from orchestrator.rundir.folder import RunDir

    is_stopped = partial(wait_readable, [0], 0.0)
    arguments = Path(run), int(attempt), int(code), stop_signal, is_stopped
    try:
        follows = finalize_patiently(partial(finalize_in_job, *arguments))
    except (ClusterError, RunFolderError) as error:
        sys.exit(f"error: the run was neither requeued nor ended: {error}; resume goes on")
    notifier = Notifier(RunDir(Path(run)))
    notifier.send()
    notifier.wait()
    if follows is Next.NEW_SRUN:
        sys.exit(START_AGAIN)
    if follows is Next.REQUEUE:
        sys.exit(0)
    ended = RunDir(Path(run)).read_result() or {"state": "failed"}
    sys.exit({"finished": 0, "stopped": EXIT_STOPPED}.get(ended["state"], EXIT_FAILED))


if __name__ == "__main__":
    put_own_code_first()
    {"node": node, "after": after}[sys.argv[1]](*sys.argv[2:])
