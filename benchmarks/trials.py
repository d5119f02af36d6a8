"""A search of 16 uneven trials on four slots: how long slots stand idle, with hydra-optuna-sweeper
beside it.

Both try each of 16 points once, as a grid. A trial is the same few lines, which sleep for their
point's seconds, drawn from 5 to 45, and note when; so no trial slows another down. Idle is the part
of the four slots' seconds in which no trial was under way, until the last trial had begun: after
that nothing was left to start. Hydra's sweeper runs in an environment of its own, since it wants an
older Optuna; its joblib launcher has four workers.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Spread, keep, machine

ROOT = Path(__file__).resolve().parent.parent
TRIALS, SLOTS = 16, 4
SHORTEST_S, LONGEST_S = 5.0, 45.0
PEER = ("hydra-core==1.3.8", "hydra-optuna-sweeper==1.2.0", "hydra-joblib-launcher==1.2.0",
        "sqlalchemy<2.1")  # fmt: skip
OURS, THEIRS = "sweep.search", "hydra-optuna-sweeper"

TRIAL = """
import json, os, time

def trial(place):
    seconds = json.loads(os.environ["TRIAL_SECONDS"])[place]
    began = time.time()
    time.sleep(seconds)
    with open(f"{os.environ['TRIAL_NOTES']}/{place}.json", "w") as file:
        json.dump([began, time.time()], file)
"""
UNDER_US = """
import argparse
from orchestrator import current_run
from trial import trial

parser = argparse.ArgumentParser()
parser.add_argument("--place", type=int)
place = parser.parse_args().place
trial(place)
current_run.report(0, loss=float(place + 1))
"""
UNDER_HYDRA = """
import hydra
from trial import trial

@hydra.main(version_base=None, config_path=None, config_name=None)
def main(config):
    trial(int(config.place))
    return float(config.place)

main()
"""


def idle(spans: Sequence[tuple[float, float]], slots: int) -> float:
    """Return the part of `slots` slots' time that no span fills, from the first to the last start.

    >>> idle([(0.0, 2.0), (0.0, 4.0), (3.0, 9.0), (4.0, 5.0)], 2)
    0.125
    """
    first, last = min(begin for begin, _ in spans), max(begin for begin, _ in spans)
    busy = sum(min(end, last) - begin for begin, end in spans)
    return 1 - busy / (slots * (last - first))


def lengths(seed: int) -> list[float]:
    """Return the seconds of each trial."""
    draw = random.Random(seed)  # noqa: S311  # no secret
    return [round(draw.uniform(SHORTEST_S, LONGEST_S), 2) for _ in range(TRIALS)]


def searched(command: Sequence[str], folder: Path, seconds: Sequence[float]) -> dict[str, float]:
    """Run one search; return its idle part, and the whole command's seconds.

    Raises:
        RuntimeError: the command failed, or not every trial was run once.
    """
    notes = folder / f"notes-{time.time_ns()}"
    notes.mkdir()
    told = {"TRIAL_SECONDS": json.dumps(list(seconds)), "TRIAL_NOTES": str(notes)}
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", **told},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    wall = time.perf_counter() - began
    spans = [json.loads(note.read_text()) for note in notes.iterdir()]
    if done.returncode or len(spans) != TRIALS:
        said = (done.stdout + done.stderr)[-3000:]
        raise RuntimeError(f"{len(spans)} of {TRIALS} trials, {done.returncode}: {said}")
    return {"idle": idle(spans, SLOTS), "seconds": wall}


def commands(folder: Path, python: Path) -> dict[str, list[str]]:
    """Return each search's command; the folder of ours is new each time."""
    run = folder / f"sweep-{time.time_ns()}"
    ours = [
        sys.executable, "-m", "orchestrator", "run", "-m", "sweep.search=grid", f"run.dir={run}",
        f"sweep.trials={TRIALS}", f"sweep.parallel={SLOTS}", "cluster.nodes=1",
        "cluster.ranks_per_node=1", f"job.arguments.place=range({TRIALS})", "--", "ours.py",
    ]  # fmt: skip
    theirs = [
        str(python), "theirs.py", "-m", "hydra/sweeper=optuna", "hydra/sweeper/sampler=grid",
        "hydra/launcher=joblib", f"hydra.launcher.n_jobs={SLOTS}",
        f"hydra.sweeper.n_jobs={SLOTS}", f"hydra.sweeper.n_trials={TRIALS}",
        f"+place=choice({','.join(map(str, range(TRIALS)))})",
    ]  # fmt: skip
    return {OURS: ours, THEIRS: theirs}


def main(*, quick: bool = False) -> None:
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    rounds = 1 if quick else 3
    try:
        subprocess.run([sys.executable, "-m", "venv", folder / "peer"], check=True)
        python = folder / "peer" / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PEER], check=True)
        for name, text in (("trial", TRIAL), ("ours", UNDER_US), ("theirs", UNDER_HYDRA)):
            (folder / f"{name}.py").write_text(text)
        found: dict[str, list[dict[str, float]]] = {OURS: [], THEIRS: []}
        for number in range(rounds):
            for name, command in commands(folder, python).items():
                found[name].append(searched(command, folder, lengths(number)))
                print(f"{name}: {found[name][-1]}", flush=True)
    finally:
        shutil.rmtree(folder)
    bound = Spread.of([sum(lengths(number)) / SLOTS for number in range(rounds)])
    keep(
        "trials",
        {
            "machine": machine(),
            "bound_s": bound.rounded(),
            "rows": {
                name: {key: Spread.of([one[key] for one in rows]).rounded() for key in rows[0]}
                for name, rows in found.items()
            },
        },
        quick=quick,
    )


def table(data: dict[str, Any]) -> str:
    """Return the table of both searches: idle part, and the command's seconds."""
    lines = ["| search | idle | the whole search, seconds |", "|---|---:|---:|"]
    for name, row in data["rows"].items():
        part, seconds = row["idle"]["median"], row["seconds"]["median"]
        lines.append(f"| {name} | {100 * part:.1f} % | {seconds:.0f} |")
    lines.append(f"| without a gap | 0 % | {data['bound_s']['median']:.0f} |")
    return "\n".join(lines)


def body(data: dict[str, Any]) -> str:
    """Return the page."""
    return f"{(__doc__ or '').strip()}\n\n{table(data)}"
