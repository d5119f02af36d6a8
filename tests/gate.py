"""`make test`: every test, on two cores (`python -m tests.gate`).

tests/slurm waits half of its time, and holds clocks against what it sees; nothing may compete with
it. So it has the machine, and what computes without looking at a clock (`tests.order.CALM`) takes,
at the lowest priority, what it leaves. Then come whole runs, which have time limits of their own.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.once import SHARED
from tests.order import CALM

ROOT = Path(__file__).resolve().parent.parent
PYTEST = (sys.executable, "-m", "pytest", "--dist", "loadfile")
SLURM = ("tests/slurm", "-n", "2")
REST = ("tests", "-n", "3", "--ignore=tests/slurm", *(f"--ignore={path}" for path in CALM))
BESIDE = ("nice", "-n", "19", *PYTEST, "-n", "2", *CALM, "orchestrator")


def main() -> int:
    with tempfile.TemporaryFile("w+b") as output, tempfile.TemporaryDirectory() as shared:
        os.environ[SHARED] = shared
        beside = subprocess.Popen(BESIDE, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            _say("tests/slurm, two workers")
            failed = [subprocess.run((*PYTEST, *SLURM), cwd=ROOT, check=False).returncode]
            _say("whole runs, three workers")
            failed += [subprocess.run((*PYTEST, *REST), cwd=ROOT, check=False).returncode]
            failed += [beside.wait()]
        finally:
            if beside.poll() is None:  # Ctrl-C: its workers end with it
                beside.terminate()
                beside.wait()
        _say("beside them, at the lowest priority: all other tests")
        output.seek(0)
        sys.stdout.write(output.read().decode("utf-8", "replace"))
    return int(any(failed))


def _say(what: str) -> None:
    print(f"== pytest: {what}", flush=True)  # this is a command


if __name__ == "__main__":
    sys.exit(main())
