"""Faults and holds of the tests' jobs. No framework is imported."""

import os
import signal
import time
from collections import UserDict

from tests.hold import Hold


class Mute(Exception):
    def __str__(self):
        raise ValueError("no words")


class Faulty:
    """Mixin for a job that pauses, waits or fails in a chosen micro-step.

    Args:
        pause_s: sleep in every micro-step, until `hold` is released.
        hold: folder of a `tests.hold.Hold`.
        fault: what happens to rank `fault_rank` (None: to all) when it has done `fault_after`
            micro-steps: "raise", "kill", "drift", "mute" (an exception that cannot be printed),
            "fork" (two children that do not end themselves).
    """

    def __init__(self, pause_s=0.0, fault=None, fault_rank=1, fault_after=5, hold=None):
        self.pause_s, self.fault = pause_s, fault
        self.fault_rank, self.fault_after = fault_rank, fault_after
        self.hold = Hold(hold) if hold else None
        if self.hold:
            self.hold.wait_as_newcomer()
        # The next update is unknown until this process's first boundary. These are of one process
        # by intention, so the engine's warning of state that no checkpoint holds is not wanted.
        self._progress = UserDict(steps=0, next_update=None)

    @property
    def steps(self):
        return self._progress["steps"]

    @steps.setter
    def steps(self, steps):
        self._progress = UserDict(self._progress, steps=steps)  # so that copies of the job differ

    def now(self, fault):
        mine = self.fault_rank in (None, int(os.environ["SLURM_PROCID"]))
        return self.fault == fault and mine and self.steps == self.fault_after

    def after_update(self, model, update):
        self._progress["next_update"] = update + 1

    def pause_or_fail(self):
        if self.hold:
            self.hold.wait_at(self._progress["next_update"])
        if self.now("raise"):
            raise ValueError("the tiny job was told to fail [here]")
        if self.now("mute"):
            raise Mute
        if self.now("fork"):
            for ending in (SystemExit(0), ValueError("of a child")):
                if not (child := os.fork()):
                    raise ending
                os.waitpid(child, 0)
        if self.now("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.pause_s and not (self.hold and self.hold.released):
            time.sleep(self.pause_s)
