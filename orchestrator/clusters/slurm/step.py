"""A step of an allocation, held by its launcher: the script that starts it, what its end means.

The script passes USR2 on to the ranks, which is a stop, and TERM to srun, which ends them at once.
When the launcher is gone, however it ended, the kernel sends it TERM.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from orchestrator.clusters.api import Handle, Request, State
from orchestrator.clusters.slurm.root_cause import blame_slurm, stopped_only
from orchestrator.errors import EXIT_FINISHED
from orchestrator.lifecycle.prctl import die_with
from orchestrator.lifecycle.signs.last_word import ended_with, wordless
from orchestrator.lifecycle.signs.node_watch import STOPPED
from orchestrator.rundir.files import APPENDING, open_nofollow
from orchestrator.rundir.folder import RunDir
from orchestrator.scheduler.srun_words import STOP_CODES

END_S = 60.0  # srun waits for tasks that it has ended, and the scheduler for their node


class StepHandle(Handle):
    """The ranks of an attempt, as their launcher holds them.

    Args:
        script: starts srun, and ends with its code.
        environment: of the script.
    """

    def __init__(self, request: Request, script: Path, environment: Mapping[str, str]) -> None:
        self._run, self._attempt = RunDir(request.run), request.attempt
        self._state, self._stopping = State.RUNNING, False
        with os.fdopen(open_nofollow(self._run.batch_log, APPENDING), "ab") as log:
            self._process = subprocess.Popen(
                ["bash", str(script)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C in the terminal reaches the launcher alone
                preexec_fn=partial(die_with, os.getpid(), signal.SIGTERM),  # noqa: PLW1509  # no other thread of ours holds a lock
            )

    def poll(self, timeout_s: float) -> State:
        if not self._state.ended:
            try:
                self._state = self._meaning(self._process.wait(timeout_s))
            except subprocess.TimeoutExpired:
                return State.RUNNING
        return self._state

    def _meaning(self, code: int) -> State:
        run, attempt = self._run, self._attempt
        if code == EXIT_FINISHED and wordless(run, attempt) is None:
            return State.STOPPED if ended_with(run, attempt, STOPPED) else State.FINISHED
        early = code in STOP_CODES and not run.failures(attempt) and stopped_only(run, attempt)
        if self._stopping and early:  # before they could heed it
            return State.STOPPED
        self.culprit = blame_slurm(run, attempt, run.nodes_of_ranks(attempt), code)
        return State.FAILED

    def stop(self) -> None:
        self._stopping = True
        self._process.send_signal(signal.SIGUSR2)

    def kill(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:  # no node answers; the allocation's end is theirs
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._state = State.FAILED
