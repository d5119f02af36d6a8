"""A rank's identity, from the environment in which it was started.

SLURM sets these variables; the local cluster sets the same ones for its simulated nodes, so all
code after this treats both alike.
"""

from __future__ import annotations

import fnmatch
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from orchestrator.errors import UsageError

BASE_ATTEMPT_VARIABLE = "ORCHESTRATOR_BASE_ATTEMPT"
BATCH_PID_VARIABLE = "ORCHESTRATOR_BATCH_PID"  # the process of the batch script
PATH_VARIABLE = "ORCHESTRATOR_PYTHONPATH"
"""Folders of the run's code, which come first in the search path of a job's processes."""
INCARNATION_VARIABLE = "ORCHESTRATOR_INCARNATION"
OUTER_PATH_VARIABLE = "ORCHESTRATOR_OUTER_PYTHONPATH"
"""PYTHONPATH as it was before these came first; for programs."""
OUTER_UMASK_VARIABLE = "ORCHESTRATOR_OUTER_UMASK"
"""The person's umask, in octal: what a program writes is as private as they have it."""


def own_job_id(env: Mapping[str, str]) -> str:
    """Return this job's id from SLURM's environment; "0" outside a job.

    An element of an array is named by its array: the number in SLURM_JOB_ID is its own in most
    elements, but in one of them that of the whole array, which would be requeued or ended with it.

    >>> own_job_id({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"})
    '7_3'
    """
    if "SLURM_ARRAY_JOB_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID", "0")


