"""Checks of the cluster to which a run folder may send our commands.

A slurm.conf is not only data: with PluginDir it names code that squeue and the like load. So the
one that handle.json names is used only if the user at this shell has approved it: it is their
SLURM_CONF, or they submitted with it before (`remember`). A run folder from elsewhere cannot bring
its own.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from orchestrator.clusters.slurm.scheduler import CONF, SlurmClient
from orchestrator.errors import ClusterError, RunFolderError, expand_user
from orchestrator.rundir.files import PRIVATE, read_text, write_atomically
from orchestrator.rundir.folder import RunDir


def client_of(run: RunDir, slurm_conf: str | None) -> SlurmClient:
    """Return the client for the cluster that a run's handle names.

    Raises:
        ClusterError: it names a slurm.conf that this user has not approved.
    """
    if slurm_conf is not None and not is_trusted(expand_user(slurm_conf)):
        raise ClusterError(
            f"{run.path} names the cluster of {slurm_conf}, which was never used from this "
            f"account. A slurm.conf can make SLURM's commands run code: if you know it, "
            f"export {CONF}={slurm_conf}"
        )
    return SlurmClient(slurm_conf)


def is_trusted(conf: Path) -> bool:
    """Return whether the user has approved a slurm.conf, by anything but a run folder."""
    real = os.path.realpath(conf)
    configured = os.environ.get(CONF)
    if configured is not None and os.path.realpath(configured) == real:
        return True
    if real not in _remembered():
        return False
    try:
        facts = os.lstat(real)
    except OSError:
        return False
    writable_by_others = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return facts.st_uid in {0, os.geteuid()} and not writable_by_others


def remember(conf: str) -> None:
    """Record that this account has submitted with its own slurm.conf.

    Raises:
        ClusterError: that cannot be recorded, and nothing else approves it.
    """
    real = Path(os.path.realpath(expand_user(conf)))
    if is_trusted(real):
        return
    paths = sorted(path for path in {*_remembered(), str(real)} if Path(path).is_file())
    try:
        _memory().parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        write_atomically(_memory(), "".join(f"{path}\n" for path in paths))
    except OSError as error:
        raise ClusterError(
            f"cluster.slurm_conf={conf} cannot be noted in {_memory()} ({error.strerror}); "
            f"export {CONF}={real}"
        ) from error


def _memory() -> Path:
    return Path.home() / ".orchestrator" / "slurm_confs"


def _remembered() -> set[str]:
    try:
        return set(read_text(_memory()).splitlines())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return set()  # no approval is recorded here


def read_handle(run: RunDir) -> dict[str, Any]:
    """Return where a SLURM run was placed. Raises `RunFolderError` if the folder does not say."""
    handle = run.read_handle()
    if handle is None:
        raise RunFolderError(f"{run.path} was never submitted: it has no {run.handle.name}")
    return handle
