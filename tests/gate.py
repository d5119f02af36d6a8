"""`make test`: pyright and every test, on two cores (`python -m tests.gate`).

tests/slurm waits half of its time, and holds clocks against what it sees; nothing may compete with
it. So it has the machine, and what computes without looking at a clock (`tests.order.CALM`) takes,
at the lowest priority, what it leaves. Then come whole runs, which have time limits of their own.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tests.once import SHARED
from tests.order import CALM

ROOT = Path(__file__).resolve().parent.parent
# Where a worker has died and another takes its place, pytest waits at its end for ever.
PYTEST = (sys.executable, "-m", "pytest", "--dist", "loadfile", "--max-worker-restart=0")
SLURM = ("tests/slurm", "-n", "2")
REST = ("tests", "-n", "3", "--ignore=tests/slurm", *(f"--ignore={path}" for path in CALM))
BESIDE = {
    "pyright": (sys.executable, "-m", "pyright", "--pythonpath", sys.executable),
    # What is starved is not what hangs: a longer limit than the tests have by themselves.
    "all other tests": (*PYTEST, "-n", "2", "--timeout=600", *CALM, "orchestrator"),
}


def main() -> int:
    with tempfile.TemporaryDirectory() as shared:
        os.environ[SHARED] = shared
        beside = [_Beside(what, command) for what, command in BESIDE.items()]
        try:
            _say("tests/slurm, two workers")
            failed = [subprocess.run((*PYTEST, *SLURM), cwd=ROOT, check=False).returncode]
            _say("whole runs, three workers")
            failed += [subprocess.run((*PYTEST, *REST), cwd=ROOT, check=False).returncode]
            failed += [one.told() for one in beside]
        finally:
            for one in beside:
                one.end()
    return int(any(failed))


class _Beside:
    """A command at the lowest priority, whose output is told in one piece."""

    def __init__(self, what: str, command: Sequence[str]) -> None:
        self._what = what
        self._output: IO[bytes] = tempfile.TemporaryFile("w+b")  # noqa: SIM115  # closed in `end`
        self._process = subprocess.Popen(
            ("nice", "-n", "19", *command), cwd=ROOT, stdout=self._output, stderr=subprocess.STDOUT
        )

    def told(self) -> int:
        """Its exit status, once it has ended and its output was printed."""
        status = self._process.wait()
        _say(f"beside them, at the lowest priority: {self._what}")
        self._output.seek(0)
        sys.stdout.write(self._output.read().decode("utf-8", "replace"))
        return status

    def end(self) -> None:
        """Where it has not ended by itself (Ctrl-C), it does now, and its workers with it."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        self._output.close()


def _say(what: str) -> None:
    print(f"== {what}", flush=True)  # this is a command


if __name__ == "__main__":
    sys.exit(main())
