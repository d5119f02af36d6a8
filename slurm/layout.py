"""Paths of one cluster: the only module that spells folder and file names.

~/.orchestrator/slurm-dev/<name>/
    etc/    slurm.conf and the other configuration (written anew at each start)
    run/    pid files and sockets
    log/    one log for each daemon
    spool/  slurmd's folders, one for each node
    ctld/   slurmctld's saved state: the jobs survive `down` and `up`
    mysql/  MariaDB's tables: so does the accounting
    dev/    the pretended GPUs
    cluster.json   what the cluster was started with
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from slurm.errors import DevClusterError

BASE_VARIABLE = "ORCHESTRATOR_SLURM_DEV"
DEFAULT_NAME = "default"

_NAME = re.compile(r"[a-z][a-z0-9-]{0,23}")
# sun_path of a Unix socket is 108 bytes with its closing zero; the longest of ours is a step's,
# spool/<node>/<node>_<job>.<step>, for which 28 bytes beyond "spool/" are ample.
_LONGEST_ROOT = 107 - len("/spool/") - 28


@dataclass(frozen=True)
class Layout:
    """Paths of one cluster's files, below its folder `root`."""

    root: Path

    @property
    def etc(self) -> Path:
        return self.root / "etc"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def controller_state(self) -> Path:
        return self.root / "ctld"

    @property
    def database(self) -> Path:
        return self.root / "mysql"

    @property
    def devices(self) -> Path:
        return self.root / "dev"

    @property
    def slurm_conf(self) -> Path:
        return self.etc / "slurm.conf"

    @property
    def my_cnf(self) -> Path:
        return self.etc / "my.cnf"

    @property
    def munge_key(self) -> Path:
        return self.etc / "munge.key"

    @property
    def munge_socket(self) -> Path:
        return self.run / "munge.socket"

    @property
    def database_socket(self) -> Path:
        return self.run / "mysql.sock"

    @property
    def record(self) -> Path:
        return self.root / "cluster.json"

    @property
    def lock(self) -> Path:
        """Return the lock's path, outside the folder: held while the folder itself is removed."""
        return self.root.parent / f".{self.root.name}.lock"

    @property
    def spools(self) -> Path:
        return self.root / "spool"

    def spool(self, node: str) -> Path:
        return self.spools / node

    def pid_file(self, daemon: str) -> Path:
        return self.run / f"{daemon}.pid"

    def log_file(self, daemon: str) -> Path:
        return self.log / f"{daemon}.log"

    def output_file(self, daemon: str) -> Path:
        """Return the file of a daemon's early output, before its log was open."""
        return self.log / f"{daemon}.out"

    def create(self, nodes: tuple[str, ...]) -> None:
        """Make the folders; for the owner alone, since the munge key is as good as a password."""
        self.root.parent.mkdir(parents=True, exist_ok=True)
        for folder in (
            self.root,
            self.etc,
            self.run,
            self.log,
            self.controller_state,
            self.devices,
            self.spools,
            *map(self.spool, nodes),
        ):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def base_folder() -> Path:
    """Return all clusters' folder: $ORCHESTRATOR_SLURM_DEV, else ~/.orchestrator/slurm-dev."""
    given = os.environ.get(BASE_VARIABLE)
    if given:
        return Path(given).expanduser().absolute()
    return Path.home() / ".orchestrator" / "slurm-dev"


def layout(name: str = DEFAULT_NAME, base: Path | None = None) -> Layout:
    """Return the layout of the cluster `name`, whether it exists or not."""
    if not _NAME.fullmatch(name):
        raise DevClusterError(
            f"a cluster's name must be up to 24 small letters, digits and '-', beginning with a "
            f"letter, but is {name!r}"
        )
    root = (base or base_folder()) / name
    if len(os.fsencode(root)) > _LONGEST_ROOT:
        raise DevClusterError(
            f"the folder {root} is {len(os.fsencode(root))} bytes long, but the paths of Unix "
            f"sockets leave {_LONGEST_ROOT}; set {BASE_VARIABLE} to a shorter folder"
        )
    if any(c in str(root) for c in " \t\n#\"'\\,=%"):
        raise DevClusterError(
            f"the folder {root} has a character that slurm.conf cannot hold; set {BASE_VARIABLE} "
            f"to one of letters, digits, '-', '_', '.' and '/'"
        )
    return Layout(root)
