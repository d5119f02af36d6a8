"""A run of ours on simulated nodes, started and watched from outside, whose ranks can be killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
LINE = (
    "job._target_=benchmarks.survive.Work",
    "tracker=none",
    "cluster.nodes=2",
    "cluster.ranks_per_node=2",
    "accumulation.global_batch=256",
    "accumulation.micro_batch=16",
    "accumulation.reduction=reproducible",
    "train.evaluate_every=0",
    "train.checkpoint_every=0",
)


class WatchedRun:
    """One of ours, started and watched from outside."""

    def __init__(self, updates: int, survive: str, *more: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="survive-"))
        self._run, self._updates = self._folder / "run", updates
        words = [*LINE, survive, f"train.updates={updates}", f"run.dir={self._run}", "-q", *more]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.launch", *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.kills: list[tuple[float, int]] = []

    def records(self) -> list[dict[str, Any]]:
        """Return its updates so far, and the changes of its group."""
        path = self._run / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        found = [json.loads(line) for line in lines]
        return [one for one in found if "loss" in one or "generation" in one]

    def kill(self, rank: int) -> None:
        """Kill a rank in the middle of a window, as soon as possible."""
        names = {f"rank {rank}"}
        children = psutil.Process(self._process.pid).children(recursive=True)
        victim = next((child for child in children if _name(child) in names), None)
        if victim is None:
            raise RuntimeError(f"the run was over before rank {rank} could be killed")
        self.kills.append((time.time(), rank))
        os.kill(victim.pid, signal.SIGKILL)

    def end(self) -> dict[str, Any]:
        """Return its result. Raises `RuntimeError` where it failed."""
        output, _ = self._process.communicate(timeout=600)
        if self._process.returncode:
            raise RuntimeError(output)
        return json.loads((self._run / "result.json").read_text())

    def close(self) -> None:
        """End all its processes."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        shutil.rmtree(self._folder)


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:  # it has just ended
        return ""
