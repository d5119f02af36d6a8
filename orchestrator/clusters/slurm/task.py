"""The one thing that is pickled: where the run folder is. Everything else is read from there."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import EXIT_FINISHED, EXIT_STOPPED


@dataclass(frozen=True, slots=True)
class Task:
    """What submitit runs in every rank."""

    run: str

    def __call__(self) -> None:
        """Be one rank, and end the process with its exit code.

        An agreed stop ends with 0, so that srun lets the others finish theirs. The process ends
        here, so submitit's handlers and result files play no part: ours says how the run ended.
        """
        signal.signal(signal.SIGCONT, signal.SIG_DFL)  # submitit's handler would only talk
        from orchestrator.lifecycle.topology import Topology
        from orchestrator.rank.entry import be_rank

        code = be_rank(Path(self.run), Topology.from_env(os.environ).attempt)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_FINISHED if code == EXIT_STOPPED else code)
