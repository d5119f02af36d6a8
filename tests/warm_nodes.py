"""What simulated nodes are forks of, started without a new interpreter.

A local run's start is mostly one import of torch, in a process of its own, and tests
start hundreds of runs. The launcher of `warm.call` has torch already, so that process can be its
fork: all that `subprocess.Popen` does, with the module's run in the place of an exec. It looks like
what it stands for: its command line, environment, signals and files are those of the new
interpreter. What `helpers.begin_anew` starts, and all jobs but torch's, are new interpreters.
"""

import atexit
import ctypes
import functools
import io
import logging
import os
import runpy
import signal
import subprocess
import sys
import traceback
from pathlib import Path

from orchestrator.config.job_source import check_target
from orchestrator.config.program import is_program
from orchestrator.config.reading import read_config
from orchestrator.rundir.folder import RunDir

MODULE = "orchestrator.agent.local_nodes"
ROOM = " " * 4000
"""An argument that makes room for the command lines of forks."""


class Popen(subprocess.Popen):
    """The standard library's, but for one command."""

    def __init__(self, command, **how):
        if isinstance(command, list) and command[1:3] == ["-m", MODULE] and _is_torchs(command[3]):
            environment, keep = how.get("env"), how.get("pass_fds", ())
            how["preexec_fn"] = functools.partial(_be, command, environment, keep)
        super().__init__(command, **how)


def _is_torchs(run):
    job = read_config(RunDir(Path(run)).read_config()).job
    return not is_program(job) and check_target(job).framework == "torch"


def _be(command, environment, keep):
    """In the child, in the place of its exec: be what the command would be."""
    code = 1
    try:
        _close_all_but({0, 1, 2, *keep})
        _set_signals()
        logging.getLogger().handlers.clear()
        atexit._clear()
        os.environ.clear()
        os.environ.update(environment)
        was = sys.stdin, sys.stdout, sys.stderr  # kept, for their ends would write what they hold
        sys.stdin, sys.stdout, sys.stderr = map(_standard, range(3), ("rb", "wb", "wb"))
        sys.argv = [MODULE, *command[3:]]
        name_after([sys.executable, *command[1:]])
        sys.modules.pop(MODULE, None)
        runpy.run_module(MODULE, run_name="__main__", alter_sys=True)
        code = 0
        del was
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # it must not go on as a second launcher
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _standard(number, mode):
    """As with PYTHONUNBUFFERED, which our own processes have."""
    return io.TextIOWrapper(io.FileIO(number, mode, closefd=False), write_through=True)


def _set_signals():
    """As they are when a Python starts, whatever an exec or a launcher did to them."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)


def _close_all_but(kept):
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        if number not in kept:
            try:
                os.close(number)
            except OSError:  # it was the listing's own
                continue


def name_after(words):
    """Have the kernel tell this command line of us: it reads it where the process keeps it."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(stat[45]), int(stat[46])
    line = b"\0".join(os.fsencode(word) for word in words)[: end - begin - 1]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)
