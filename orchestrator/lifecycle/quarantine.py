"""Nodes that were found bad, and are not asked for again for a while.

A file a node, in a folder of the account's own: `~/.orchestrator/quarantine/<cluster>/<node>.json`,
mode 0700. Preflights write there (`lifecycle/preflight/`), and people (`orchestrator quarantine`);
submissions to that cluster leave these nodes out.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import RunFolderError, UsageError
from orchestrator.run_folder.files import make_folder, names_in, remove
from orchestrator.run_folder.rundir import read_json, write_json

HOURS = 24.0
"""For how long, where nobody says otherwise."""
MOST_HOURS = 24.0 * 366
NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
MACHINES_OWN = "slurm"
_SUFFIX = ".json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One node. `since`, `until`: seconds since 1970. `cluster`: its slurm.conf; "" where it is the
    machine's own. `run`: whose preflight said so; "" where a person did.
    """

    node: str
    reason: str
    since: float
    until: float
    cluster: str = ""
    run: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _home() -> Path:
    return Path.home() / ".orchestrator" / "quarantine"


def _folder(slurm_conf: str | None) -> Path:
    """Of one cluster: nodes of another one may be called the same."""
    if slurm_conf is None:
        return _home() / MACHINES_OWN
    real = os.path.realpath(Path(slurm_conf).expanduser())
    return _home() / f"{MACHINES_OWN}-{hashlib.sha256(real.encode()).hexdigest()[:16]}"


def checked(node: str, hours: float) -> None:
    """Raises `UsageError` where that is no node's name, or no time."""
    if not NODE.fullmatch(node):
        raise UsageError(
            f"{node!r} is no node's name; each node is named by itself, as in n1 n2 (of letters, "
            "digits, -, _ and .)"
        )
    if not 0 < hours <= MOST_HOURS:
        raise UsageError(f"--hours must lie above 0, up to {MOST_HOURS:g}, but is {hours:g}")


def add(
    node: str, reason: str, *, slurm_conf: str | None, hours: float = HOURS, run: str = ""
) -> Entry:
    """Put a node in, or renew what is said of it.

    Args:
        slurm_conf: of its cluster; None for the machine's own.

    Raises:
        UsageError: see `checked`.
        OSError: it cannot be written down.
    """
    checked(node, hours)
    folder, now = _folder(slurm_conf), time.time()
    conf = "" if slurm_conf is None else os.path.realpath(Path(slurm_conf).expanduser())
    entry = Entry(
        node=node, reason=reason, since=now, until=now + 3600 * hours, cluster=conf, run=run
    )
    for place in (_home().parent, _home(), folder):
        if not place.is_dir():
            make_folder(place)
    write_json(folder / f"{node}{_SUFFIX}", entry.to_json())
    return entry


def clear(node: str, *, slurm_conf: str | None) -> None:
    """Take a node out that is in."""
    remove(_folder(slurm_conf) / f"{node}{_SUFFIX}")


def of_cluster(slurm_conf: str | None) -> list[Entry]:
    """The nodes of a cluster that are in, by name. Raises `RunFolderError` for a damaged file."""
    return list(_read(_folder(slurm_conf)))


def of_all() -> list[Entry]:
    """Those of all clusters that this account knows. Raises as `of_cluster` does."""
    return [entry for name in names_in(_home()) for entry in _read(_home() / name)]


def _read(folder: Path) -> Iterator[Entry]:
    for name in names_in(folder):
        if not name.endswith(_SUFFIX) or name.startswith("."):  # half written by who was killed
            continue
        entry = _entry(folder / name)
        if entry is not None and entry.until > time.time():
            yield entry


def _entry(path: Path) -> Entry | None:
    """What a file says; None where it was cleared meanwhile."""
    try:
        found = read_json(path, sealed=True)
        entry = None if found is None else Entry(**found)
    except (RunFolderError, TypeError) as error:
        raise _damaged(path) from error
    if entry is not None and not (entry.node == path.stem and NODE.fullmatch(entry.node)):
        raise _damaged(path)
    return entry


def _damaged(path: Path) -> RunFolderError:
    return RunFolderError(
        f"{path} is damaged, so nobody knows until when its node is not to be used; to forget it: "
        f"rm {path}"
    )
