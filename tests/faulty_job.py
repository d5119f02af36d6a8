"""What tests make their jobs do at a chosen moment. No framework is imported."""

import os
import signal
import time


class Mute(Exception):
    def __str__(self):
        raise ValueError("no words")


class Faulty:
    """Of a job.

    Args:
        pause_s: sleep in every micro-step, so that a test can step in.
        fault: what happens to rank `fault_rank` when it has done `fault_after` micro-steps:
            "raise", "kill", "exit", "leave", "nan", "memory", "hang", "drift", "mute" (an exception
            that cannot be printed), "fork" (two children that do not end themselves).
    """

    def __init__(self, pause_s=0.0, fault=None, fault_rank=1, fault_after=5):
        self.pause_s, self.fault = pause_s, fault
        self.fault_rank, self.fault_after = fault_rank, fault_after
        self.steps = 0

    def now(self, fault):
        mine = int(os.environ["SLURM_PROCID"]) == self.fault_rank
        return self.fault == fault and mine and self.steps == self.fault_after

    def pause_or_fail(self):
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
        if self.now("exit"):
            os._exit(7)
        if self.now("leave"):
            os._exit(0)
        if self.now("memory"):
            raise MemoryError
        if self.now("hang"):
            time.sleep(3600)
        if self.pause_s:
            time.sleep(self.pause_s)
