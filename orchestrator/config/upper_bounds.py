"""Bounds of what people may ask for: beyond them nothing that exists could run it.

They stand before anything is computed from a number, so that a slip of a few zeros is a sentence
and not a machine that computes for an hour or runs out of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.errors import ConfigError, shortened

LARGEST_INT = 2**63 - 1  # what the files, the random numbers' seeds and the frameworks can hold
MOST_RANKS = 2**20
LONGEST_S = 10 * 365 * 24 * 3600.0
LONGEST_NAME = 4096
AT_MOST: dict[str, float] = {
    "cluster.ranks_per_node": 4096,
    "cluster.cpus_per_rank": 65_536,
    "cluster.gpus_per_node": 4096,
    "cluster.rendezvous_timeout_s": LONGEST_S,
    "cluster.collective_timeout_s": LONGEST_S,
    "cluster.heartbeat_timeout_s": LONGEST_S,
    "cluster.memory_gib": 2**30,
    "cluster.time_min": 2**31 - 2,
    "cluster.signal_ahead_s": 65_535,  # sbatch's own limit
    "engine.bucket_mib": 2**20,
    "train.loader_workers": 4096,
    "train.keep_checkpoints": 10**6,
    "train.epochs": 1e12,
    "run.max_restarts": 10**6,
}


def refuse_beyond(values: Mapping[str, Any]) -> None:
    """Raises one `ConfigError` for all values of a configuration that are beyond bounds."""
    if wrong := beyond(values):
        raise ConfigError("\n".join(wrong))


def beyond(values: Mapping[str, Any]) -> list[str]:
    """A sentence for every value of a configuration that is beyond what can be meant.

    >>> beyond({"train": {"seed": 2**64}})
    ['train.seed must lie between -(2**63 - 1) and 2**63 - 1, but is 18446744073709551616']
    """
    wrong: list[str] = []
    for dotted, value in leaves(values):
        if isinstance(value, int) and abs(value) > LARGEST_INT:
            wrong.append(
                f"{dotted} must lie between -(2**63 - 1) and 2**63 - 1, but is {shortened(value)}"
            )
        elif isinstance(value, str) and len(value) > LONGEST_NAME:
            wrong.append(
                f"{dotted} must have at most {LONGEST_NAME} characters, but has {len(value)}"
            )
        elif isinstance(value, str) and not value.isprintable() and (odd := _unprintable(value)):
            wrong.append(f"{dotted} must not contain {odd}, but is {shortened(repr(value))}")
        elif dotted in AT_MOST and isinstance(value, (int, float)) and value > AT_MOST[dotted]:
            most = AT_MOST[dotted]
            wrong.append(
                f"{dotted} must be at most {most:g}, but is {value}; try {dotted}={most:g}"
            )
    return wrong


def too_many_ranks(nodes: int, ranks_per_node: int) -> list[str]:
    """A sentence when there would be more ranks than a plan can list."""
    ranks = nodes * ranks_per_node
    sentence = f"cluster.nodes x cluster.ranks_per_node is {ranks} ranks; at most {MOST_RANKS} are"
    return [f"{sentence} possible"] if ranks > MOST_RANKS else []


def leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every plain value in nested dicts and lists, with its dotted name."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(values, (list, tuple)):
        for place, value in enumerate(values):
            yield from leaves(value, f"{prefix}[{place}]")
    else:
        yield prefix, values


def _unprintable(value: str) -> str | None:
    """What of a value no file name, shell or terminal can take; None for odd but harmless signs."""
    for sign in value:
        if sign == "\0" or (ord(sign) < 32 and sign not in "\t\n") or ord(sign) == 127:
            return f"the control character {ord(sign):#04x}"
        if 0xD800 <= ord(sign) < 0xE000:
            return "bytes that are not UTF-8"
    return None
