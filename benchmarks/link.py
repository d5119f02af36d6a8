"""Ranks as processes on links of a known speed, so that bytes can be counted and time compared.

As root each rank gets a network namespace of its own, joined by a veth pair (two ranks only), with
a token bucket on both ends where a rate is asked for. Otherwise ranks share the loopback, whose
counters belong to everybody on the machine, so bytes are not counted.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
INTERFACE = "orch0"


@dataclass(frozen=True)
class Link:
    """How to start a process on each node, and what the nodes' network is called."""

    prefixes: tuple[tuple[str, ...], ...]
    address: str
    interface: str


def loopback(ranks: int) -> Link:
    """All ranks on this machine's own loopback."""
    return Link(((),) * ranks, "127.0.0.1", "lo")


def can_make_nodes() -> bool:
    """Whether namespaces and shaping are at hand."""
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc"))


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def two_nodes(rate: str | None) -> Generator[Link]:
    """Two namespaces on a veth pair of `rate`, as tc spells it ("1gbit"), or as fast as it is."""
    names = [f"orch-bench-{os.getpid()}-{number}" for number in (0, 1)]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", INTERFACE, "netns", names[0], "type", "veth",
            "peer", "name", INTERFACE, "netns", names[1])  # fmt: skip
        for number, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"10.231.7.{number + 1}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            if rate is not None:
                shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
                _ip("netns", "exec", name, "tc", "qdisc", "add", "dev", INTERFACE, "root", *shape)
        prefixes = tuple(("ip", "netns", "exec", name) for name in names)
        yield Link(prefixes, "10.231.7.1", INTERFACE)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def on_ranks(link: Link, arguments: Sequence[str], port: int = 29517) -> Any:
    """Run `python -m benchmarks.rank ARGUMENTS` on every node; what rank 0 wrote as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        processes = [
            subprocess.Popen(
                [*prefix, sys.executable, "-m", "benchmarks.rank", *arguments, "--out", str(out)],
                cwd=ROOT,
                env={
                    **os.environ, "RANK": str(rank), "WORLD_SIZE": str(len(link.prefixes)),
                    "MASTER_ADDR": link.address, "MASTER_PORT": str(port),
                    "GLOO_SOCKET_IFNAME": link.interface, "OMP_NUM_THREADS": "1",
                },
            )
            for rank, prefix in enumerate(link.prefixes)
        ]  # fmt: skip
        try:
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        return json.loads(out.read_text(encoding="utf-8"))


def sent_bytes(interface: str) -> int | None:
    """What left this node so far; None on the loopback, which others use too."""
    if interface == "lo":
        return None
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])
    return None
