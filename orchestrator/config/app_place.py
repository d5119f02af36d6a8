"""Where points of other Hydra applications run: `hydra.launcher.cluster` with our launcher."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class AppPlace:
    """Keys of our section `cluster` that one process a point can make use of.

    kind: `local` (here, in turn), or `slurm` (one array, of which `parallel` run at once).
    """

    kind: str = "local"
    parallel: int | None = None
    slurm_conf: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    reservation: str | None = None
    comment: str | None = None
    cpus_per_rank: int = 1
    gpus_per_node: int | None = None
    memory_gib: float | None = None
    time_min: int | None = None
