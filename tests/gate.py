"""`make test`: pyright and every test on two cores (`python -m tests.gate`).

tests/slurm waits half of its time and measures times, so it runs first. Next to it, at the lowest
priority, only tests run that measure none (`tests/phases.py`). The other whole runs follow.

Each command has a session of its own: neither Ctrl-C nor the end of the terminal reaches it but
through this process, so `nohup make test` works (the tests need signals that are not ignored).
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# pytest never ends where it may replace a worker that has died.
PYTEST = (sys.executable, "-m", "pytest", "--dist", "loadfile", "--max-worker-restart=0")
SLURM = (*PYTEST, "-n", "2", "--phase=slurm", "tests")
WHOLE_RUNS = (*PYTEST, "-n", "3", "--phase=whole_runs", "tests")
LIMIT_S = 2 * 60 * 60  # half of a core each takes an hour
NICE = ("nice", "-n", "19")
PYRIGHT = (*NICE, sys.executable, "-m", "pyright", "--pythonpath", sys.executable)
# At this priority a test may stand still for a while, so its limit is longer.
OTHERS = (*NICE, *PYTEST, "-n", "2", "--timeout=1200", "--phase=others")
# Hydra 1.4 with OmegaConf 2.4, next to the pinned versions (Makefile).
HYDRA_NEXT = (
    *NICE,
    "env",
    f"PYTHONPATH={ROOT / '.venv' / 'hydra-1.4'}",
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "--timeout=1200",
    "--phase=hydra",
    "tests",
)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"not done after {LIMIT_S // 60} minutes"))
    signal.alarm(LIMIT_S)  # a deadlock in C is not ended by a test's own limit
    with ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile("w+b"))
        pyright = _start(stack, "pyright", PYRIGHT, output)
        others = _start(stack, "all other tests", OTHERS, output)
        hydra_next = _start(stack, "Hydra 1.4's", HYDRA_NEXT, output)
        _say("tests on SLURM, two workers")
        failed = [_start(stack, "tests on SLURM", SLURM).wait()]
        _say("whole runs, three workers")
        failed += [_start(stack, "whole runs", WHOLE_RUNS).wait()]
        failed += [pyright.wait(), others.wait(), hydra_next.wait()]
        _say("at the same time: pyright, all other tests, and Hydra 1.4's")
        output.seek(0)
        sys.stdout.write(output.read().decode("utf-8", "replace"))
    return int(any(failed))


def _start(stack, name, command, output=None):
    """Start a command, and print how long it took: the one that ends last decides."""
    # Each interpreter would compile anew what has changed, and each worker all tests.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=output,
        stderr=output and subprocess.STDOUT,
        start_new_session=True,
    )
    stack.callback(_end, process)
    threading.Thread(target=_time, args=(name, process), daemon=True).start()
    return process


def _time(name, process):
    began = time.monotonic()
    process.wait()
    _say(f"{name}: ended after {time.monotonic() - began:.0f} s")


def _end(process):
    """End a command that still runs because of Ctrl-C or SIGTERM, as Ctrl-C would."""
    if process.poll() is not None:
        return
    for number in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
            return


def _say(what):
    print(f"== {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
