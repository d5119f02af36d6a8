"""The one thing that is pickled: where the run folder is. Everything else is read from there."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import EXIT_FINISHED, EXIT_STOPPED
from orchestrator.rundir.folder import RunDir

TASK = "task.pkl"  # beside what submitit looks for, which is called by the job's id


def write_task(run: RunDir) -> None:
    """Write what the ranks are told to do, before there is a job: it needs nobody then who knows
    its id.
    """
    from submitit.core.utils import DelayedSubmission  # as slow as all of submitit

    DelayedSubmission(Task(str(run.path))).dump(run.submitit / TASK)


def find_task(folder: Path) -> None:
    """Give it the name by which submitit looks for it in this job, where nobody has yet."""
    from submitit.core.utils import JobPaths
    from submitit.slurm.slurm import SlurmJobEnvironment

    task = folder / TASK
    if task.exists():
        with contextlib.suppress(FileExistsError):  # another rank, or who has submitted it
            os.link(task, JobPaths(folder, job_id=SlurmJobEnvironment().job_id).submitted_pickle)


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
        from orchestrator.lifecycle.forks import leave
        from orchestrator.lifecycle.topology import Topology
        from orchestrator.trainer.entry import main_of

        run = Path(self.run)
        code = main_of(run)(run, Topology.from_env(os.environ).attempt)
        leave(EXIT_FINISHED if code == EXIT_STOPPED else code)
