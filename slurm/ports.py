"""Free ports, chosen by trying to bind them.

Below the range that the kernel hands to outgoing connections, so that a port found free now is
not taken by somebody's short connection before the daemon binds it.
"""

import json
import random
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from slurm.errors import DevClusterError

_LOWEST, _HIGHEST = 20000, 32000
_TRIES = 200


def is_free(port: int) -> bool:
    """Return whether a daemon could listen on this port now, on any of our addresses."""
    with socket.socket() as probe:
        # As the daemons do: a port whose last connections are still in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def choose(count: int, *, preferred: tuple[int, ...], taken: set[int]) -> tuple[int, ...]:
    """Return `count` free ports: the preferred ones if possible, else random neighbours.

    `taken` are ports that belong to other clusters, running or not.
    """
    if len(preferred) == count and not taken & {*preferred} and all(map(is_free, preferred)):
        return preferred
    for _ in range(_TRIES):
        first = random.randrange(_LOWEST, _HIGHEST - count)  # noqa: S311  no secret
        block = tuple(range(first, first + count))
        if not taken & {*block} and all(map(is_free, block)):
            return block
    raise DevClusterError(
        f"found no {count} free neighbouring ports between {_LOWEST} and {_HIGHEST}"
    )


def recorded(records: Iterable[Path]) -> set[int]:
    """Return the ports that the given clusters' `cluster.json` name."""
    found: set[int] = set()
    for record in records:
        content = cast("dict[str, Any]", json.loads(record.read_text()))
        found.update(cast("list[int]", content["ports"]))
    return found
