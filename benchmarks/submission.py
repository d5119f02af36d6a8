"""How long a submission to SLURM takes: ours, and scripts that people write by hand.

All submit the same request to the same development cluster, with a start far in the future, and
are timed as whole commands, from the shell's point of view. The bare scripts check nothing, keep no
copy of the code, and make no run folder.
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
from dataclasses import asdict
from pathlib import Path

from benchmarks.measure import interleaved, publish, table
from slurm.testing import dev_cluster

ROOT = Path(__file__).resolve().parent.parent
REPETITIONS = 9
SUBMITIT = """
    import sys, submitit
    executor = submitit.SlurmExecutor(folder=sys.argv[1])
    executor.update_parameters(
        nodes=2, ntasks_per_node=2, cpus_per_task=1, time=60,
        additional_parameters={"begin": "now+3600"},
    )
    print(executor.submit(print, "hello").job_id)
"""
HYDRA = """
    import hydra, submitit

    @hydra.main(version_base="1.3", config_path=".", config_name="bare")
    def main(cfg):
        executor = submitit.SlurmExecutor(folder=cfg.folder)
        executor.update_parameters(
            nodes=cfg.nodes, ntasks_per_node=cfg.ranks, cpus_per_task=1, time=60,
            additional_parameters={"begin": "now+3600"},
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
REFERENCE = "Hydra and submitit by hand"


def _timed(command: Callable[[Path], list[str]], base: Path, slurm_conf: Path) -> float:
    folder = base / "run"
    shutil.rmtree(folder, ignore_errors=True)
    env = {**os.environ, "SLURM_CONF": str(slurm_conf), "PYTHONPATH": str(ROOT)}
    words = command(folder)
    began = time.perf_counter()
    subprocess.run(words, env=env, cwd=base, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    subprocess.run(["scancel", f"--user={os.getuid()}"], env=env, check=False)
    return seconds


def _ours(slurm_conf: Path, *more: str) -> Callable[[Path], list[str]]:
    return lambda folder: [
        sys.executable, "-m", "orchestrator.launch", "+cluster=slurm_dev", f"run.dir={folder}",
        f"cluster.slurm_conf={slurm_conf}", "+cluster.slurm_flags.begin=now+3600", *more,
    ]  # fmt: skip


def main() -> None:
    base = Path(tempfile.mkdtemp(prefix="bench-"))
    for name, text in (("alone.py", SUBMITIT), ("with_hydra.py", HYDRA), ("bare.yaml", CONFIG)):
        (base / name).write_text(textwrap.dedent(text))
    try:
        with dev_cluster("bench", base=base, remove=True) as cluster:
            conf = cluster.slurm_conf
            commands: dict[str, Callable[[Path], list[str]]] = {
                "submitit by hand": lambda f: [sys.executable, str(base / "alone.py"), str(f)],
                REFERENCE: lambda f: [sys.executable, str(base / "with_hydra.py"), f"folder={f}"],
                "ours": _ours(conf),
                "ours, run.snapshot=false": _ours(conf, "run.snapshot=false"),
            }
            measured = interleaved(
                {
                    name: lambda command=command: _timed(command, base, conf)
                    for name, command in commands.items()
                },
                REPETITIONS,
            )
    finally:
        shutil.rmtree(base)
    publish(
        "submission", "Submitting one job to SLURM", table(measured, "s", REFERENCE),
        [asdict(m) for m in measured],
    )  # fmt: skip


if __name__ == "__main__":
    main()
