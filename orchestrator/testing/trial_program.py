"""The program of `ClusterSuite`: it reports its place, and lets a file grow while it lives.

python -m orchestrator.testing.trial_program FOLDER end|live|raise|kill

Each rank writes `rank-<n>.json`, and then lets `rank-<n>` grow. With "raise" and "kill" rank 1
raises an error or kills itself, while the others live.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

INTERVAL_S = 0.05


def main(folder: Path, act: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent ends it at once when needed
    rank = os.environ["SLURM_PROCID"]
    facts = {
        "node": os.environ["SLURMD_NODENAME"],
        "local_rank": int(os.environ["SLURM_LOCALID"]),
        "mark": os.environ.get("TRIAL"),
    }
    path = folder / f"rank-{rank}.json"
    path.with_suffix(".new").write_text(json.dumps(facts), encoding="utf-8")
    path.with_suffix(".new").rename(path)
    until = 0.0 if act == "end" else float("inf")
    while time.monotonic() < until:
        with path.with_suffix("").open("a", encoding="ascii") as file:
            file.write(".")
        time.sleep(INTERVAL_S)
        if rank == "1" and act == "raise":
            raise ValueError("the trial was asked to fail")
        if rank == "1" and act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
