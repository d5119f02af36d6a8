"""A job's own modules, told by their digests: a newcomer imports them later than the others did,
and what it computes has to be what they compute.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.snapshot import folder_of, is_installed

OURS = "orchestrator"


def modules_of(job: Any) -> dict[str, str]:
    """Digests of all modules that were imported from the folder of this job's class, by name."""
    folder = folder_of(type(job))
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or name.partition(".")[0] == OURS:
            continue
        path = Path(file).absolute()
        if path.is_relative_to(folder) and not is_installed(path) and path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def changed(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Modules that both have, but not alike.

    >>> changed({"job": "a", "net": "b"}, {"job": "c", "net": "b", "late": "d"})
    ['job']
    """
    return sorted(name for name in then.keys() & now.keys() if then[name] != now[name])
