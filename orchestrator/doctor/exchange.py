"""The program that `doctor --run` starts on the real nodes: all-reduces, timed and checked.

What runs is what torchrun would start; the look at the nodes is what our own ranks take before they
train (`lifecycle/preflight/`), over the framework's own collective.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.inside.variables import ATTEMPT, RUN
from orchestrator.lifecycle.address import own_address
from orchestrator.lifecycle.preflight.judging import as_json, judged
from orchestrator.lifecycle.preflight.look import look
from orchestrator.lifecycle.topology import Topology
from orchestrator.run_folder.rundir import RunDir, write_json

SIZES_MIB = (1, 64)
REPEATS = 5


def main() -> None:
    """Meet the other ranks; sum tensors of `SIZES_MIB` with them; report bandwidths in GB/s."""
    import torch
    import torch.distributed as dist

    from orchestrator.inside.run import Run

    gpus = torch.cuda.is_available()
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpus else "gloo")
    device = "cuda" if gpus else "cpu"
    ranks, run = dist.get_world_size(), Run(os.environ)
    print(f"rank {dist.get_rank()} on {socket.gethostname()}, {device}", flush=True)  # noqa: T201  # its log
    for place, size in enumerate(SIZES_MIB):
        tensor = torch.ones(size << 18, device=device)
        took = min(_seconds(tensor, torch, dist) for _ in range(REPEATS))
        # What one rank has to send at the least, as in `engine.api.Counters`.
        moved = 2 * (ranks - 1) / ranks * (size << 20)
        right = float(tensor[0]) == float(tensor[-1]) == ranks
        run.report(place, loss=0.0 if right else 1.0, mib=size, seconds=took,
                   gigabytes_per_s=moved / took / 1e9, ranks=ranks)  # fmt: skip
    _look(device, torch, dist)
    dist.destroy_process_group()


def _look(device: str, torch: Any, dist: Any) -> None:
    """All nodes, as rank 0 writes them down."""
    env, rank = os.environ, dist.get_rank()
    node = env.get("SLURMD_NODENAME") or socket.gethostname()
    place, nodes = int(env["GROUP_RANK"]), int(env["GROUP_WORLD_SIZE"])
    topology = Topology(
        rank=rank, size=dist.get_world_size(), local_rank=int(env["LOCAL_RANK"]), node=node,
        node_index=place, nodes=nodes, job_id="",
        address=own_address(env, node=node, node_index=place, nodes=nodes),
    )  # fmt: skip

    def gather(numbers: Sequence[float]) -> list[list[float]]:
        own = torch.tensor(numbers, dtype=torch.float64, device=device)
        rows = [torch.empty_like(own) for _ in range(topology.size)]
        dist.all_gather(rows, own)
        return [row.tolist() for row in rows]

    seen, damaged = look(gather, topology)
    if rank == 0:
        path = RunDir(Path(env[RUN])).preflight(int(env[ATTEMPT]))
        write_json(path, as_json(seen, judged(seen, damaged)))


def _seconds(tensor: Any, torch: Any, dist: Any) -> float:
    tensor.fill_(1.0)
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
