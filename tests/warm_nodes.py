"""Forks as parents of simulated nodes, in place of new interpreters.

Most of a local run's start is one import of torch in a process of its own, and the tests start
hundreds of runs. The launcher of `warm.call` has imported torch, so that process can be its fork,
as in a sweep. The fork looks like the new interpreter: its command line, environment, signals and
files are the same. A rank of an audited script is a fork, too, and runs the script in place of its
exec. Runs of `helpers.begin_anew`, other programs and MindSpore's jobs get new interpreters.
"""

import ctypes
import functools
import logging
import os
import runpy
import sys
import traceback
from pathlib import Path

from orchestrator.agent import local_nodes
from orchestrator.agent.processes import fork
from orchestrator.config.job_source import check_target
from orchestrator.config.program import is_program
from orchestrator.config.reading import read_config
from orchestrator.rundir.folder import RunDir

OBSERVER = "orchestrator.audit"
ROOM = " " * 4000
"""An argument that makes room for the command lines of forks."""


def spawn_nodes(run, environment, standard, keep):
    """Start the parent of a run's nodes, as `local_nodes.spawn_nodes` does."""
    if not _has_torch(run):
        return local_nodes.spawn_nodes(run, environment, standard, keep)
    return fork(functools.partial(_be, run, environment, standard, keep))


def _has_torch(run):
    """Return whether a run's nodes may have imported torch."""
    job = read_config(RunDir(run).read_config()).job
    if is_program(job):
        return OBSERVER in job["command"]
    return check_target(job["_target_"]).framework in ("torch", "numpy")


def _be(run, environment, standard, keep):
    """Become the process that `local_nodes.spawn_nodes` would start. In the child."""
    logging.getLogger().handlers.clear()
    name_after([sys.executable, "-m", "orchestrator.agent.local_nodes", str(run)])
    os.execvpe = _observe
    return local_nodes.become(environment, standard, keep)


def _observe(_, argv, environment):
    """Run an observed script to its end, in place of the exec of it. In a rank."""
    module, *sys.argv[1:] = argv[argv.index("-m") + 1 :]
    os.environ.clear()
    os.environ.update(environment)
    status = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:  # noqa: BLE001  # as the interpreter does at its end
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def name_after(words):
    """Set the command line of this process, in the memory from which the kernel reads it."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(stat[45]), int(stat[46])
    line = b"\0".join(os.fsencode(word) for word in words)[: end - begin - 1]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)
