"""Load of a run on shared services: SLURM's controller, and the run folder's file system.

Commands are counted by a wrapper in front of SLURM's own on PATH, file operations by strace (system
calls that name a file, and not those on one that is open). On a development cluster of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.markdown import grid
from benchmarks.measure import TINY_PLAN, keep, machine, wait_for
from slurm.dev_cluster import DevCluster
from slurm.testing import dev_cluster

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("squeue", "sacct", "scontrol", "sinfo", "sbatch", "scancel", "sacctmgr")
RANKS, JOBS = 4, 20
OPERATIONS = "file operations a second"


class Counting:
    """Runs our commands, with a wrapper before each of SLURM's that writes down its name."""

    def __init__(self, base: Path, cluster: DevCluster) -> None:
        self._log, self._cluster = base / "calls", cluster
        folder = base / "bin"
        folder.mkdir()
        for name in COMMANDS:
            path = folder / name
            theirs = shutil.which(name)
            path.write_text(f'#!/bin/sh\necho {name} >> {self._log}\nexec {theirs} "$@"\n')
            path.chmod(0o700)
        self._env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("SLURM_")},
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }

    def launch(self, *words: str) -> None:
        """Submit, and wait until that is done. Raises `CalledProcessError` when it fails."""
        where = ("+cluster=slurm_dev", f"cluster.slurm_conf={self._cluster.slurm_conf}")
        subprocess.run(
            [sys.executable, "-m", "orchestrator.launch", *where, *TINY_PLAN, *words],
            env=self._env,
            cwd=self._log.parent,
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def watcher(self, run: Path) -> subprocess.Popen[bytes]:
        """Start a follower of a run, as from another shell."""
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrator", "attach", str(run)],
            env=self._env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    @property
    def calls(self) -> int:
        """Return the calls of SLURM's commands since the beginning."""
        return len(self._log.read_text().splitlines()) if self._log.exists() else 0


def file_operations(pids: dict[str, int], seconds: float) -> dict[str, float]:
    """Return file system calls a second, of each of these processes and its threads."""
    with tempfile.TemporaryDirectory() as folder:
        traces = {
            name: subprocess.Popen(
                [
                    "strace",
                    "-f",
                    "-qq",
                    "-e",
                    "trace=%file",
                    "-e",
                    "signal=none",
                    "-o",
                    f"{folder}/{pid}",
                    "-p",
                    str(pid),
                ]
            )
            for name, pid in pids.items()
        }
        time.sleep(seconds)  # the interval in which calls are counted
        for trace in traces.values():
            trace.send_signal(signal.SIGINT)
            trace.wait()
        counted = {
            name: sum(
                "AT_EMPTY_PATH" not in line
                for line in (Path(folder) / str(pid)).read_text().splitlines()
            )
            for name, pid in pids.items()
        }
    return {name: count / seconds for name, count in counted.items()}


def _idle(pids: Iterable[int]) -> bool:
    """Return whether these have been idle for a few seconds."""

    def used() -> float:
        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)

    before = used()
    time.sleep(3.0)  # the time over which it is looked at
    return used() - before < 0.1


@contextmanager
def _started(counting: Counting, cluster: DevCluster, run: Path) -> Iterator[dict[str, int]]:
    """Start a job of two nodes with two ranks each, with rank 0 stopped; return pids by rank."""
    counting.launch(
        f"run.dir={run}",
        "cluster.ranks_per_node=2",
        "train.updates=100000",
        "job.pause_s=0.02",
        "cluster.heartbeat_timeout_s=600",  # a stopped rank would otherwise be replaced
    )

    def ranks() -> dict[str, int]:
        tasks = [task for n in range(4) for task in cluster.node_pids(f"n{n}").tasks]
        found = {f"rank {task.rank}": task.pid for task in tasks if task.rank is not None}
        return found if len(found) == RANKS else {}

    try:
        yield wait_for(ranks, "every rank")
    finally:
        cluster.command("scancel", f"--user={os.getuid()}")


def _operations(counting: Counting, cluster: DevCluster, base: Path, seconds: float) -> list[Any]:
    run = base / "run"
    with _started(counting, cluster, run) as pids:
        agents = {
            "rank 0's agent": psutil.Process(pids["rank 0"]).ppid(),
            "the other agent": psutil.Process(pids["rank 2"]).ppid(),
        }
        os.kill(pids["rank 0"], signal.SIGSTOP)
        waiting = {name: pid for name, pid in pids.items() if name != "rank 0"}
        wait_for(lambda: _idle(waiting.values()), "waiting")
        time.sleep(15.0)  # polls become rarer
        while_waiting = file_operations({**waiting, **agents}, seconds)
        os.kill(pids["rank 0"], signal.SIGCONT)
        metrics = run / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 20, "training")
        updates = metrics.read_text().count("\n")
        while_training = file_operations({**pids, **agents}, seconds)
        updates = metrics.read_text().count("\n") - updates
    others = [f"rank {n}" for n in (1, 2, 3)]
    return [
        [f"{OPERATIONS} of a rank that waits for rank 0", max(while_waiting[n] for n in others)],
        [f"{OPERATIONS} of its agent", while_waiting["the other agent"]],
        [f"{OPERATIONS} of rank 0, which writes, while it trains", while_training["rank 0"]],
        ["updates a second meanwhile", updates / seconds],
        [f"{OPERATIONS} of another rank that trains", max(while_training[n] for n in others)],
        [f"{OPERATIONS} of rank 0's agent", while_training["rank 0's agent"]],
        [f"{OPERATIONS} of the other agent", while_training["the other agent"]],
    ]


def _scheduler_calls(counting: Counting, base: Path, seconds: float) -> list[list[Any]]:
    """Count calls to submit `JOBS` jobs by a sweep, and in a minute of following them."""
    later, folder = "+cluster.slurm_flags.begin=now+3600", base / "watched"
    values = ",".join(str(seed) for seed in range(JOBS))
    counting.launch(
        "-m",
        f"train.seed={values}",
        later,
        f"run.dir={folder}/${{train.seed}}",
        f"hydra.sweep.dir={folder}/sweep",
    )
    submitting = counting.calls
    watchers = [counting.watcher(path.parent) for path in folder.glob("**/handle.json")]
    if len(watchers) != JOBS:
        raise RuntimeError(f"{len(watchers)} runs instead of {JOBS}")
    try:
        time.sleep(30.0)  # all have started
        before = counting.calls
        time.sleep(seconds)  # the time that is counted
        watched = (counting.calls - before) * 60 / seconds
    finally:
        for watcher in watchers:
            watcher.kill()
            watcher.wait()
    return [
        [f"SLURM's commands to submit a sweep of {JOBS} points that ask for the same", submitting],
        [f"the same, a minute, of one user's watchers of {JOBS} jobs", watched],
    ]


def main(*, quick: bool = False) -> None:
    base = Path(tempfile.mkdtemp(prefix="bench-"))
    found = machine()
    try:
        with dev_cluster("load", base=base, remove=True) as cluster:
            counting = Counting(base, cluster)
            rows = _scheduler_calls(counting, base, 60.0 if quick else 180.0)
            rows += _operations(counting, cluster, base, 10.0 if quick else 30.0)
    finally:
        shutil.rmtree(base)
    keep("load", {"machine": found, "rows": rows}, quick=quick)


def body(data: dict[str, Any]) -> str:
    """Return the page: a line for each count."""
    lines = [[what, f"{figure:.3g}"] for what, figure in data["rows"]]
    return f"{(__doc__ or '').strip()}\n\n{grid(['', 'counted'], lines)}"
