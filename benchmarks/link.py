"""Networks of a known speed between ranks, without other traffic.

As root, ranks on the loopback get a network namespace to themselves, and ranks on a link one each,
joined by a bridge, with a token bucket in both directions where a rate is asked for. Otherwise
ranks share the machine's loopback, whose counters include other processes, so bytes are not
counted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

_INTERFACE = "orch0"
_BUCKET = ("burst", "256kb", "latency", "50ms")


@dataclass(frozen=True, kw_only=True)
class Link:
    """The start of a process for each rank, and the name of the ranks' network.

    Attributes:
        name: for tables.
        prefixes: words before each rank's command.
        address: of rank 0.
        interface: the ranks', called alike on all.
        senders: how many ranks' bytes the interface of rank 0 counts; None when others use it too.
    """

    name: str
    prefixes: tuple[tuple[str, ...], ...]
    address: str
    interface: str
    senders: int | None


def cannot_make_networks() -> str | None:
    """Return why namespaces and shaping are not available; None if they are."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"needs {' and '.join(absent)} (iproute2)" if absent else None


def _run(*words: str) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"'{' '.join(words)}' failed: {done.stderr.strip()}")


@contextmanager
def _namespace(name: str) -> Generator[tuple[str, ...]]:
    """Make a network namespace with its loopback up; return the command prefix that enters it."""
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "-n", name, "link", "set", "lo", "up")
        yield ("ip", "netns", "exec", name)
    finally:
        _run("ip", "netns", "del", name)


def alone() -> Link:
    """Return the link of a single rank."""
    return Link(name="none", prefixes=((),), address="127.0.0.1", interface="lo", senders=None)


@contextmanager
def loopback(ranks: int) -> Generator[Link]:
    """Return one loopback for all ranks: their own if possible, else the machine's."""
    if cannot_make_networks():
        yield Link(
            name="loopback",
            prefixes=((),) * ranks,
            address="127.0.0.1",
            interface="lo",
            senders=None,
        )
        return
    with _namespace(f"orch-bench-{os.getpid()}") as prefix:
        yield Link(
            name="loopback",
            prefixes=(prefix,) * ranks,
            address="127.0.0.1",
            interface="lo",
            senders=ranks,
        )


@contextmanager
def switched(ranks: int, rate: str | None, name: str) -> Generator[Link]:
    """Return a link with every rank on a node of its own, all on one switch.

    Args:
        ranks: 1 to 250.
        rate: of each node's link, both ways, as tc spells it ("1gbit"); None: unlimited.
        name: for tables.

    Raises:
        RuntimeError: `cannot_make_networks`, or a tool refuses.
    """
    if reason := cannot_make_networks():
        raise RuntimeError(f"a link {reason}")
    base = f"orch-bench-{os.getpid()}"
    with ExitStack() as made:
        made.enter_context(_namespace(f"{base}-switch"))
        _run("ip", "-n", f"{base}-switch", "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", f"{base}-switch", "link", "set", "bridge", "up")
        prefixes: list[tuple[str, ...]] = []
        for rank in range(ranks):
            node = f"{base}-{rank}"
            prefixes.append(made.enter_context(_namespace(node)))
            _plug_in(node, f"{base}-switch", f"port{rank}", f"10.231.7.{rank + 1}/24", rate)
        yield Link(
            name=name,
            prefixes=tuple(prefixes),
            address="10.231.7.1",
            interface=_INTERFACE,
            senders=1,
        )


def _plug_in(node: str, switch: str, port: str, address: str, rate: str | None) -> None:
    _run(
        "ip",
        "link",
        "add",
        _INTERFACE,
        "netns",
        node,
        "type",
        "veth",
        "peer",
        "name",
        port,
        "netns",
        switch,
    )
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _run("ip", "-n", node, "addr", "add", address, "dev", _INTERFACE)
    _run("ip", "-n", node, "link", "set", _INTERFACE, "up")
    if rate is not None:
        for where, interface in ((node, _INTERFACE), (switch, port)):
            _run(
                "tc",
                "-n",
                where,
                "qdisc",
                "add",
                "dev",
                interface,
                "root",
                "tbf",
                "rate",
                rate,
                *_BUCKET,
            )


def sent_bytes(interface: str) -> int:
    """Return the bytes sent on this process's `interface` so far, headers included."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])
    raise ValueError(f"there is no interface '{interface}'")
