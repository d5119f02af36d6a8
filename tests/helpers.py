"""Start the real commands and read what they write."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from slurm.polling import first_true
from tests import warm

ROOT = warm.ROOT
TINY = "job._target_=tests.tiny_job.Tiny"
LIGHT = "job._target_=tests.light_job.Light"  # the same without torch, which takes long to start
SMALL = "cluster.ranks_per_node=1"  # two ranks instead of four, where their number does not matter
LIMIT_S = 800.0
"""No test waits longer for what a slow machine does in its own time; less than pytest's limit."""
STARTED = []
"""Processes of `begin`, which `end_started` ends where a test has failed before it could."""


def environment(**extra):
    """Return a user's environment in which the checkout can be imported."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    return {**env, "PYTHONPATH": warm.PATH, "COLUMNS": "100", **extra}


def command(*arguments, module="orchestrator.launch"):
    return [sys.executable, "-m", module, *map(str, arguments)]


def call(*arguments, module="orchestrator.launch", cwd=None, timeout=LIMIT_S, code=None, **env):
    """Run a command to its end and return the completed process with text output.

    Args:
        code: the exit code that the command must have, if one is given.
    """
    where = {"cwd": cwd or Path.cwd(), "env": environment(**env), "timeout": timeout}
    if "PYTHONPATH" in env:
        words = command(*arguments, module=module)
        done = subprocess.run(words, **where, capture_output=True, text=True, check=False)
    else:
        done = warm.call(module, [*map(str, arguments)], **where)
    assert code in (None, done.returncode), f"{done.returncode}: {done.stdout}{done.stderr}"
    return done


def verb(*arguments, **more):
    return call(*arguments, module="orchestrator", **more)


def begin(*arguments, module="orchestrator.launch", cwd=None, **env):
    """Start a command and leave it running; its output goes to the returned process's pipe."""
    if "PYTHONPATH" not in env:
        where = {"cwd": cwd or Path.cwd(), "env": environment(**env)}
        STARTED.append(warm.begin(module, [*map(str, arguments)], **where))
        return STARTED[-1]
    return begin_anew(*arguments, module=module, cwd=cwd, **env)


def begin_anew(*arguments, module="orchestrator.launch", cwd=None, **env):
    """Start a command in a new interpreter, for tests of the start itself."""
    process = subprocess.Popen(
        command(*arguments, module=module),
        cwd=cwd,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    STARTED.append(process)
    return process


def await_exit(process, code, timeout=LIMIT_S):
    """Wait for the end of a process of `begin`, check its exit code and return its output."""
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == code, output
    return output


def end_started(first=0):
    """End the processes that `begin` has started from number `first` on and close their pipes, so
    that a test that fails leaves nothing to the next one.
    """
    for process in STARTED[first:]:
        if process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
        process.stdout.close()
    del STARTED[first:]


def run_python(source, *arguments, cwd=None, **env):
    """Run Python source in a new interpreter, without a module of the tests around it.

    Returns the completed process with text output. The test fails unless it exits with 0.
    """
    done = subprocess.run(
        [sys.executable, "-c", source, *map(str, arguments)],
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
    return done


def git(folder, *arguments):
    """Run git in a folder and return its output without white space at the ends."""
    own = ("-c", "user.name=A Tester", "-c", "user.email=tester@localhost")
    done = subprocess.run(
        ["git", *own, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit(folder):
    """Commit everything in a folder, which becomes a repository; return the commit's name."""
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "as it is")
    return git(folder, "rev-parse", "HEAD")


def until(condition, timeout_s=LIMIT_S, what="the condition"):
    """Poll until `condition()` is true; give its value. Fails the test after `timeout_s`."""
    if value := first_true(condition, seconds=timeout_s):
        return value
    raise AssertionError(f"{what} did not come true within {timeout_s} s")


def result(run):
    return json.loads((Path(run) / "result.json").read_text())


def contents(run):
    """Return a run's files by path; of folders the names alone. Its lock is of who holds it."""
    paths = [path for path in run.rglob("*") if path.name != ".lock"]
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


def records(run):
    """Return the complete updates of metrics.jsonl, in the order of writing."""
    path = Path(run) / "metrics.jsonl"
    if not path.exists():
        return []
    lines = [line for line in path.read_text().split("\n")[:-1] if line]
    return [r for line in lines if "loss" in (r := json.loads(line))]


def processes_of(run):
    """Return the live processes whose command line names the run folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(run) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def preloaded(run):
    """Return the process that a local run's nodes are forks of, None before it exists."""
    word = "orchestrator.agent.local_nodes"
    named = [p for p in processes_of(run) if word in p.cmdline()]
    return next((p for p in named if not name_of(p).startswith(("node", "rank"))), None)


def node_process(run, name):
    """Return the process of a node or a rank of a run by its name, None before it exists."""
    return next((p for p in processes_of(run) if name_of(p) == name), None)


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def rank_pid(run, rank):
    """Return the process of one rank of a local run, not the workers that it has forked."""
    for process in processes_of(run):
        if name_of(process) == f"rank {rank}" and name_of(process.parent()).startswith("node"):
            return process.pid
    return None


def name_of(process):
    """Return the kernel's name of a process, "" if it has ended."""
    try:
        return process.name() if process else ""
    except psutil.NoSuchProcess:
        return ""


def compare(a, b):
    return json.loads(verb("compare", a, b, "--json", code=0).stdout)
