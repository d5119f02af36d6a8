"""Which network interfaces gloo, NCCL and HCCL would take, and what decides that."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping

import psutil

from orchestrator.doctor.findings import BAD, NOTE, Finding
from orchestrator.errors import UsageError
from orchestrator.lifecycle.address import (
    FABRIC_VARIABLES,
    INTERFACE_VARIABLE,
    address_of_interface,
    interface_variables,
    is_loopback,
    own_address,
)

DECIDING = (
    *FABRIC_VARIABLES, INTERFACE_VARIABLE, "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET",
    "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_DEBUG", "HCCL_IF_IP", "TP_SOCKET_IFNAME",
)  # fmt: skip
NAME_IT = "cluster.interface=eth0, say: gloo, NCCL and HCCL are told of it, on every node"


def network() -> Iterator[Finding]:
    """Interfaces with an address, which would be taken, and variables that say otherwise."""
    there = interfaces()
    told = ", ".join(f"{name} {' '.join(found)}" for name, found in there.items())
    yield Finding(about="network", found=f"interfaces: {told}")
    yield from _variables(os.environ)
    node = socket.gethostname()
    try:
        address = own_address(os.environ, node=node, node_index=0, nodes=1)
    except UsageError as error:
        yield Finding(about="network", found=str(error), state=BAD, do=NAME_IT)
        return
    gloo = os.environ.get("GLOO_SOCKET_IFNAME") or interface_variables({}, address).get(
        "GLOO_SOCKET_IFNAME", "unknown"
    )
    yield Finding(about="network", found=f"gloo would take {gloo} ({address}) for one node")
    nccl = os.environ.get("NCCL_SOCKET_IFNAME") or nccl_choice(there)
    yield Finding(
        about="network", found=f"NCCL would take {nccl or 'none'} where it finds no fabric",
        **({} if nccl else {"state": NOTE, "do": NAME_IT}),
    )  # fmt: skip
    if is_loopback(address) and any(name != "lo" for name in there):
        yield Finding(
            about="network",
            found=f"the name {node} means {address} here, which no other node reaches", state=NOTE,
            do="nothing where SLURM starts ranks: the route to the other nodes decides there. By "
            f"hand: {NAME_IT}",
        )  # fmt: skip


def _variables(env: Mapping[str, str]) -> Iterator[Finding]:
    for name in DECIDING:
        if not (value := env.get(name)):
            continue
        wrong = ""
        if name.endswith("SOCKET_IFNAME") and not value.startswith("^"):
            try:
                address_of_interface(value, "this machine")
            except UsageError as error:
                wrong = str(error).partition(": ")[2]
        yield Finding(
            about="network", found=f"{name}={value} is set" + f", but {wrong}" * bool(wrong),
            state=BAD if wrong else NOTE,
            do=f"unset {name}, or correct it" if wrong else "ranks inherit it; unset it to let the "
            "framework choose",
        )  # fmt: skip


def interfaces() -> dict[str, list[str]]:
    """Interfaces that are up, with their addresses."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return {
        name: [e.address for e in entries if e.family == socket.AF_INET]
        or [e.address for e in entries if e.family == socket.AF_INET6]
        for name, entries in sorted(psutil.net_if_addrs().items())
        if name in up and any(e.family in (socket.AF_INET, socket.AF_INET6) for e in entries)
    }


def nccl_choice(there: Mapping[str, object]) -> str | None:
    """NCCL's own order (its documentation of NCCL_SOCKET_IFNAME): ib first, docker and lo last.

    >>> nccl_choice(["docker0", "lo", "eth1", "eth0"]), nccl_choice(["eth0", "ib0"])
    ('eth0', 'ib0')
    >>> nccl_choice(["lo"])
    'lo'
    """

    def order(name: str) -> tuple[int, str]:
        place = 0 if name.startswith("ib") else 2 if name.startswith("docker") else 1
        return (3 if name == "lo" else place), name

    return min(there, key=order, default=None)
