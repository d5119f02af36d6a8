"""MindSpore: from the command until every rank is in a formed group, by `msrun` and by ours.

The clock stops when the last rank has its group: in the script that `msrun` starts, after `init()`;
in ours, when the job's `model()` is called, which is after it. Ours has composed and checked a
configuration, made a plan and a run folder and started two simulated nodes by then. Both wait for
their processes to end before the next one starts.
"""

from __future__ import annotations

import os
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import interleaved, keep, machine, rows_of
from benchmarks.stamps import last_stamp
from orchestrator.engine.common.rendezvous import keep_port

RANKS = 4
TIMEOUT_S = 120.0
REPETITIONS = 5
REFERENCE = "msrun"
STAMP = """
    import os, pathlib, time

    def stamp():
        folder = pathlib.Path(os.environ["STAMPS"])
        (folder / repr(time.time())).touch()
        while len(list(folder.iterdir())) < int(os.environ["RANKS"]):
            time.sleep(0.01)  # the first one to leave would end the others
"""
SCRIPT = """
    from mindspore.communication import init

    init()
    from stamp import stamp

    stamp()
"""
JOB = """
    from orchestrator import Job

    class Stamped(Job):
        framework = "mindspore"

        def model(self):
            from stamp import stamp

            stamp()
            raise SystemExit(0)

        def dataset(self):
            return [0.0] * 64

        def loss(self, model, batch): ...
"""


def _seconds(command: list[str], folder: Path) -> float:
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith("MS_")},
        "RANKS": str(RANKS),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # msrun's python
        "GLOG_v": "3",
        "OMP_NUM_THREADS": "1",
    }
    return last_stamp(command, folder, ranks=RANKS, timeout_s=TIMEOUT_S, env=env)


def contenders(folder: Path) -> dict[str, Callable[[], float]]:
    """Return both ways, as functions that return seconds."""
    for name, text in (("stamp.py", STAMP), ("script.py", SCRIPT), ("start_job.py", JOB)):
        (folder / name).write_text(textwrap.dedent(text))
    count = iter(range(10**6))

    def msrun() -> float:
        with keep_port("127.0.0.1") as keeper:
            command = [
                sys.executable,
                "-m",
                "mindspore.parallel.cluster.run",  # what `msrun` runs
                f"--worker_num={RANKS}",
                f"--local_worker_num={RANKS}",
                "--master_addr=127.0.0.1",
                f"--master_port={keeper.getsockname()[1]}",
                f"--log_dir={folder / 'msrun'}",
                "--join=True",
                "script.py",
            ]
            return _seconds(command, folder)

    def ours() -> float:
        command = [
            sys.executable,
            "-m",
            "orchestrator.launch",
            "job._target_=start_job.Stamped",
            f"run.dir={folder / f'run{next(count)}'}",
            "cluster.nodes=2",
            f"cluster.ranks_per_node={RANKS // 2}",
            "optimizer=sgd",
            "-q",
        ]
        return _seconds(command, folder)

    return {REFERENCE: msrun, "orchestrator.launch": ours}


def main(*, quick: bool = False) -> None:
    found = machine()
    with tempfile.TemporaryDirectory() as name:
        figures = interleaved(contenders(Path(name)), 2 if quick else REPETITIONS)
    part = {
        "heading": "",
        "reference": REFERENCE,
        "figures": {"s": rows_of(figures, REFERENCE)},
    }
    title = f"MindSpore: from the command until {RANKS} ranks are in a group"
    note = "The clock stops when the last rank has its group, in an own process each."
    data = {"title": title, "machine": found, "note": note, "parts": [part]}
    keep("mindspore_start", data, quick=quick)
