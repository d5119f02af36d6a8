"""A process that ends right after a collective ends in order, however slow gloo's threads are."""

import contextlib
import os
import subprocess
import sys

import pytest

from slurm.polling import first_true
from tests.helpers import ROOT

# All threads but the main one run only when nothing else would, so that gloo's thread is overtaken:
# between saying that the collective is done and freeing its tensors, or where it has freed them and
# waits for Python's lock, which nobody gives up for a while.
START = """
import os, sys, time, torch
import torch.distributed as dist
from orchestrator.engine.torch import TorchGroup

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
group = TorchGroup.wrap(dist.group.WORLD)
group.all_reduce_sum(torch.ones(1000))
processor, idle = {min(os.sched_getaffinity(0))}, os.sched_param(0)
threads = [int(thread) for thread in os.listdir("/proc/self/task")]

def overtake():
    for thread in threads:
        os.sched_setaffinity(thread, processor)
        if thread != threads[0]:
            os.sched_setscheduler(thread, os.SCHED_IDLE, idle)
"""
BEFORE_IT_FREES = """
overtake()
group.all_reduce_sum(torch.ones(1000))
group.all_gather(torch.ones(1000))
group.broadcast(torch.ones(1000))
"""
BEFORE_IT_HAS_THE_LOCK = """
group.all_gather(torch.ones(1000))
sys.setswitchinterval(60.0)
group.all_reduce_sum(torch.ones(1000))
group.broadcast(torch.ones(1000))
end = time.monotonic() + 0.1
while time.monotonic() < end:
    pass
overtake()
"""
END = """
print(group.counters.collectives)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("overtaken", [BEFORE_IT_FREES, BEFORE_IT_HAS_THE_LOCK])
def test_processes_that_end_right_after_a_collective_do_not_abort(overtaken, tmp_path):
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    with contextlib.ExitStack() as stack:  # without what `Held` does, one rank in three aborts
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [
                        sys.executable, "-c", START + overtaken + END,
                        str(rank), str(tmp_path / f"store{turn}"),
                    ],
                    env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
            )
            for turn in range(2) for rank in range(2)
        ]  # fmt: skip
        for rank in ranks:
            stack.callback(rank.kill)
        first_true(lambda: all(rank.poll() is not None for rank in ranks), seconds=10)
        for rank in ranks:  # what is idle would get nothing for minutes where others compute
            _let_run(rank.pid)
        ended = [(*rank.communicate(timeout=200), rank.returncode) for rank in ranks]
    assert ended == [("4\n", "", 0)] * 4


def _let_run(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))