def attempt_of(env: Mapping[str, str]) -> int:
    """Return the number of this start among all of the run, where a scheduler starts it."""
    return int(env[BASE_ATTEMPT_VARIABLE]) + int(env.get("SLURM_RESTART_COUNT", "0"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """One rank's number, node and address among all ranks.

    Attributes:
        rank, size: this rank's number and how many there are.
        local_rank: its number on its node.
        node_index, nodes: its node's number and how many there are.
        node: the node's name.
        address: an IP address of the node that the other nodes reach.
        job_id: the scheduler's (or the local launcher's) id of the run.
        restarts: how often the scheduler restarted this job.
        incarnation: how many processes had this rank before in this attempt.
        scheduled: a scheduler placed this rank, and can restart the job by itself.
    """

    rank: int
    size: int
    local_rank: int
    node_index: int
    nodes: int
    node: str
    address: str
    job_id: str
    restarts: int = 0
    incarnation: int = 0
    scheduled: bool = False

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Topology:
        """Read SLURM's variables. Raises `UsageError` when one is missing or is no number."""

        def number(name: str, default: int | None = None) -> int:
            text = env.get(name)
            if text is None and default is not None:
                return default
            if text is None or not text.isdigit():
                raise UsageError(
                    f"{name} must be set to a number for a worker, but is {text!r}; workers are "
                    f"started by `python -m orchestrator.launch`"
                )
            return int(text)

        node = env.get("SLURMD_NODENAME") or socket.gethostname()
        node_index, nodes = number("SLURM_NODEID"), number("SLURM_JOB_NUM_NODES")
        return cls(
            rank=number("SLURM_PROCID"),
            size=number("SLURM_NTASKS"),
            local_rank=number("SLURM_LOCALID"),
            node_index=node_index,
            nodes=nodes,
            node=node,
            address=own_address(env, node=node, node_index=node_index, nodes=nodes),
            job_id=own_job_id(env),
            restarts=number("SLURM_RESTART_COUNT", 0),
            incarnation=number(INCARNATION_VARIABLE, 0),
            scheduled=BASE_ATTEMPT_VARIABLE in env,
        )


# ----------------------------------------------------------------------
# The address of a node that the other nodes can reach.
#
# A node's own name does not help: Debian and Ubuntu map it to 127.0.1.1 on each node. The names of
# *other* nodes resolve, and so does the address that the step was started from; the kernel knows
# from which local address a packet to them would leave. Nothing is sent.
#

ADDRESS_VARIABLE = "ORCHESTRATOR_NODE_ADDRESS"
NODE_VARIABLE = "ORCHESTRATOR_NODE_INDEX"
"""The node's number in the attempt, in the step of an agent that is started again."""
INTERFACE_VARIABLE = "ORCHESTRATOR_INTERFACE"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
FABRIC_VARIABLES = (GLOO_INTERFACE, "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
STEP_CAME_FROM = "SLURM_LAUNCH_NODE_IPADDR"
MOST_NAMES = 4  # other nodes whose names are resolved, at most


def own_address(env: Mapping[str, str], *, node: str, node_index: int, nodes: int) -> str:
    """Return an IP address of this node that the job's other nodes reach.

    `ORCHESTRATOR_NODE_ADDRESS` if a launcher sets it; that of `cluster.interface`, or of
    GLOO_SOCKET_IFNAME; that of the route to another node; or else what the node's name resolves
    to, which is right for nodes that are all this machine.

    Raises:
        UsageError: the interface does not exist, or no name resolves.
    """
    if env.get(ADDRESS_VARIABLE):
        return env[ADDRESS_VARIABLE]
    named = env.get(INTERFACE_VARIABLE) or env.get(GLOO_INTERFACE)
    if named:
        return address_of_interface(named, node)
    if nodes > 1:
        names = [name for name in node_names(env) if name != node]
        # All nodes meet on node 0, which looks for the route to its neighbour.
        named_nodes = names[:MOST_NAMES] if node_index else names[: MOST_NAMES + 1]
        targets = (address for name in named_nodes for address in _resolved(name))
        came_from = [env[STEP_CAME_FROM]] if env.get(STEP_CAME_FROM) else []
        for target in chain(targets, came_from):  # the likeliest first
            if (source := source_towards(target)) is not None:
                return source
    for name in (node, socket.gethostname()):
        if addresses := _resolved(name):
            return addresses[0]
    raise UsageError(
        f"no address of node {node} was found: neither its name nor the host's means one here, and "
        f"there is no route to the job's other nodes; name its network interface: "
        f"cluster.interface=eth0, say"
    )


def node_names(env: Mapping[str, str]) -> Sequence[str]:
    """Return the job's nodes in SLURM's order; () without a list."""
    listed = env.get("SLURM_JOB_NODELIST")
    if not listed:
        return ()
    from submitit.slurm.slurm import _parse_node_list  # pyright: ignore[reportPrivateUsage]

    return _parse_node_list(listed)


def _resolved(name: str) -> list[str]:
    """Return a name's addresses, IPv4 first; [] if it does not resolve."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return []
    return [str(entry[4][0]) for entry in sorted(entries, key=lambda e: e[0] != socket.AF_INET)]


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def source_towards(target: str) -> str | None:
    """Return our address on the route to `target`; None if that is this machine's loopback."""
    try:
        family = socket.AF_INET6 if ":" in target else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # of a datagram socket: only the route is resolved
            own = str(probe.getsockname()[0])
    except OSError:
        return None  # no route
    return None if is_loopback(own) else own


def address_of_interface(names: str, node: str) -> str:
    """Return the address of the first interface that matches `names` (patterns with commas).

    Raises:
        UsageError: no interface matches, or it has no address.
    """
    import psutil

    interfaces = {
        interface: [
            entry.address
            for family in (socket.AF_INET, socket.AF_INET6)
            for entry in entries
            if entry.family == family and not entry.address.startswith("fe80")
        ]
        for interface, entries in psutil.net_if_addrs().items()
    }
    for pattern in names.split(","):
        for interface, addresses in sorted(interfaces.items()):
            if addresses and fnmatch.fnmatchcase(interface, pattern.strip().lstrip("=")):
                return addresses[0]
    known = ", ".join(
        f"{name} ({addresses[0]})" for name, addresses in sorted(interfaces.items()) if addresses
    )
    raise UsageError(
        f"cluster.interface={names}: node {node} has no such network interface with an address; "
        f"it has {known}"
    )


def interface_variables(env: Mapping[str, str], address: str) -> dict[str, str]:
    """Return variables that point frameworks at the same network, unless the environment does.

    NCCL and HCCL find fabrics by themselves, so they get only what the user configured.
    """
    own = interface_of(address)
    variables = FABRIC_VARIABLES if env.get(INTERFACE_VARIABLE) else (GLOO_INTERFACE,)
    return {name: own for name in variables if own and not env.get(name)}


def interface_of(address: str) -> str | None:
    """Return the network interface that has this address; None if there is none."""
    import psutil

    plain_address = address.partition("%")[0]
    return next(
        (
            interface
            for interface, entries in psutil.net_if_addrs().items()
            if any(entry.address.partition("%")[0] == plain_address for entry in entries)
        ),
        None,
    )
