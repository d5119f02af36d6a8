"""One rank of observed loops: `python -m tests.audit.observed FOLDER FAULT...`."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from orchestrator.audit import observe
from tests.audit import loop


def main(folder, names):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    observer = observe.Observer(folder, None, rank)
    observer.ends_process = False
    observe.install(observer)
    if size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
        )
    for name in names:
        place = folder / name
        place.mkdir(exist_ok=True)
        observer.begin(place, None)
        loop.train(name, 2, rank, size)
        observer.finish("the loop ended")
    if size > 1:
        dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
