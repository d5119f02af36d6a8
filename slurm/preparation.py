"""Files on disk before the first daemon starts: record, configuration, key, devices."""

import contextlib
import dataclasses
import fcntl
import json
import os
import pwd
import random
import secrets
import socket
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, cast

from slurm import config_files
from slurm.config_files import ClusterSpec, Shape
from slurm.errors import DevClusterError
from slurm.layout import Layout

_KEY_BYTES = 1024
# Ports lie below the range that the kernel hands to outgoing connections, so that a port found free
# now is not taken by a short connection before the daemon binds it.
_LOWEST, _HIGHEST = 20000, 32000
_TRIES = 200


@contextlib.contextmanager
def locked(file: Path) -> Generator[None, None, None]:
    """Hold a lock for one process at a time; the kernel releases it when we die."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def load(at: Layout) -> ClusterSpec | None:
    """Return the spec of the last start, or None without a cluster."""
    try:
        content = cast("dict[str, Any]", json.loads(at.record.read_text()))
    except FileNotFoundError:
        return None
    try:
        content["ports"] = tuple(content["ports"])
        content["shape"] = Shape(**content["shape"])
        return ClusterSpec(**content)
    except (KeyError, TypeError) as error:
        raise DevClusterError(
            f"{at.record} was written by another version ({error}); end that cluster's processes "
            f"with the version that started them, then delete {at.root}"
        ) from error


def decide(name: str, at: Layout, shape: Shape) -> ClusterSpec:
    """Choose ports that no other cluster has, and record them atomically.

    The ports of the last time are taken again if they are free.
    """
    before = load(at)
    others = (at.root.parent).glob("*/cluster.json")
    with locked(at.root.parent / ".ports.lock"):
        spec = ClusterSpec(
            name=name,
            user=pwd.getpwuid(os.geteuid()).pw_name,
            host=socket.gethostname().partition(".")[0],
            address=host_address(),
            ports=_choose_ports(
                config_files.ports_needed(shape.nodes),
                preferred=before.ports if before else (),
                taken=_recorded_ports(other for other in others if other != at.record),
            ),
            shape=shape,
        )
        at.create(spec.node_names)
        _write(at.record, json.dumps(dataclasses.asdict(spec), indent=2) + "\n")
    return spec


def _is_free(port: int) -> bool:
    """Return whether a daemon could listen on this port now, on any of our addresses."""
    with socket.socket() as probe:
        # As the daemons do: a port whose last connections are still in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _choose_ports(count: int, *, preferred: tuple[int, ...], taken: set[int]) -> tuple[int, ...]:
    """Return `count` free ports: the preferred ones if possible, else random neighbours.

    `taken` are ports that belong to other clusters, running or not.
    """
    if len(preferred) == count and not taken & {*preferred} and all(map(_is_free, preferred)):
        return preferred
    for _ in range(_TRIES):
        first = random.randrange(_LOWEST, _HIGHEST - count)  # noqa: S311  no secret
        block = tuple(range(first, first + count))
        if not taken & {*block} and all(map(_is_free, block)):
            return block
    raise DevClusterError(
        f"found no {count} free neighbouring ports between {_LOWEST} and {_HIGHEST}"
    )


def _recorded_ports(records: Iterable[Path]) -> set[int]:
    """Return the ports that the given clusters' `cluster.json` name."""
    found: set[int] = set()
    for record in records:
        content = cast("dict[str, Any]", json.loads(record.read_text()))
        found.update(cast("list[int]", content["ports"]))
    return found


def host_address() -> str:
    """Return the address of this machine's name; slurmdbd and srun bind to nothing else."""
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise DevClusterError(
            f"this machine's name {name!r} must resolve to an address, but does not ({error}); add "
            f"the line `127.0.0.1 {name}` to /etc/hosts"
        ) from error


def beyond_loopback(spec: ClusterSpec) -> str | None:
    """Return a warning if SLURM cannot be kept on loopback; None if it can."""
    if spec.address == "127.0.0.1":
        return None
    where = f"SLURM listens at {spec.address}" if spec.confined else "slurmd listens everywhere"
    return (
        f"note: this machine's name {spec.host!r} means {spec.address} in /etc/hosts, and so "
        f"{where} (munge's key protects it); to keep all on loopback, let it mean 127.0.0.1"
    )


def write_files(spec: ClusterSpec, at: Layout) -> None:
    """Write the configuration anew, the munge key once, and the simulated devices."""
    _write(at.slurm_conf, config_files.slurm_conf(spec, at))
    _write(at.etc / "gres.conf", config_files.gres_conf(spec, at))
    _write(at.etc / "cgroup.conf", config_files.cgroup_conf(at))
    if spec.shape.accounting:
        _write(at.etc / "slurmdbd.conf", config_files.slurmdbd_conf(spec, at))
        _write(at.my_cnf, config_files.my_cnf(spec, at))
    if not at.munge_key.exists():
        at.munge_key.touch(mode=0o600)
        at.munge_key.write_bytes(secrets.token_bytes(_KEY_BYTES))
    for i in range(spec.shape.gpus):
        # SLURM wants character devices; a link to one is enough, and needs no root.
        device = at.devices / f"nvidia{i}"
        if not device.is_symlink():
            device.symlink_to("/dev/null")


def _write(file: Path, text: str) -> None:
    """Write a file atomically, readable by the owner only (slurmdbd.conf must be)."""
    aside = file.with_name(f"{file.name}.new")
    aside.write_text(text)
    aside.chmod(0o600)
    aside.replace(file)
