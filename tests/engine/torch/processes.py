"""Ranks as real processes over gloo, for tests: start fast, fail loudly, leave nothing behind."""

import multiprocessing
import os
import queue
import traceback

import torch

from orchestrator.engine.api import GroupSpec
from orchestrator.engine.torch.rendezvous.forming import form_group

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "tests.engine.torch.processes"])


def spec(rank, size, folder, **more):
    """A rank of a pretended node of its own."""
    given = {"timeout_s": 60.0, "collective_timeout_s": 60.0, **more}
    return GroupSpec(
        rank=rank,
        size=size,
        local_rank=0,
        node=f"node{rank}",
        address=f"127.0.1.{rank + 1}",
        folder=folder,
        transport="gloo",
        **given,
    )


def _be(rank, size, folder, function, arguments, results, more):
    torch.set_num_threads(1)
    try:
        group = form_group(spec(rank, size, folder, **more))
        results.put((rank, function(group, *arguments), None))
    except BaseException as error:  # noqa: BLE001  # reported to the test
        results.put((rank, f"{type(error).__name__}: {error}", traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)


def start_ranks(size, folder, function, *arguments, ranks=None, **more):
    """Start `function(group, *arguments)` on `ranks` (all of them by default)."""
    results = _context.Queue()
    processes = {
        rank: _context.Process(
            target=_be, args=(rank, size, folder, function, arguments, results, more), daemon=True
        )
        for rank in (range(size) if ranks is None else ranks)
    }
    for process in processes.values():
        process.start()
    return processes, results


def collect(processes, results, expected=None, timeout_s=120):
    """{rank: (result, traceback or None)} of `expected` ranks (all that were started)."""
    found = {}
    wanted = set(processes if expected is None else expected)
    try:
        while set(found) != wanted:
            rank, result, trace = results.get(timeout=timeout_s)
            found[rank] = (result, trace)
    except queue.Empty:
        raise AssertionError(f"ranks {sorted(wanted - set(found))} gave no result") from None
    finally:
        for process in processes.values():
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
    return found


def run_ranks(size, folder, function, *arguments, **more):
    """Results of `function(group, *arguments)` on every rank, in rank order."""
    found = collect(*start_ranks(size, folder, function, *arguments, **more))
    for rank, (_, trace) in sorted(found.items()):
        assert trace is None, f"rank {rank}:\n{trace}"
    return [found[rank][0] for rank in range(size)]
