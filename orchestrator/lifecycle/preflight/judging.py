"""Which node is bad, of what was seen of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from orchestrator.report.units import format_bytes

LITTLE_MEMORY = 256 << 20
LITTLE_SCRATCH = 16 << 20
TAKEN = 0.25
"""Of a device's memory, by others than our rank."""
CLOCK_S = 5.0
SLOWER = 4.0
"""A node is slow whose every link has less than the median's bandwidth divided by this."""
FEWEST = 3
"""Of so many nodes a median says something."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One node.

    Attributes:
        interface, address: on which its ranks meet the others'; "" where the address is no card's.
        memory, scratch: free bytes, of the machine and of its folder for temporary files; -1 where
            nothing can be written there.
        device_taken: the share of a device's memory that others hold; the largest of its ranks'.
        clock_s: how far its clock is from the median of all.
        bytes_per_s: of its best link; None where none was measured.
    """

    node: str
    interface: str
    address: str
    memory: float
    scratch: float
    device_taken: float = 0.0
    clock_s: float = 0.0
    bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Bad:
    """What is wrong with a node. `unfit`: nothing is to be computed there; otherwise the run goes
    on, and the next one is better off without that node.
    """

    node: str
    why: str
    unfit: bool


def judged(seen: Sequence[Seen], damaged: Sequence[tuple[str, str]] = ()) -> list[Bad]:
    """The nodes that are bad.

    Args:
        damaged: (from which node, on which node) what was gathered came damaged.
    """
    return [*_corrupting(damaged), *(bad for one in seen for bad in _alone(one)), *_slow(seen)]


def as_json(seen: Sequence[Seen], bad: Sequence[Bad]) -> dict[str, Any]:
    """For preflight.json."""
    return {"nodes": [asdict(one) for one in seen], "bad": [asdict(one) for one in bad]}


def to_be_recorded(bad: Sequence[Bad], nodes: int) -> list[Bad]:
    """One word for each node; none where half of the nodes are bad: then it is not the nodes."""
    named = {one.node: one for one in bad}
    return list(named.values()) if 2 * len(named) < nodes else []


def _alone(one: Seen) -> Iterator[Bad]:
    if one.memory < LITTLE_MEMORY:
        why = f"{format_bytes(one.memory)} of memory are free"
        yield Bad(node=one.node, why=why, unfit=True)
    if one.scratch < LITTLE_SCRATCH:
        there = "cannot be written" if one.scratch < 0 else f"has {format_bytes(one.scratch)} free"
        why = f"its folder for temporary files (TMPDIR) {there}"
        yield Bad(node=one.node, why=why, unfit=True)
    if one.device_taken > TAKEN:
        why = f"{one.device_taken:.0%} of a device's memory are taken by others"
        yield Bad(node=one.node, why=why, unfit=False)
    if abs(one.clock_s) > CLOCK_S:
        why = f"its clock is {one.clock_s:+.1f} s off the others'"
        yield Bad(node=one.node, why=why, unfit=False)


def _slow(seen: Sequence[Seen]) -> Iterator[Bad]:
    rates = [one.bytes_per_s for one in seen if one.bytes_per_s is not None]
    if len(rates) < FEWEST:
        return
    usual = median(rates)
    for one in seen:
        if one.bytes_per_s is not None and one.bytes_per_s * SLOWER < usual:
            where = f"{one.interface} ({one.address})" if one.interface else one.address
            yield Bad(
                node=one.node, unfit=False,
                why=f"its network is slow: {format_bytes(one.bytes_per_s)}/s over {where}, where "
                f"the median is {format_bytes(usual)}/s",
            )  # fmt: skip


def _corrupting(damaged: Sequence[tuple[str, str]]) -> Iterator[Bad]:
    """The node that has part in most of the damage."""
    parts = Counter(node for pair in damaged for node in set(pair))
    if parts:
        (node, count), *_ = sorted(parts.items(), key=lambda item: (-item[1], item[0]))
        why = f"what a collective carried came damaged in {count} of {len(damaged)} cases with it"
        yield Bad(node=node, why=why, unfit=True)


def best_links(rates: Sequence[Mapping[int, float]]) -> list[float | None]:
    """For each node the bandwidth of its best link, in either direction.

    Args:
        rates: of each node, how fast it sent to the one so many places after it. A link is as slow
            as the slower of its ends, so a node is as fast as its best link.
    """
    best: list[float | None] = [None] * len(rates)
    for source, sent in enumerate(rates):
        for distance, rate in sent.items():
            for end in (source, (source + distance) % len(rates)):
                best[end] = max(best[end] or 0.0, rate)
    return best
