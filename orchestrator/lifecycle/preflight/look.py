"""What all ranks together find out of their nodes. Collective, in some milliseconds and the time
that `links.BYTES` take between two nodes, twice.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from orchestrator.lifecycle.address import interface_of, is_loopback, node_names
from orchestrator.lifecycle.preflight.judging import CLOCK_S, SLOWER, Seen, best_links
from orchestrator.lifecycle.preflight.links import Sink, rate
from orchestrator.lifecycle.survival.links import Peer
from orchestrator.lifecycle.topology import Topology

Gather = Callable[[Sequence[float]], list[list[float]]]
"""Every rank's numbers, a row for each rank, as float64; collective."""
TRIES = 3
DISTANCES = (1, 2)
_BITS = 6  # bytes of text in a number that a float64 holds exactly


def look(
    gather: Gather, topology: Topology, device_taken: float = 0.0
) -> tuple[list[Seen], list[tuple[str, str]]]:
    """All nodes in their order, and whose words came damaged to whom (see `judged`). Collective.

    Args:
        device_taken: the share of this rank's device that others hold.
    """
    sink = None
    if topology.local_rank == 0 and topology.nodes > 1:
        sink = Sink(topology.address, topology.node_index)
    own = {
        **_here(topology), "port": sink.port if sink else 0, "device_taken": device_taken,
        "secret": secrets.token_hex(16),
    }  # fmt: skip
    try:
        said, damaged = _values_of_all(gather, own)
        rows = gather([float(damaged), float(topology.node_index)])
        places = [int(row[1]) for row in rows]
        names = _names(places, said)
        pairs = [(names[int(row[0])], names[r]) for r, row in enumerate(rows) if row[0] >= 0]
        clocks = _clocks(gather)
        leaders = sorted((places.index(node) for node in set(places)), key=places.__getitem__)
        rates = [] if pairs else _rates(gather, topology, sink, [said[r] for r in leaders])
    finally:
        if sink:
            sink.close()
    best = best_links(rates) if rates else [None] * len(leaders)
    taken = [
        max(one["device_taken"] for n, one in zip(places, said, strict=True) if n == places[r])
        for r in leaders
    ]
    return [
        Seen(
            node=names[r], interface=said[r]["interface"], address=said[r]["address"],
            memory=said[r]["memory"], scratch=said[r]["scratch"], device_taken=taken[place],
            clock_s=round(clocks[r], 3), bytes_per_s=best[place],
        )
        for place, r in enumerate(leaders)
    ], pairs  # fmt: skip


def _names(nodes: Sequence[int], said: Sequence[dict[str, Any]]) -> list[str]:
    """Each rank's node: by the scheduler's list, as what it said itself may have come damaged."""
    listed = node_names(os.environ)
    whole = len(listed) > max(nodes)
    return [listed[n] if whole else one["node"] for n, one in zip(nodes, said, strict=True)]


def _here(topology: Topology) -> dict[str, Any]:
    """This node by itself."""
    import psutil

    return {
        "node": topology.node,
        "address": topology.address,
        "interface": interface_of(topology.address) or "",
        "memory": psutil.virtual_memory().available,
        "scratch": _scratch(),
    }


def _clocks(gather: Gather) -> list[float]:
    """How far each rank's clock is from the median. They have met a moment before; where one seems
    to be off, it may only have been busy since, so all look again. Collective.
    """
    best: list[float] = []
    for _ in range(TRIES):
        times = [row[0] for row in gather([time.time()])]
        offs = [one - median(times) for one in times]
        best = [min(pair, key=abs) for pair in zip(best or offs, offs, strict=True)]
        if max(map(abs, best)) <= CLOCK_S:
            break
    return best


def _scratch() -> float:
    """Free bytes where temporary files go; -1 where none can be written."""
    import psutil

    try:
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"x")
            file.flush()
            return float(psutil.disk_usage(file.name).free)
    except OSError:  # full, read-only, or there is no such folder: that is what is told
        return -1.0


def _values_of_all(gather: Gather, value: Any) -> tuple[list[dict[str, Any]], int]:
    """Every rank's value, and a rank whose words came damaged; -1 where none did. Collective."""
    text = json.dumps(value).encode()
    heads = gather([float(len(text)), float(zlib.crc32(text))])
    longest = int(max(row[0] for row in heads))
    padded = text.ljust(-(-longest // _BITS) * _BITS)
    parts = range(0, len(padded), _BITS)
    rows = gather([float(int.from_bytes(padded[i : i + _BITS])) for i in parts])
    found: list[dict[str, Any]] = []
    wrong = -1
    for rank, (row, (length, digest)) in enumerate(zip(rows, heads, strict=True)):
        came = b"".join(int(number).to_bytes(_BITS) for number in row)[: int(length)]
        if zlib.crc32(came) != int(digest):
            wrong, came = rank, json.dumps({**value, "node": f"of rank {rank}"}).encode()
        found.append(json.loads(came))
    return found, wrong


def _rates(
    gather: Gather, topology: Topology, sink: Sink | None, leaders: Sequence[dict[str, Any]]
) -> list[dict[int, float]]:
    """How fast each node sends to those after it; [] where all are one machine. Collective.

    Where one seems slow, all try again, and the best counts: a busy moment is not a bad card.
    """
    addresses = [one["address"] for one in leaders]
    if len(set(addresses)) < len(addresses) or any(map(is_loopback, addresses)):
        return []
    secret, count = leaders[0]["secret"], len(leaders)
    if sink:
        sink.open(secret)
    rates: list[dict[int, float]] = [{} for _ in leaders]
    for _ in range(TRIES):
        for distance in [d for d in DISTANCES if d < count]:
            own = 0.0
            if sink:
                place = (topology.node_index + distance) % count
                peer = Peer(addresses[place], leaders[place]["port"], place)
                own = rate(peer, secret=secret, me=topology.node_index)
            rows = gather([float(topology.node_index), own])
            for node, found in rows:  # of a node all but one have 0
                before = rates[int(node)].get(distance, 0.0)
                rates[int(node)][distance] = max(before, found)
        best = [found or 0.0 for found in best_links(rates)]
        if min(best) * SLOWER >= median(best):
            break
    return rates
