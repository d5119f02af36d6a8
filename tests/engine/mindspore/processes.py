"""Ranks as real processes."""

import json
import subprocess
import sys
from pathlib import Path

import psutil

from tests.helpers import ROOT, environment

PROGRAM = "tests.engine.mindspore.program"


def start(folder, rank, size, *more, module=PROGRAM):
    log = (Path(folder) / f"log-{rank}.txt").open("wb")
    with log:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(folder), str(rank), str(size), *more],
            env=environment(GLOG_v="3", OMP_NUM_THREADS="1"),
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def run_group(folder, size, timeout_s=500.0):
    """All ranks' reports, and for the failed ones their logs."""
    ranks = [start(folder, rank, size) for rank in range(size)]
    try:
        for process in ranks:
            process.wait(timeout_s)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()
    return [read(folder, rank) for rank in range(size)]


def read(folder, rank):
    path = Path(folder) / f"report-{rank}.json"
    if path.exists():
        return json.loads(path.read_text())
    log = (Path(folder) / f"log-{rank}.txt").read_text()
    raise AssertionError(f"rank {rank} left no report:\n{log[-4000:]}")


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
