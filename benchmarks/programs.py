"""A program as it is: when its last rank begins, against torchrun; what `current_run`'s calls cost.

The program notes the time before anything else and ends, so it is all start-up. torchrun starts the
ranks of one machine from one agent, which imports torch; ours starts a small parent for each.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from benchmarks.measure import interleaved, keep, machine, rows_of
from benchmarks.stamps import last_stamp
from orchestrator.client.run import CurrentRun
from orchestrator.rundir.program_link import (
    ATTEMPT,
    NOT_YET,
    RANK,
    RUN,
    STOP_AFTER,
    STOP_REQUESTED,
    WORLD,
    write_number,
)

RANKS = 4
TIMEOUT_S = 60.0
STAMP = """\
import os, pathlib, time
(pathlib.Path(os.environ["STAMPS"]) / repr(time.time())).touch()
"""
REFERENCE = "torchrun"
NOTHING = "a call of a Python function"
CALLS = 200


def _seconds(command: list[str], folder: Path) -> float:
    return last_stamp(command, folder, ranks=RANKS, timeout_s=TIMEOUT_S, env=os.environ)


def starts(folder: Path) -> dict[str, Callable[[], float]]:
    """Return seconds from each command to the last rank's first line."""
    (folder / "train.py").write_text(STAMP)
    numbers = count()
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]

    def ours() -> float:
        command = [
            sys.executable,
            "-m",
            "orchestrator",
            "run",
            f"run.dir={folder}/run{next(numbers)}",
            "cluster.nodes=1",
            f"cluster.ranks_per_node={RANKS}",
            "-q",
            "--",
            "train.py",
        ]
        return _seconds(command, folder)

    return {
        REFERENCE: lambda: _seconds([*torchrun, "train.py"], folder),
        "orchestrator run": ours,
    }


@contextmanager
def runs(folder: Path) -> Iterator[tuple[CurrentRun, CurrentRun]]:
    """Return rank 0 and rank 1 of a run, as their programs see it."""
    attempt = folder / "attempts" / "000"
    attempt.mkdir(parents=True)
    for name in (STOP_REQUESTED, STOP_AFTER):
        write_number(str(attempt / name), NOT_YET)

    def rank(number: int) -> CurrentRun:
        return CurrentRun({RUN: str(folder), ATTEMPT: "0", RANK: str(number), WORLD: "2"})

    yield rank(0), rank(1)


def calls(first: CurrentRun, second: CurrentRun) -> dict[str, Callable[[], float]]:
    """Return the microseconds of a call."""

    def each(action: Callable[[int], object]) -> Callable[[], float]:
        def timed() -> float:
            began = time.perf_counter()
            for number in range(CALLS):
                action(number)
            return (time.perf_counter() - began) / CALLS * 1e6

        return timed

    updates = count()
    return {
        NOTHING: each(lambda number: number),
        "report": each(lambda _: first.report(next(updates), loss=0.5, samples=8, accuracy=0.5)),
        "should_stop, rank 0": each(first.should_stop),
        "should_stop, another rank": each(second.should_stop),
    }


def main(*, quick: bool = False) -> None:
    found = machine()
    with tempfile.TemporaryDirectory() as name:
        begun = interleaved(starts(Path(name)), 3 if quick else 9)
    with tempfile.TemporaryDirectory() as name, runs(Path(name)) as (first, second):
        called = interleaved(calls(first, second), 10 if quick else 50)
    parts = [
        {
            "heading": f"From the command until {RANKS} ranks here run the program's first line",
            "reference": REFERENCE,
            "figures": {"seconds": rows_of(begun, REFERENCE)},
        },
        {
            "heading": "A call of `current_run`",
            "reference": NOTHING,
            "figures": {"microseconds": rows_of(called, NOTHING)},
        },
    ]
    note = "A training program that nothing was changed in, and the calls that it may make."
    data = {"title": "Any program", "machine": found, "note": note, "parts": parts}
    keep("programs", data, quick=quick)
