"""From the command to the moment when every rank's own code begins: ours and a bare script.

The bare script is what people write by hand: Hydra composes a small configuration and submitit's
local executor starts as many tasks. The clock stops when the last task has begun to import the same
job module, which notes the time before anything else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import interleaved, keep, machine, rows_of

ROOT = Path(__file__).resolve().parent.parent
RANKS = 4
TIMEOUT_S = 60.0
REFERENCE = "bare Hydra + submitit script"
STAMP = "import os, pathlib, time\n" + textwrap.dedent("""
    folder = pathlib.Path(os.environ["STAMPS"])
    (folder / repr(time.time())).touch()
    made = None
    raise SystemExit(0)
""")
BARE = """
    import hydra, submitit
    from omegaconf import DictConfig

    def work():
        import stamp_job

    @hydra.main(version_base="1.3", config_path=".", config_name="bare")
    def main(cfg: DictConfig):
        executor = submitit.AutoExecutor(folder=cfg.folder, cluster="local")
        executor.update_parameters(tasks_per_node=cfg.ranks, timeout_min=5)
        job = executor.submit(work)
        job.exception()

    main()
"""


def first_to_last(command: list[str], folder: Path) -> float:
    stamps = folder / "stamps"
    shutil.rmtree(stamps, ignore_errors=True)
    stamps.mkdir()
    env = {
        **os.environ,
        "STAMPS": str(stamps),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
    }
    began = time.time()
    process = subprocess.Popen(
        command, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while len(list(stamps.iterdir())) < RANKS:
        if time.time() - began > TIMEOUT_S:
            raise RuntimeError(f"not all of {RANKS} ranks began: {' '.join(command)}")
        time.sleep(0.01)
    process.terminate()
    process.wait()
    return max(float(p.name) for p in stamps.iterdir()) - began


def contenders(folder: Path) -> dict[str, Callable[[], float]]:
    (folder / "stamp_job.py").write_text(STAMP)
    (folder / "bare.py").write_text(textwrap.dedent(BARE))
    (folder / "bare.yaml").write_text(
        f"folder: {folder}/bare\nranks: {RANKS}\nhydra: {{output_subdir: null, run: {{dir: .}}}}\n"
    )
    count = iter(range(10**6))

    def ours() -> float:
        run = folder / f"run{next(count)}"
        command = [
            sys.executable, "-m", "orchestrator.launch", "job._target_=stamp_job.made",
            f"run.dir={run}", "cluster.nodes=1", f"cluster.ranks_per_node={RANKS}", "-q",
        ]  # fmt: skip
        return first_to_last(command, folder)

    return {
        REFERENCE: lambda: first_to_last([sys.executable, "bare.py"], folder),
        "orchestrator.launch": ours,
    }


def main(*, quick: bool = False) -> None:
    found = machine()
    with tempfile.TemporaryDirectory() as name:
        figures = interleaved(contenders(Path(name)), 3 if quick else 9)
    part = {
        "heading": "",
        "reference": REFERENCE,
        "figures": {"seconds": rows_of(figures, REFERENCE)},
    }
    note = f"From the command until {RANKS} ranks here have begun to import the job's module."
    data = {"title": "Launch overhead", "machine": found, "note": note, "parts": [part]}
    keep("launch_overhead", data, quick=quick)
