"""The program that `doctor --run` starts on the real nodes: all-reduces, timed and checked.

It knows nothing of us but `current_run`: what runs is what torchrun would start.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

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
    dist.destroy_process_group()


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
