"""`make test`: pyright and every test, on two cores (`python -m tests.gate`).

tests/slurm waits half of its time, and holds clocks against what it sees; nothing may compete with
it. So it has the machine, and what computes without looking at a clock (`tests.order.CALM`) takes,
at the lowest priority, what it leaves. Then come whole runs, which have time limits of their own.

The lowest priority is a cgroup's where one can be made. A nice value counts among the processes of
a session only, where the kernel groups them so (autogroup), and each run has sessions of its own.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
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
    "all other tests": (*PYTEST, "-n", "2", *CALM, "orchestrator"),
}
CGROUPS = {"/sys/fs/cgroup/cpu": ("cpu.shares", "2"), "/sys/fs/cgroup": ("cpu.weight", "1")}
"""Where version 1 and version 2 have them, and a group's least share."""
ENTER = 'echo $$ >"$0/cgroup.procs" && exec nice -n 19 "$@"'


def main() -> int:
    with tempfile.TemporaryDirectory() as shared, left_over() as group:
        os.environ[SHARED] = shared
        beside = [Beside(what, command, group) for what, command in BESIDE.items()]
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


@contextlib.contextmanager
def left_over() -> Generator[Path | None]:
    """A cgroup that gets the processor time that nobody else wants; None where none can be made."""
    group = next(filter(None, map(_made, CGROUPS)), None)
    if group is None:
        _say("no cgroup can be made here: what runs beside tests/slurm has a nice value alone")
    try:
        yield group
    finally:
        if group is not None:
            with contextlib.suppress(OSError):  # a process of a test that failed is still there
                group.rmdir()


def _made(root: str) -> Path | None:
    group, (name, least) = Path(root, f"tests-{os.getpid()}"), CGROUPS[root]
    try:
        group.mkdir()
    except OSError:  # no such hierarchy, or not ours to change
        return None
    try:
        (group / name).write_text(least)
    except OSError:  # this hierarchy does not share out processors
        group.rmdir()
        return None
    return group


class Beside:
    """A command at the lowest priority, whose output is told in one piece."""

    def __init__(self, what: str, command: Sequence[str], group: Path | None) -> None:
        self._what = what
        self._output: IO[bytes] = tempfile.TemporaryFile("w+b")  # noqa: SIM115  # closed in `end`
        lowest = ("sh", "-c", ENTER, str(group)) if group else ("nice", "-n", "19")
        self._process = subprocess.Popen(
            (*lowest, *command), cwd=ROOT, stdout=self._output, stderr=subprocess.STDOUT
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
