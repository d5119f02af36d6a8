"""All that lies on disk before the first daemon starts: record, configuration, key, devices."""

import contextlib
import dataclasses
import fcntl
import json
import os
import pwd
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurm import config_files, ports
from slurm.config_files import ClusterSpec
from slurm.errors import DevClusterError
from slurm.layout import Layout

_KEY_BYTES = 1024
_CGROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """One process at a time; the kernel lets go of the lock when we die, however we die."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def load(at: Layout) -> ClusterSpec | None:
    """What the cluster was last started with, or None where there is no cluster."""
    try:
        content: dict[str, Any] = json.loads(at.record.read_text())
    except FileNotFoundError:
        return None
    try:
        return ClusterSpec(**content | {"ports": tuple(content["ports"])})
    except (KeyError, TypeError) as error:
        raise DevClusterError(
            f"{at.record} was written by another version ({error}); end that cluster's processes "
            f"with the version that started them, then delete {at.root}"
        ) from error


def decide(name: str, at: Layout, *, nodes: int, gpus: int, accounting: bool) -> ClusterSpec:
    """Choose ports that no other cluster has, and record them before anybody else chooses.

    The ports of the last time are taken again if they are free.
    """
    before = load(at)
    others = (at.root.parent).glob("*/cluster.json")
    with locked(at.root.parent / ".ports.lock"):
        spec = ClusterSpec(
            name=name,
            user=pwd.getpwuid(os.geteuid()).pw_name,
            host=socket.gethostname().partition(".")[0],
            ports=ports.choose(
                config_files.ports_needed(nodes),
                preferred=before.ports if before else (),
                taken=ports.recorded(other for other in others if other != at.record),
            ),
            nodes=nodes,
            gpus=gpus,
            accounting=accounting,
        )
        at.create(spec.node_names)
        _write(at.record, json.dumps(dataclasses.asdict(spec), indent=2) + "\n")
    return spec


def write_files(spec: ClusterSpec, at: Layout) -> None:
    """Write the configuration anew, the munge key once, and the pretended devices."""
    _write(at.slurm_conf, config_files.slurm_conf(spec, at))
    _write(at.etc / "gres.conf", config_files.gres_conf(spec, at))
    _write(at.etc / "cgroup.conf", config_files.cgroup_conf())
    if spec.accounting:
        _write(at.etc / "slurmdbd.conf", config_files.slurmdbd_conf(spec, at))
        _write(at.my_cnf, config_files.my_cnf(spec, at))
    if not at.munge_key.exists():
        at.munge_key.touch(mode=0o600)
        at.munge_key.write_bytes(secrets.token_bytes(_KEY_BYTES))
    for i in range(spec.gpus):
        # SLURM wants character devices; a link to one is enough, and needs no root.
        device = at.devices / f"nvidia{i}"
        if not device.is_symlink():
            device.symlink_to("/dev/null")


def _write(file: Path, text: str) -> None:
    """Whole or not at all, readable by the owner only (slurmdbd.conf must be)."""
    aside = file.with_name(f"{file.name}.new")
    aside.write_text(text)
    aside.chmod(0o600)
    aside.replace(file)
