"""What the batch script starts on a node: `on_node.py rank FOLDER | after RUN ATTEMPT CODE`.

Run as a file, so that the first entry of Python's path is this file's folder, which is taken away:
with `-m` it would be the folder where the person stood, whose files may have been edited since.
"""

from __future__ import annotations

import sys
from pathlib import Path


def rank(folder: str) -> None:
    """One rank. Stop signals wait until the worker has its handlers; they would be fatal before."""
    import signal

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    from submitit.core.submission import process_job

    process_job(folder)


def after(run: str, attempt: str, code: str) -> None:
    """What is left to do once srun has ended."""
    from orchestrator.submit.epilogue import settle

    settle(Path(run), int(attempt), int(code))


if __name__ == "__main__":
    if sys.path[0] == str(Path(__file__).resolve().parent):
        del sys.path[0]
    {"rank": rank, "after": after}[sys.argv[1]](*sys.argv[2:])
