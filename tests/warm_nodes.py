"""What simulated nodes are forks of, started without a new interpreter.

A local run's start is mostly one import of torch, in a process of its own, and tests
start hundreds of runs. The launcher of `warm.call` has torch already, so that process can be its
fork: all that `subprocess.Popen` does, with the module's run in the place of an exec. It looks like
what it stands for: its command line, environment, signals and files are those of the new
interpreter. What `helpers.begin_anew` starts, and all jobs but torch's, are new interpreters.
"""

import ctypes
import functools
import logging
import os
import subprocess
import sys
from pathlib import Path

from orchestrator.agent.local_nodes import become
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
    logging.getLogger().handlers.clear()
    name_after([sys.executable, *command[1:]])
    become(environment, keep)


def name_after(words):
    """Have the kernel tell this command line of us: it reads it where the process keeps it."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(stat[45]), int(stat[46])
    line = b"\0".join(os.fsencode(word) for word in words)[: end - begin - 1]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)
