"""Program of `doctor --run`: time and check all-reduces, and measure each node and its links."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from orchestrator.agent.topology import interface_of, own_address
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.program_link import ATTEMPT, RUN

ALL_REDUCE_MIB = (1, 64)
REPEATS = 5
LINK_BYTES = 8 << 20
DISTANCES = (1, 2)
TRIES = 3
NODES_FILE = "nodes.json"


def main() -> None:
    """Sum tensors over all ranks, report bandwidths in GB/s, and write `NODES_FILE`."""
    import torch
    import torch.distributed as dist

    from orchestrator.client.run import Run

    gpus = torch.cuda.is_available()
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpus else "gloo")
    device = torch.device("cuda" if gpus else "cpu")
    ranks, run = dist.get_world_size(), Run(os.environ)
    print(f"rank {dist.get_rank()} on {socket.gethostname()}, {device}", flush=True)  # noqa: T201
    for place, size in enumerate(ALL_REDUCE_MIB):
        tensor = torch.ones(size << 18, device=device)
        took = min(_time_all_reduce(tensor) for _ in range(REPEATS))
        # The least that one rank has to send, as in `engine.api.Counters`.
        moved = 2 * (ranks - 1) / ranks * (size << 20)
        right = float(tensor[0]) == float(tensor[-1]) == ranks
        run.report(
            place,
            loss=0.0 if right else 1.0,
            mib=size,
            seconds=took,
            gigabytes_per_s=moved / took / 1e9,
            ranks=ranks,
        )
    measured = measure_nodes(os.environ, device)
    if dist.get_rank() == 0:
        attempt = RunDir(Path(os.environ[RUN])).attempt(int(os.environ[ATTEMPT]))
        write_json(attempt / NODES_FILE, measured)
    dist.destroy_process_group()


def _time_all_reduce(tensor: Any) -> float:
    import torch.distributed as dist

    tensor.fill_(1.0)
    dist.barrier()
    return _timed(lambda: dist.all_reduce(tensor), tensor)


def _timed(transfer: Callable[[], object], tensor: Any) -> float:
    import torch

    began = time.perf_counter()
    transfer()
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure_nodes(env: Mapping[str, str], device: Any) -> dict[str, Any]:
    """Measure every node. Collective; all ranks return the same value.

    Returns:
        "nodes": a mapping for each node; "damaged": pairs of nodes (sender, receiver) between which
        data came damaged.
    """
    import torch.distributed as dist

    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, _measure_here(env, device))
    offsets = _clock_offsets()
    leaders: dict[int, int] = {}  # each node's first rank
    for rank, row in enumerate(rows):
        leaders.setdefault(row["node_index"], rank)
    order = [leaders[index] for index in sorted(leaders)]
    names = [rows[rank]["node"] for rank in order]
    rates: list[dict[int, float]] = [{} for _ in order]
    damaged: set[tuple[str, str]] = set()
    # Simulated nodes share a machine: their links say nothing of a network.
    if len({rows[rank]["host"] for rank in order}) == len(order):
        rates, damaged = measure_links(order, names, device)
    best = best_links(rates)
    taken = [
        max(row["device_taken"] for row in rows if row["node_index"] == index)
        for index in sorted(leaders)
    ]
    nodes = [
        {**rows[rank], "device_taken": share, "clock_s": offsets[rank], "bytes_per_s": rate}
        for rank, share, rate in zip(order, taken, best, strict=True)
    ]
    return {"nodes": nodes, "damaged": sorted(damaged)}


def _measure_here(env: Mapping[str, str], device: Any) -> dict[str, Any]:
    import torch

    host = socket.gethostname()
    node, index = env.get("SLURMD_NODENAME") or host, int(env["GROUP_RANK"])
    address = own_address(env, node=node, node_index=index, nodes=int(env["GROUP_WORLD_SIZE"]))
    taken = 0.0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        taken = max(0, total - free - torch.cuda.memory_reserved(device)) / total
    return {
        "node": node,
        "node_index": index,
        "host": host,
        "address": address,
        "interface": interface_of(address) or "",
        "memory": psutil.virtual_memory().available,
        "scratch": _free_scratch(),
        "device_taken": taken,
    }


def _free_scratch() -> float:
    """Return the free bytes of the folder for temporary files; -1 if it cannot be written."""
    try:
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"x")
            file.flush()
            return float(psutil.disk_usage(file.name).free)
    except OSError:
        return -1.0


def _clock_offsets() -> list[float]:
    """Return each rank's offset from the median clock in seconds; the smallest of `TRIES`.

    A rank that was busy between the barrier and its clock looks late, so one reading is not enough.
    """
    import torch.distributed as dist

    times: list[Any] = [None] * dist.get_world_size()
    best: list[float] = []
    for _ in range(TRIES):
        dist.barrier()
        dist.all_gather_object(times, time.time())
        offsets = [round(one - median(times), 3) for one in times]
        best = [min(pair, key=abs) for pair in zip(best or offsets, offsets, strict=True)]
    return best


def measure_links(
    leaders: Sequence[int], names: Sequence[str], device: Any
) -> tuple[list[dict[int, float]], set[tuple[str, str]]]:
    """Send `LINK_BYTES` from each node to the nodes at `DISTANCES` after it. Collective.

    Args:
        leaders: the rank that sends for each node.
        names: the nodes' names.

    Returns:
        For each node {distance: bytes per second}, the best of `TRIES`, and the pairs of nodes
        between which data came damaged.
    """
    import torch
    import torch.distributed as dist

    count, rank = len(leaders), dist.get_rank()
    sent = torch.arange(LINK_BYTES, device=device).remainder_(251).to(torch.uint8)
    rates: list[dict[int, float]] = [{} for _ in leaders]
    damaged: set[tuple[str, str]] = set()
    for _ in range(TRIES):
        for distance in (d for d in DISTANCES if d < count):
            own: tuple[int, float, bool] | None = None
            dist.barrier()
            if rank in leaders:
                place = leaders.index(rank)
                source = (place - distance) % count
                received = torch.zeros_like(sent)
                transfers = [
                    dist.P2POp(dist.isend, sent, leaders[(place + distance) % count]),
                    dist.P2POp(dist.irecv, received, leaders[source]),
                ]

                def exchange(transfers: list[Any] = transfers) -> None:
                    for work in dist.batch_isend_irecv(transfers):
                        work.wait()

                own = source, LINK_BYTES / _timed(exchange, sent), torch.equal(sent, received)
            rows: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(rows, own)
            for place, leader in enumerate(leaders):
                source, rate, whole = int(rows[leader][0]), *rows[leader][1:]
                rates[source][distance] = max(rates[source].get(distance, 0.0), rate)
                if not whole:
                    damaged.add((names[source], names[place]))
    return rates, damaged


def best_links(rates: Sequence[Mapping[int, float]]) -> list[float | None]:
    """Return the bandwidth of each node's best link, in either direction.

    A link is as slow as the slower of its ends, so a node is as fast as its best link.

    Args:
        rates: for each node, how fast it sent to the node at each distance after it.
    """
    best: list[float | None] = [None] * len(rates)
    for source, sent in enumerate(rates):
        for distance, rate in sent.items():
            for end in (source, (source + distance) % len(rates)):
                best[end] = max(best[end] or 0.0, rate)
    return best


if __name__ == "__main__":
    main()
