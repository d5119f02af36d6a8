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
from orchestrator.units import named_ranks

ALL_REDUCE_MIB = (1, 64)
REPEATS = 5
LINK_BYTES = 8 << 20
TRIES = 3
NODES_FILE = "nodes.json"


def main() -> None:
    """Sum tensors over all ranks, report bandwidths in GB/s, and write `NODES_FILE`."""
    import torch
    import torch.distributed as dist

    from orchestrator.client.run import CurrentRun

    gpus = torch.cuda.is_available()
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo")
    without = [rank for rank, has in enumerate(_gathered(gpus)) if not has]
    if 0 < len(without) < dist.get_world_size():
        raise RuntimeError(f"{named_ranks(without)} cannot use a GPU, although others can")
    device = torch.device("cuda" if gpus else "cpu")
    ranks, run = dist.get_world_size(), CurrentRun(os.environ)
    print(f"rank {dist.get_rank()} on {socket.gethostname()}, {device}", flush=True)  # noqa: T201
    for index, mib in enumerate(ALL_REDUCE_MIB):
        seconds, is_right = measure_sum(mib << 18, device)
        # The least that one rank has to send, as in `engine.api.Counters`.
        moved = 2 * (ranks - 1) / ranks * (mib << 20)
        loss = 0.0 if is_right else 1.0
        rate = moved / seconds / 1e9
        run.report(index, loss=loss, mib=mib, seconds=seconds, gigabytes_per_s=rate, ranks=ranks)
    measured = measure_nodes(os.environ, device)
    if dist.get_rank() == 0:
        attempt = RunDir(Path(os.environ[RUN])).attempt(int(os.environ[ATTEMPT]))
        write_json(attempt / NODES_FILE, measured)
    dist.destroy_process_group()


def measure_sum(size: int, device: Any) -> tuple[float, bool]:
    """Sum a tensor of `size` elements over all ranks. Collective.

    Returns:
        The seconds of the fastest of `REPEATS`; and whether all ranks had every element right each
        time, the same on all ranks.
    """
    import torch
    import torch.distributed as dist

    tensor, seconds, is_right = torch.empty(size, device=device), float("inf"), True
    for _ in range(REPEATS):
        tensor.fill_(1.0)
        dist.barrier()
        seconds = min(seconds, _timed(lambda: dist.all_reduce(tensor), device))
        is_right = is_right and bool((tensor == dist.get_world_size()).all())
    return seconds, all(_gathered(is_right))


def _timed(transfer: Callable[[], object], device: Any) -> float:
    import torch

    began = time.perf_counter()
    transfer()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _gathered(value: Any) -> list[Any]:
    """Return the value of each rank. Collective."""
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def measure_nodes(env: Mapping[str, str], device: Any) -> dict[str, Any]:
    """Measure every node. Collective; all ranks return the same value.

    Returns:
        "nodes": a mapping for each node; "damaged": pairs of nodes (sender, receiver) between which
        data came damaged.
    """
    rows, offsets = _gathered(_measure_here(env, device)), _clock_offsets()
    first_ranks: dict[int, int] = {}  # of each node
    for rank, row in enumerate(rows):
        first_ranks.setdefault(row["node_index"], rank)
    order = [first_ranks[index] for index in sorted(first_ranks)]
    nodes: list[dict[str, Any]] = [
        {**rows[rank], "clock_s": offsets[rank], "bytes_per_s": None} for rank in order
    ]
    for node in nodes:
        taken = (row["device_taken"] for row in rows if row["node_index"] == node["node_index"])
        node["device_taken"] = max(taken)
    damaged: list[tuple[str, str]] = []
    # Simulated nodes share a machine: their links say nothing of a network.
    if len({node["host"] for node in nodes}) == len(nodes) > 1:
        rates, indices = measure_links(order, device)
        for node, rate in zip(nodes, best_rates(rates), strict=True):
            node["bytes_per_s"] = rate
        damaged = [(nodes[index - 1]["node"], nodes[index]["node"]) for index in indices]
    return {"nodes": nodes, "damaged": damaged}


def _measure_here(env: Mapping[str, str], device: Any) -> dict[str, Any]:
    import torch

    host = socket.gethostname()
    node, index = env.get("SLURMD_NODENAME") or host, int(env["GROUP_RANK"])
    address = own_address(env, node=node, node_index=index, nodes=int(env["GROUP_WORLD_SIZE"]))
    taken = 0.0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        taken = max(0, total - free - torch.cuda.memory_reserved(device)) / total
    try:
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"x")
            file.flush()
            scratch = float(psutil.disk_usage(file.name).free)
    except OSError:
        scratch = -1.0  # the folder for temporary files cannot be written
    return {
        "node": node,
        "node_index": index,
        "host": host,
        "address": address,
        "interface": interface_of(address) or "",
        "memory": psutil.virtual_memory().available,
        "scratch": scratch,
        "device_taken": taken,
    }


def _clock_offsets() -> list[float]:
    """Return each rank's offset from the median clock in seconds; the smallest of `TRIES`.

    A rank that was busy between the barrier and its clock looks late, so one reading is not enough.
    """
    import torch.distributed as dist

    best: list[float] = []
    for _ in range(TRIES):
        dist.barrier()
        times = _gathered(time.time())
        offsets = [round(reading - median(times), 3) for reading in times]
        best = [min(pair, key=abs) for pair in zip(best or offsets, offsets, strict=True)]
    return best


def measure_links(senders: Sequence[int], device: Any) -> tuple[list[float], list[int]]:
    """Send `LINK_BYTES` around the ring of nodes. Collective; all ranks return the same value.

    Args:
        senders: the rank that sends and receives for each node.

    Returns:
        For each node the bytes per second from the node before it, the best of `TRIES`; and the
        indices of nodes that received other data than was sent.
    """
    import torch
    import torch.distributed as dist

    count, rank = len(senders), dist.get_rank()
    sent = torch.arange(LINK_BYTES, device=device).remainder_(251).to(torch.uint8)
    rates, damaged = [0.0] * count, set[int]()
    for _ in range(TRIES):
        own: tuple[float, bool] | None = None
        dist.barrier()
        if rank in senders:
            index, received = senders.index(rank), torch.zeros_like(sent)
            transfers = [
                dist.P2POp(dist.isend, sent, senders[(index + 1) % count]),
                dist.P2POp(dist.irecv, received, senders[index - 1]),
            ]

            def exchange(transfers: list[Any] = transfers) -> None:
                for work in dist.batch_isend_irecv(transfers):
                    work.wait()

            own = LINK_BYTES / _timed(exchange, device), torch.equal(sent, received)
        results = _gathered(own)
        for index, (rate, whole) in enumerate(results[sender] for sender in senders):
            rates[index] = max(rates[index], rate)
            damaged |= set() if whole else {index}
    return rates, sorted(damaged)


def best_rates(received: Sequence[float]) -> list[float]:
    """Return the bandwidth of each node's better link in a ring.

    A link is as slow as the slower of its ends, so a node is as fast as its better link.

    >>> best_rates([9.0, 1.0, 1.0, 9.0])
    [9.0, 1.0, 9.0, 9.0]
    """
    return [max(rate, received[(n + 1) % len(received)]) for n, rate in enumerate(received)]


if __name__ == "__main__":
    main()
