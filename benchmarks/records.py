"""Growth of commands with a run's updates and a sweep's points, on folders that are made up.

One point of a small sweep is trained. The others, and the records of a million updates, are copies
of it with other numbers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.markdown import grid
from orchestrator.rundir.files import read_json, write_json

UPDATES, QUICK_UPDATES = (100_000, 1_000_000), (10_000,)
POINTS, QUICK_POINTS = (1_000, 10_000), (100,)
RECORDS_OF_POINT = 20
SWEEP = (
    "-m",
    "accumulation.global_batch=16",
    "cluster.nodes=1",
    "cluster.ranks_per_node=1",
    "tracker=none",
    f"train.updates={RECORDS_OF_POINT}",
)
NOTE = f"""\
Whole commands on folders that are made up: a run of U updates, each with a record as training
writes it, and a sweep of P points of {RECORDS_OF_POINT} updates. CPU seconds and peak memory of the
command."""
END = """\
import sys
from pathlib import Path
from orchestrator.rundir.metrics import Figures, read_metrics
Figures(read_metrics(Path(sys.argv[1]) / "metrics.jsonl").updates)
"""
STARTER = """\
import os, sys
quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=quiet)
_, status, usage = os.wait4(pid, 0)
print(status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
"""


def measured(base: Path, *, quick: bool = False) -> list[dict[str, Any]]:
    """Return a row for each command and size."""
    template, rows = base / "template", list[dict[str, Any]]()
    _cost("orchestrator.launch", *SWEEP, "train.seed=1", f"run.dir={template}")
    for updates in QUICK_UPDATES if quick else UPDATES:
        run = base / f"run-{updates}"
        _make_run(template / "0", run, updates)
        page = str(base / "page.html")
        for name, words in (
            ("status", ("orchestrator", "status", str(run))),
            ("logs", ("orchestrator", "logs", str(run))),
            ("report", ("orchestrator", "report", str(run), "-o", page)),
            ("a run's end reads its records", ("-c", END, str(run))),
        ):
            rows.append({"what": name, "of": "U", "size": updates, **_cost(*words)})
        shutil.rmtree(run)
    for points in QUICK_POINTS if quick else POINTS:
        sweep = base / f"sweep-{points}"
        _make_sweep(template, sweep, points)
        seeds = f"train.seed=range({points})"
        for name, words in (
            ("plan -m", ("plan", *SWEEP, seeds, f"run.dir={base / 'none'}")),
            ("status", ("status", str(sweep))),
            ("report", ("report", str(sweep), "-o", str(base / "page.html"))),
        ):
            rows.append({"what": name, "of": "P", "size": points, **_cost("orchestrator", *words)})
        shutil.rmtree(sweep)
    return rows


def _cost(module: str, *words: str) -> dict[str, float]:
    """Run a command; return its processor seconds, and its peak memory in MB.

    Raises:
        RuntimeError: it failed.
    """
    command = [sys.executable, *(() if module == "-c" else ("-m",)), module, *words]
    # A process's peak includes what its parent held when it was forked: this one has torch.
    small = [sys.executable, "-I", "-S", "-c", STARTER, *command]
    done = subprocess.run(small, stdout=subprocess.PIPE, text=True, check=True)
    status, cpu_s, peak_kb = map(float, done.stdout.split())
    if code := os.waitstatus_to_exitcode(int(status)):
        raise RuntimeError(f"ended with {code}: {command}")
    return {"cpu_s": cpu_s, "peak_mb": peak_kb / 1024}


def _make_run(template: Path, run: Path, updates: int) -> None:
    """Copy a run; give the copy the records of so many updates."""
    shutil.copytree(template, run, ignore=shutil.ignore_patterns("checkpoints"))
    line = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[2])
    with (run / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for update in range(updates):
            changed = {"update": update, "time": line["time"] + 0.1 * update}
            changed["loss"] = line["loss"] / (1 + 1e-3 * update)
            file.write(json.dumps(line | changed) + "\n")
    result = read_json(run / "result.json") | {"updates": updates, "planned_updates": updates}
    write_json(run / "result.json", result)


def _make_sweep(template: Path, sweep: Path, points: int) -> None:
    """Copy the one point of a sweep, each time with another seed."""
    sweep.mkdir()
    shutil.copy(template / ".lock", sweep)
    own = template / "0"
    submission, config = read_json(own / "submission.json"), (own / "config.yaml").read_text()
    for seed in range(points):
        point = sweep / str(seed)
        (point / "attempts" / "000").mkdir(parents=True)
        for name in ("metrics.jsonl", "plan.json", "result.json", "environment.json", ".lock"):
            shutil.copy(own / name, point)
        (point / "config.yaml").write_text(config.replace("seed: 1\n", f"seed: {seed}\n"))
        text = json.dumps(submission).replace("train.seed=1", f"train.seed={seed}")
        write_json(point / "submission.json", json.loads(text))


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of a page."""
    lines = [
        [
            row["what"],
            f"{row['of']} = {row['size']:,}",
            f"{row['cpu_s']:.1f}",
            f"{row['peak_mb']:.0f}",
        ]
        for row in rows
    ]
    return grid(["command", "U or P", "CPU s", "peak MB"], lines)
