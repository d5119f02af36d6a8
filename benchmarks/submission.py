"""Time of a submission to SLURM: ours against scripts that people write by hand.

All submit the same request to the same development cluster, with a start far in the future, and
are timed as whole commands, from the shell's point of view. The scripts by hand check nothing, keep
no copy of the code, and make no run folder.
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
from slurm.testing import dev_cluster

ROOT = Path(__file__).resolve().parent.parent
REPETITIONS, QUICK_REPETITIONS = 15, 9
NOTE = (
    "One job of 2 nodes x 2 tasks, held back by `--begin`, submitted to the same development "
    "cluster by each in turn. Seconds of the whole command as the shell sees it, and CPU seconds "
    "of it and its children. Only ours checks the configuration, plans, keeps a copy of the code, "
    "and makes a run folder from which it can be followed and resumed."
)
PARAMETERS = """
        nodes=2, tasks_per_node=2, cpus_per_task=1, timeout_min=60,
        slurm_additional_parameters={"begin": "now+3600"},
"""
SUBMITIT = f"""
    import sys, submitit
    executor = submitit.AutoExecutor(folder=sys.argv[1], cluster="slurm")
    executor.update_parameters({PARAMETERS}    )
    print(executor.submit(print, "hello").job_id)
"""
HYDRA = """
    import hydra, submitit

    @hydra.main(version_base="1.3", config_path=".", config_name="bare")
    def main(cfg):
        executor = submitit.AutoExecutor(folder=cfg.folder, cluster="slurm")
        executor.update_parameters(
            nodes=cfg.nodes, tasks_per_node=cfg.ranks, cpus_per_task=1, timeout_min=60,
            slurm_additional_parameters={"begin": "now+3600"},
        )
        print(executor.submit(print, "hello").job_id)

    main()
"""
CONFIG = """
    folder: ???
    nodes: 2
    ranks: 2
    hydra: {run: {dir: .}, output_subdir: null}
"""
BATCH = f"""\
    #!/bin/bash
    #SBATCH --nodes=2 --ntasks-per-node=2 --cpus-per-task=1 --time=60 --begin=now+3600
    srun {sys.executable} -c 'print("hello")'
"""
FILES = {
    "alone.py": SUBMITIT,
    "with_torch.py": SUBMITIT.replace("import sys, submitit", "import sys, submitit, torch"),
    "with_hydra.py": HYDRA,
    "bare.yaml": CONFIG,
    "job.sh": BATCH,
}
REFERENCE = "submitit by hand"


def _commands(base: Path, slurm_conf: Path) -> dict[str, list[str]]:
    """Return each contender's command; `RUN` is replaced by the run's folder."""

    def script(name: str, *words: str) -> list[str]:
        return [sys.executable, str(base / name), *words]

    ours = [
        sys.executable,
        "-m",
        "orchestrator.launch",
        "+cluster=slurm_dev",
        "run.dir=RUN",
        f"cluster.slurm_conf={slurm_conf}",
        "+cluster.slurm_flags.begin=now+3600",
    ]
    return {
        "ours": ours,
        "ours, run.snapshot=false": [*ours, "run.snapshot=false"],
        "sbatch and a batch script by hand": ["sbatch", str(base / "job.sh")],
        REFERENCE: script("alone.py", "RUN"),
        "submitit and @hydra.main by hand": script("with_hydra.py", "folder=RUN"),
        "submitit by hand, torch imported": script("with_torch.py", "RUN"),
    }


class Submissions:
    """Times commands, and takes back what they submit.

    Attributes:
        cpu_s: CPU seconds of each contender's commands, the first of which warmed up.
    """

    def __init__(self, base: Path, slurm_conf: Path) -> None:
        self._base = base
        self._env = {**os.environ, "SLURM_CONF": str(slurm_conf), "PYTHONPATH": str(ROOT)}
        self.cpu_s: dict[str, list[float]] = {}

    def timed(self, name: str, command: list[str]) -> float:
        """Return the seconds of one command. Raises `RuntimeError` when it fails."""
        folder = self._base / "run"
        shutil.rmtree(folder, ignore_errors=True)
        words = [word.replace("RUN", str(folder)) for word in command]
        began = time.perf_counter()
        process = subprocess.Popen(
            words, env=self._env, cwd=self._base, stdout=subprocess.DEVNULL, start_new_session=True
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"ended with {process.returncode}: {' '.join(words)}")
        self.cpu_s.setdefault(name, []).append(usage.ru_utime + usage.ru_stime)
        subprocess.run(["scancel", f"--user={os.getuid()}"], env=self._env, check=True)
        return seconds

    def measured(self, commands: dict[str, list[str]], repetitions: int) -> dict[str, list[float]]:
        """Return the wall seconds of each, in turn."""
        calls: dict[str, Callable[[], float]] = {
            name: lambda name=name, command=command: self.timed(name, command)
            for name, command in commands.items()
        }
        return interleaved(calls, repetitions)


def main(*, quick: bool = False) -> None:
    base = Path(tempfile.mkdtemp(prefix="bench-"))
    for name, text in FILES.items():
        (base / name).write_text(textwrap.dedent(text))
    found = machine()
    try:
        with dev_cluster("bench", base=base, remove=True) as cluster:
            submissions = Submissions(base, cluster.slurm_conf)
            commands = _commands(base, cluster.slurm_conf)
            wall = submissions.measured(commands, QUICK_REPETITIONS if quick else REPETITIONS)
    finally:
        shutil.rmtree(base)
    cpu = {name: figures[1:] for name, figures in submissions.cpu_s.items()}
    figures = {"seconds": rows_of(wall, REFERENCE), "CPU seconds": rows_of(cpu, REFERENCE)}
    part = {"heading": "", "reference": REFERENCE, "figures": figures}
    data = {"title": "Submitting one job to SLURM", "machine": found, "note": NOTE, "parts": [part]}
    keep("submission", data, quick=quick)
