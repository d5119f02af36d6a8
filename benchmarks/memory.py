"""Peak memory of a rank beside a plain training loop at the same micro-batch, and as K grows.

The plain loop is what one writes without any tool: one process, the same model, optimizer, data and
micro-batch, no accumulation. The bound is its peak plus one gradient buffer. Ours runs on one rank
and on two, with K micro-steps of that micro-batch; `peak_memory_bytes` is the process's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.measure import keep, machine

ROOT = Path(__file__).resolve().parent.parent
LAYERS = [784, 3000, 3000, 10]
MICRO_BATCH = 64
STEPS = (1, 4, 16)
PLAIN = f"""
    import resource, torch
    from torch.utils.data import DataLoader
    from jobs.digits import Digits

    torch.set_num_threads(1)
    job = Digits(layers={LAYERS})
    model = job.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    done = 0
    while done < 6:
        for x, y in DataLoader(job.dataset(), batch_size={MICRO_BATCH}, shuffle=True):
            optimizer.zero_grad(set_to_none=False)
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            done += 1
            if done == 6:
                break
    job.evaluate(model)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def plain_peak() -> int:
    """Return the peak of the plain loop's process, in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PLAIN)],
        env=_environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(done.stdout.strip())


def our_peaks(ranks: int, steps: int) -> list[int]:
    """Return the peak of each rank's process, in bytes."""
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        subprocess.run(
            [
                sys.executable, "-m", "orchestrator.launch", f"job.layers={LAYERS}", "-q",
                "cluster.nodes=1", f"cluster.ranks_per_node={ranks}", "train.updates=6",
                f"accumulation.steps={steps}", f"accumulation.micro_batch={MICRO_BATCH}",
                "accumulation.ragged=carry", "train.checkpoint_every=0", f"run.dir={run}",
            ],
            env=_environment(), check=True,
        )  # fmt: skip
        return json.loads((run / "result.json").read_text())["peak_memory_bytes"]


def body(data: dict[str, Any]) -> str:
    """Return the page."""
    buffer = data["gradient_bytes"]
    plain = data["rows"][0]["peak_bytes"]
    lines = [
        f"One gradient buffer: {buffer / 2**20:.0f} MiB; micro-batch: {MICRO_BATCH} samples.",
        "",
        "| contender | ranks | K | peak (MiB) | less the plain loop, in gradient buffers |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['contender']} | {row['ranks']} | {row['steps']} | {row['peak_bytes'] / 2**20:.0f} "
        f"| {(row['peak_bytes'] - plain) / buffer:+.2f} |"
        for row in data["rows"]
    ]
    return "\n".join(lines)


def main(*, quick: bool = False) -> None:
    found = machine()
    parameters = sum(a * b + b for a, b in pairwise(LAYERS))
    rows = [{"contender": "plain loop", "ranks": 1, "steps": 1, "peak_bytes": plain_peak()}]
    for ranks in (1, 2):
        for steps in STEPS[:2] if quick else STEPS:
            peak = max(our_peaks(ranks, steps))
            rows.append({"contender": "ours", "ranks": ranks, "steps": steps, "peak_bytes": peak})
    keep("memory", {"machine": found, "gradient_bytes": 4 * parameters, "rows": rows}, quick=quick)
