"""What the accumulator, `run.windows` and the trainer cost around a micro-step and a boundary.

Processor time of one rank, all threads, over the loop by hand. Updates of two lengths tell the cost
of a micro-step (the slope) from that of a boundary.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import overhead_rank
from benchmarks.markdown import grid, spread_cells
from benchmarks.measure import Spread, keep, machine, turns
from benchmarks.overhead_rank import CLIP_NORM, LAYERS, RATE, SAMPLES, WIDE

STEPS = (4, 16)
WARM_UP = 50
KINDS = {
    "the loop by hand": "by_hand",
    "`Accumulator`": "accumulator",
    "`run.windows`": "windows",
    "a job class": "job",
}
NOTE = f"""\
One rank, {LAYERS} layers of {WIDE} x {WIDE} (48 parameters), micro-batches of {SAMPLES} samples,
AdamW, clipping, one thread; `run.windows` and the job class under the launcher. Microseconds of
processor time over the loop by hand, from updates of {STEPS[0]} and {STEPS[1]} micro-steps, taken
in turn: the slope, and what is left. The loop by hand takes its samples by rows, too."""


def _seconds(kind: str, steps: int, updates: int, folder: Path) -> float:
    """Return the median processor time of an update of one run."""
    file, script = folder / "times.json", overhead_rank.__file__
    one_rank = ("cluster.nodes=1", "cluster.ranks_per_node=1", "tracker=none", "-q")
    run = f"run.dir={tempfile.mkdtemp(dir=folder)}/run"
    words = [kind, str(steps), str(updates), str(file)]
    if kind == "job":
        command = [
            "orchestrator",
            "launch",
            "job._target_=benchmarks.overhead_rank.Overhead",
            f"job.file={file}",
            f"job.updates={updates}",
            *one_rank,
            run,
            f"accumulation.micro_batch={SAMPLES}",
            "accumulation.steps=null",
            f"accumulation.global_batch={SAMPLES * steps}",
            f"train.updates={updates}",
            "train.epochs=null",
            "train.evaluate_every=0",
            f"train.clip_norm={CLIP_NORM}",
            "optimizer=adamw",
            f"schedule.base_lr={RATE}",
        ]
    elif kind == "windows":
        command = ["orchestrator", "run", *one_rank, run, "--", script, *words]
    else:
        command = ["benchmarks.overhead_rank", *words]
    subprocess.run(
        [sys.executable, "-m", *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        timeout=300,
    )
    times: list[float] = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    spent = [later - earlier for earlier, later in pairwise(times)]
    return statistics.median(spent[WARM_UP:])


def main(*, quick: bool = False) -> None:
    updates, repetitions = (120, 2) if quick else (400, 7)
    rows: dict[str, dict[str, list[float]]] = {
        name: {"micro_step": [], "boundary": []} for name in KINDS
    }
    with tempfile.TemporaryDirectory() as folder:
        for turn in turns(list(KINDS), repetitions):
            of_turn: dict[str, tuple[float, float]] = {}
            for name in turn:
                few, many = (
                    1e6 * _seconds(KINDS[name], steps, updates, Path(folder)) for steps in STEPS
                )
                slope = (many - few) / (STEPS[1] - STEPS[0])
                of_turn[name] = slope, few - STEPS[0] * slope
            base = of_turn[next(iter(KINDS))]
            for name, figures in of_turn.items():
                rows[name]["micro_step"].append(figures[0] - base[0])
                rows[name]["boundary"].append(figures[1] - base[1])
    data = {
        "machine": machine(),
        "rows": [
            {"name": name, **{key: Spread.of(values).rounded() for key, values in row.items()}}
            for name, row in rows.items()
        ],
    }
    keep("overhead", data, quick=quick)


def body(data: dict[str, Any]) -> str:
    """Return the page."""
    head = ["", "a micro-step (µs)", "quartiles", "a boundary (µs)", "quartiles"]
    lines: list[list[str]] = []
    for row in data["rows"][1:]:
        cells = [*spread_cells(row["micro_step"], ".0f"), *spread_cells(row["boundary"], ".0f")]
        lines.append([row["name"], *cells])
    return f"{NOTE}\n\n{grid(head, lines)}"
