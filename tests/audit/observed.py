"""One rank of observed loops, which leaves a folder of traces for each in the current folder."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from orchestrator.audit import observe
from tests.audit import loop

NAMES = (*loop.FAULTS, *loop.RIGHT, *loop.NOT_WRONG)


def main(folder):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    observer = observe.Observer(folder, None, rank)
    observer.ends_process = False
    observe.install(observer)
    if size > 1:
        dist.init_process_group("gloo")
    for name in NAMES:
        part = folder / name
        part.mkdir(exist_ok=True)
        observer.begin(part, None)
        loop.train(name, 2, rank, size)
        observer.finish("the loop ended")
    if size > 1:
        dist.barrier()


if __name__ == "__main__":
    main(Path.cwd())
