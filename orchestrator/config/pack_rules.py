"""What `sweep.pack` asks for, and what it cannot be beside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchestrator.config.schema import Config, node_range
from orchestrator.errors import ConfigError

MOST = 4096


def packing(pack: Any) -> int | None:
    """How many points share an allocation: 0 for as many as its nodes have room for; None: each has
    one of its own. Raises `ConfigError`.
    """
    if isinstance(pack, bool):
        return 0 if pack else None
    if isinstance(pack, int) and 2 <= pack <= MOST:
        return pack
    raise ConfigError(
        f"sweep.pack must be true, false, or how many points share an allocation, from 2 to "
        f"{MOST}, but is {pack!r}"
    )


def anywhere(config: Config) -> Iterator[str]:
    """A sentence for each thing that is wrong."""
    if packing(config.sweep.pack) is None:
        return
    asked, cluster = f"sweep.pack={str(config.sweep.pack).lower()}", config.cluster
    if cluster.kind == "local":
        yield (
            f"{asked} means nothing on a local cluster, where as many points run at once as the "
            f"machine has room for; add +cluster=slurm, or leave it out"
        )
    elif cluster.kind != "slurm":
        yield f"{asked} means nothing on a {cluster.kind} cluster; leave it out"
    elif cluster.allocation == "current":
        yield (
            f"{asked} makes allocations that points share, and cluster.allocation=current has the "
            f"points run one after another in one that is there; leave one of them out"
        )
    least, most = node_range(cluster.nodes)
    if least != most:
        yield (
            f"{asked} needs to know how many nodes a point takes, but cluster.nodes="
            f"{cluster.nodes}; try cluster.nodes={most}"
        )
    if config.run.survive:
        yield (
            f"{asked} cannot be with run.survive=true: a node that is lost takes all points of its "
            f"allocation back to the queue; leave one of them out"
        )
    if config.sweep.search != "none":
        yield (
            f"{asked} cannot be with sweep.search={config.sweep.search}, whose trials begin one by "
            f"one, as others end; leave sweep.pack out"
        )
    if config.sweep.parallel != "auto":
        yield (
            f"{asked} cannot be with sweep.parallel={config.sweep.parallel}: all points of an "
            f"allocation run at once; leave one of them out"
        )


def refuse_without_sweep(config: Config) -> None:
    """Raise `ConfigError` where there is one run, which has nobody to share with."""
    if packing(config.sweep.pack) is not None:
        raise ConfigError(
            f"sweep.pack={str(config.sweep.pack).lower()} is for the points of a sweep, and this "
            f"is one run; add -m and values with commas, or leave it out"
        )
