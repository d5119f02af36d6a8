"""Sweeps of many points: planned, submitted to SLURM as arrays, looked at, and put on a page.

Whole commands, from the shell's point of view, on a development cluster of its own; no point runs,
for all are held back by `--begin`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.markdown import grid
from benchmarks.measure import keep, machine
from slurm.dev_cluster import DevCluster
from slurm.testing import dev_cluster

ROOT = Path(__file__).resolve().parent.parent
FEW, MANY, QUICK = 64, 1000, 200


class Commands:
    """Run the contenders' commands by turns, and time each."""

    def __init__(self, base: Path, cluster: DevCluster) -> None:
        self._base = base
        self._env = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._place = (
            "+cluster=slurm_dev",
            f"cluster.slurm_conf={cluster.slurm_conf}",
            "+cluster.slurm_flags.begin=now+3600",
        )

    def sweep(self, points: int) -> list[str]:
        """Return the arguments of a sweep."""
        seeds = f"train.seed=range({points})"
        return ["-m", *self._place, seeds, f"run.dir={self.folder(points)}"]

    def folder(self, points: int) -> Path:
        return self._base / str(points)

    def timed(self, what: str, wanted_s: float, module: str, *words: str) -> list[Any]:
        """Return one row: the name, its wall and CPU seconds, and the allowed seconds.

        Raises:
            RuntimeError: the command failed.
        """
        command = [sys.executable, "-m", module, *words]
        with Path(os.devnull).open("wb") as nowhere:
            began = time.perf_counter()
            pid = os.posix_spawn(
                command[0],
                command,
                self._env,
                file_actions=[(os.POSIX_SPAWN_DUP2, nowhere.fileno(), 1)],
            )
            _, status, usage = os.wait4(pid, 0)
            seconds = time.perf_counter() - began
        if status:
            raise RuntimeError(f"ended with {os.waitstatus_to_exitcode(status)}: {command}")
        return [what, seconds, usage.ru_utime + usage.ru_stime, wanted_s]


def measured(commands: Commands, many: int) -> list[list[Any]]:
    few, launch, verbs = commands.folder(FEW), "orchestrator.launch", "orchestrator"
    return [
        commands.timed(f"`plan -m` of {many} points", 10, verbs, "plan", *commands.sweep(many)),
        commands.timed(f"{FEW} points submitted", 5, launch, *commands.sweep(FEW)),
        commands.timed(f"{many} points submitted", 10, launch, *commands.sweep(many)),
        commands.timed(f"`status` of {FEW} points", 1, verbs, "status", str(few)),
        commands.timed(
            f"`status` of {many} points", 1, verbs, "status", str(commands.folder(many))
        ),
        commands.timed(
            f"`report` of {FEW} points", 10, verbs, "report", str(few), "-o", str(few / "page.html")
        ),
    ]


def main(*, quick: bool = False) -> None:
    base = Path(tempfile.mkdtemp(prefix="bench-"))
    found = machine()
    try:
        with dev_cluster("sweeps", base=base, remove=True) as cluster:
            try:
                rows = measured(Commands(base, cluster), QUICK if quick else MANY)
            finally:
                cluster.command("scancel", f"--user={os.getuid()}")
    finally:
        shutil.rmtree(base)
    keep("sweeps", {"machine": found, "rows": rows}, quick=quick)


def body(data: dict[str, Any]) -> str:
    """Return the page: each command, how long it took, and how long it may take."""
    head = ["", "seconds", "CPU seconds", "wanted"]
    lines = [[what, f"{s:.3g}", f"{cpu:.3g}", f"{most:g}"] for what, s, cpu, most in data["rows"]]
    return f"{(__doc__ or '').strip()}\n\n{grid(head, lines)}"
