"""A process that ends right after a collective ends in order, however slow gloo's threads are."""

import os
import subprocess
import sys

from tests.helpers import ROOT

# All threads but the main one run only when nothing else would: gloo's thread is overtaken between
# saying that the collective is done and freeing its tensors.
SCRIPT = """
import os, sys, torch
import torch.distributed as dist
from orchestrator.engine.torch import TorchGroup

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
group = TorchGroup.wrap(dist.group.WORLD)
group.all_reduce_sum(torch.ones(1000))
processor = {min(os.sched_getaffinity(0))}
for thread in map(int, os.listdir("/proc/self/task")):
    os.sched_setaffinity(thread, processor)
    if thread != os.getpid():
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
group.all_reduce_sum(torch.ones(1000))
group.all_gather(torch.ones(1000))
group.broadcast(torch.ones(1000))
print(group.counters.collectives, flush=True)
"""


def test_processes_that_end_right_after_a_collective_do_not_abort(tmp_path):
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    for turn in range(3):  # without what `held` does, one rank in three aborts
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / f"store{turn}")],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        for rank in ranks:
            said, errors = rank.communicate(timeout=60)
            assert (rank.returncode, said, errors) == (0, "4\n", "")
