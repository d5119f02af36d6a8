"""Jobs that end or hang without an exception, at a chosen place in chosen ranks. No framework is
imported.
"""

import ctypes
import gc
import os
import signal
import tempfile
import time
from pathlib import Path

HOURS = 3600


def _stop_where_it_was_seen():
    """Stop after the second in which the rank reported its position."""
    time.sleep(2.5)
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep_in_the_kernel():
    """Hold the interpreter while a child starts, which blocks: it opens a pipe without a writer."""
    pipe = Path(tempfile.mkdtemp(), "pipe")
    os.mkfifo(pipe)
    os.posix_spawn(
        "/bin/true",
        ["true"],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 5, pipe, os.O_RDONLY, 0)],
    )


def _call_another_collective():
    from orchestrator.engine.torch.transports import TorchGroup

    group = next(one for one in gc.get_objects() if isinstance(one, TorchGroup))
    group.silence, silence = None, group.silence
    group.barrier()
    group.silence = silence


FOR_SECONDS = {
    "slow": time.sleep,
    "hold": lambda seconds: ctypes.PyDLL(None).usleep(int(seconds * 1e6)),
}
ACTS = {
    "exit0": lambda: os._exit(0),
    "sleep": lambda: time.sleep(HOURS),
    "interpreter": lambda: ctypes.PyDLL(None).sleep(HOURS),  # holds Python's lock meanwhile
    "stop": _stop_where_it_was_seen,
    "kernel": _sleep_in_the_kernel,
    "other": _call_another_collective,
}


class Acting:
    """Does `act` once on `ranks` ("all" or one number) at a `place`: "init" (before the group
    forms), "loader", "forward" or "evaluate".
    """

    def __init__(self, act="exit0", place="forward", ranks="all", after=2, seconds=0.0, **more):
        super().__init__(**more)
        self.act, self.place, self.ranks = act, place, str(ranks)
        self.seconds, self.left = seconds, after
        self._at("init")

    def dataset(self):
        return Watched(super().dataset(), self)

    def loss(self, model, batch):
        if self.steps == self.left:
            self._at("forward")
        return super().loss(model, batch)

    def evaluate(self, model):
        self._at("evaluate")
        return {"loss": 0.0}

    def _at(self, place):
        mine = self.ranks in ("all", os.environ["SLURM_PROCID"])
        if place != self.place or not mine:
            return
        if self.act in FOR_SECONDS:
            FOR_SECONDS[self.act](self.seconds)
        else:
            ACTS[self.act]()


class Watched:
    def __init__(self, inner, job):
        self.inner, self.job, self.drawn = inner, job, 0

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        self.drawn += 1
        if self.drawn == 12:
            self.job._at("loader")
        return self.inner[index]
