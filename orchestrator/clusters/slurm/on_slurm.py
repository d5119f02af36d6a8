"""What every SLURM run is made of, queued or not: request, code, and what ends with a rank."""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Collection
from pathlib import Path

from orchestrator import snapshot
from orchestrator.clusters.api import Cluster, Request
from orchestrator.clusters.slurm.request.batch_script import Here, all_options
from orchestrator.clusters.slurm.request.safe_values import (
    check_clusters,
    check_defaults,
    check_preamble,
    check_values,
    quoted,
)
from orchestrator.clusters.slurm.request.sbatch_defaults import read_defaults
from orchestrator.clusters.slurm.trust import client_of, remember
from orchestrator.config.program import target_of
from orchestrator.config.schema import Config, node_range
from orchestrator.lifecycle.signs.last_word import SCRIPT, after_rank
from orchestrator.rundir.files import write_atomically
from orchestrator.rundir.folder import RunDir
from orchestrator.snapshot import shorten


def here(config: Config, copy: Path) -> Here:
    """The submitting side as it is now.

    Args:
        copy: where the copy of the code goes, if there is to be one.
    """
    target = target_of(config.job)
    roots = snapshot.source_roots(target)
    if config.run.snapshot:
        places = snapshot.copies(target, copy)
    else:
        places = {root: root for root in roots}
    package = snapshot.PACKAGE
    own = places.get(package.parent)
    path = [*places.values(), Path.cwd()]
    return Here(
        python=sys.executable,
        folder=Path.cwd(),
        package=own / package.name if own else package,
        path=tuple(dict.fromkeys(path)),
        unpacked=copy if config.run.snapshot else None,
        defaults=read_defaults(os.environ),
        copies=None if isinstance(target, str) else places if config.run.snapshot else {},
    )


class OnSlurm(Cluster):
    """The machine's SLURM, or the one of `cluster.slurm_conf`."""

    def trust(self, run: RunDir, typed: Collection[str] | None = None) -> None:
        conf = self.config.cluster.slurm_conf
        if conf is not None:
            if typed is None or "cluster.slurm_conf" in typed:
                remember(conf)
            client_of(run, conf)

    def request(self, run: Path, attempt: int, copy: Path | None = None) -> Request:
        """The submission as a value; `text` is the exact script.

        Args:
            copy: where the copy of the code is that it shares with others; None: in its own folder.
        """
        config, folder = self.decided, RunDir(run)
        check_values(config, run, Path.cwd())
        place = here(config, copy or folder.snapshot(attempt))
        check_clusters(os.environ)
        check_defaults(place.defaults)
        check_preamble(config.cluster.preamble)
        script = self.script(folder, attempt, place)
        options = {
            k: v if v is True else str(v) for k, v in all_options(config, folder, place).items()
        }
        return Request(
            run=run,
            attempt=attempt,
            nodes=node_range(config.cluster.nodes)[1],
            ranks_per_node=config.cluster.ranks_per_node,
            environment=dict(config.cluster.environment),
            text=script,
            details={"sbatch": script, "options": options},
        )

    @abstractmethod
    def script(self, run: RunDir, attempt: int, place: Here) -> str:
        """What starts the ranks, word by word."""

    def lay_out(self, request: Request) -> None:
        """Put into the run's folder what its ranks start from: the code, and what ends them."""
        run = RunDir(request.run)
        if self.config.run.snapshot:
            self.copy_code(run.path, run.snapshot(request.attempt))
        self.write_epilog(run)

    def copy_code(self, run: Path, into: Path) -> None:
        """Copy the code that is to run, and say what is left out of it."""
        left_out = snapshot.take(target_of(self.config.job), run, into)
        if left_out:
            self.tell(
                f"the copy of the code leaves out what holds secrets by its name, and links "
                f"that lead elsewhere: {shorten(left_out)}"
            )

    def write_epilog(self, run: RunDir) -> None:
        """What srun starts after each rank, in the folder of all that SLURM starts."""
        run.submitit.mkdir(mode=0o700, exist_ok=True)
        script = run.submitit / SCRIPT
        write_atomically(script, after_rank(run, quoted(run.path), every=self.survival.on))
        script.chmod(0o700)
