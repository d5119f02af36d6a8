"""Ranks as real processes, without a launcher: start fast, fail loudly, leave nothing behind.

Each is a fork of one process that has imported torch, and forms its group as a run's ranks do.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from orchestrator.engine.api import GroupSpec
from orchestrator.engine.torch.rendezvous import form_group
from orchestrator.machine import share_gpu_over_nccl

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "orchestrator.engine.torch.accumulator", __name__]
)


def spec(
    rank: int,
    size: int,
    folder: Path,
    *,
    transport: str = "gloo",
    one_node: bool = False,
    **more: Any,
) -> GroupSpec:
    """Return the spec of a rank of a simulated node of its own, or of one node for all."""
    settings: dict[str, Any] = {"timeout_s": 60.0, "collective_timeout_s": 60.0, **more}
    return GroupSpec(
        rank=rank,
        size=size,
        local_rank=rank if one_node else 0,
        node="node0" if one_node else f"node{rank}",
        address="127.0.1.1" if one_node else f"127.0.1.{rank + 1}",
        folder=folder,
        transport=transport,
        **settings,
    )


def _run_rank(
    rank: int,
    make_spec: Callable[[], GroupSpec],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    results: Any,
) -> None:
    torch.set_num_threads(1)
    try:
        group_spec = make_spec()
        if group_spec.transport == "nccl":
            os.environ |= share_gpu_over_nccl(group_spec.node)
        group = form_group(group_spec)
        results.put((rank, function(group, *arguments), None))
        group.close()
    except BaseException as error:  # noqa: BLE001  # reported to the test
        results.put((rank, f"{type(error).__name__}: {error}", traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)


def start_ranks(
    size: int,
    folder: Path,
    function: Callable[..., Any],
    *arguments: Any,
    ranks: Iterable[int] | None = None,
    **more: Any,
) -> tuple[dict[int, BaseProcess], Any]:
    """Start `function(group, *arguments)` on `ranks` (all of them by default)."""
    results = _context.Queue()
    processes: dict[int, BaseProcess] = {
        rank: _context.Process(
            target=_run_rank,
            args=(rank, partial(spec, rank, size, folder, **more), function, arguments, results),
            daemon=True,
        )
        for rank in (range(size) if ranks is None else ranks)
    }
    for process in processes.values():
        process.start()
    return processes, results


def collect(
    processes: Mapping[int, BaseProcess],
    results: Any,
    expected: Iterable[int] | None = None,
    timeout_s: float = 600,
) -> dict[int, tuple[Any, str | None]]:
    """Return {rank: (result, traceback or None)} of `expected` ranks (all that were started)."""
    received: dict[int, tuple[Any, str | None]] = {}
    wanted = set(processes if expected is None else expected)
    try:
        while set(received) != wanted:
            rank, result, trace = results.get(timeout=timeout_s)
            received[rank] = (result, trace)
    except queue.Empty:
        raise AssertionError(f"ranks {sorted(wanted - set(received))} gave no result") from None
    finally:
        for process in processes.values():
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
    return received


def run_ranks(
    size: int, folder: Path, function: Callable[..., Any], *arguments: Any, **more: Any
) -> list[Any]:
    """Return results of `function(group, *arguments)` on every rank, in rank order.

    Args:
        function: of a module, so that it can be sent to a process.
        more: of a `GroupSpec`: `transport`, time-outs.

    Raises:
        AssertionError: with its traceback, where a rank failed.
    """
    collected = collect(*start_ranks(size, folder, function, *arguments, **more))
    for rank, (_, trace) in sorted(collected.items()):
        if trace is not None:
            raise AssertionError(f"rank {rank}:\n{trace}")
    return [collected[rank][0] for rank in range(size)]
