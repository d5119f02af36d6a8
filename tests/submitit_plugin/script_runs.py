"""Start the script of submitit as its users do, and check its lines."""

import json
import subprocess
import sys

from orchestrator.submitit_plugin import VARIABLE
from tests.helpers import LIMIT_S, environment

SCRIPT = [sys.executable, "-m", "tests.submitit_plugin.script"]


def run_script(folder, overrides, **env):
    """Run the script with logs in `folder`, and return its lines."""
    done = subprocess.run(
        [*SCRIPT, str(folder)],
        env=environment(**{VARIABLE: overrides, **env}),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(lines, folder, *, queued=False):
    """Check what the script has printed: `queued` if its jobs waited in SLURM's queue."""
    array, log, failed, summed, preempted, cancelled, unsaved, at_once = lines
    assert array["results"] == [0, 2, 4]
    assert array["states"] == ["COMPLETED"] * 3
    assert "adding 2 and 2" in log["stdout"]
    assert log["stderr"] == "to the error stream\n"
    assert log["path"].startswith(str(folder))
    assert log["path"].endswith("_0_log.out")
    assert "ValueError: nothing can be done" in failed["error"]
    assert failed["state"] == "FAILED"
    assert summed["results"] == [[10.0, 0], [10.0, 1], [10.0, 0], [10.0, 1]]
    assert summed["script"] is queued
    assert preempted["results"] == [[60, 2, 0], [60, 2, 1]]
    assert preempted["state"] == "COMPLETED"
    assert cancelled["state"] == at_once["state"] == "CANCELLED"
    assert "no room for a checkpoint" in unsaved["error"]
    assert unsaved["state"] == "FAILED"
    assert not list(folder.glob("*.pkl")), "a pickle without its job"
