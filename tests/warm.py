"""Commands as forks of a process that has already imported the packages they need.

Most of a command's start is the import of the same packages, and the tests start hundreds of
commands. So each pytest worker starts one process that imports them (`main`), and `call` has it
fork: the fork gets the environment, folder and arguments of the command, runs the module as
`python -m` does, and ends as an interpreter ends. `begin` does the same without waiting. Commands
with a PYTHONPATH of their own, and those of `helpers.begin_anew`, get new interpreters.

For commands that train, the process has also imported torch, so that nodes can be forks, too
(`warm_nodes.py`). `ranks` runs scripts of the documentation in the same way.
"""

import array
import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.warm_nodes import ROOM, name_after, spawn_nodes

ROOT = Path(__file__).resolve().parent.parent
PATH = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'third_party' / 'framework'}"
COMMANDS = ("orchestrator.launch", "orchestrator.__main__")
TORCH = ("torch.distributed", "torch.distributed.pipelining", "orchestrator.engine.torch.framework")
OURS = (
    "config.composer",
    "runs.start",
    "clusters.local.handle",
    "clusters.slurm.cluster",
    "report.compare",
    "runs.status",
    "runs.resume",
)
NAMES = (*COMMANDS, *(f"orchestrator.{name}" for name in OURS))
IMPORTED = {"commands": NAMES, "runs": (*NAMES, *TORCH, "orchestrator.trainer.main")}
TRAINING = ("run", "resume", "rehearse")


# ------------------------------------------------------------------------- in the tests


@functools.cache
def _server(kind):
    """Start the process that forks, once of each kind; return a socket to it."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(theirs.fileno()), kind, ROOM],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"},
        )

    def end():
        mine.close()
        process.wait()

    atexit.register(end)
    return mine


def call(module, arguments, *, cwd, env, timeout, kind=None):
    """Run `python -m MODULE ARGUMENTS`; returns like `subprocess.run` with text output."""
    kind = kind or ("runs" if _needs_torch(module, arguments) else "commands")
    words = [sys.executable, "-m", module, *arguments]
    order = {"module": module, "arguments": arguments, "cwd": str(cwd), "env": env}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid, mine = _ask(kind, order, out, err)
        with mine:
            mine.settimeout(timeout)
            try:
                status = mine.recv(64)
            except BaseException as error:  # of the test's own time-out, too
                os.kill(pid, signal.SIGKILL)
                if isinstance(error, TimeoutError):
                    raise subprocess.TimeoutExpired(words, timeout) from error
                raise
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(words, int(status), *texts)


def begin(module, arguments, *, cwd, env):
    """Start `python -m MODULE ARGUMENTS` in a session of its own, with its output in one pipe; like
    `subprocess.Popen`.
    """
    kind = "runs" if _needs_torch(module, arguments) else "commands"
    order = {"module": module, "arguments": arguments, "cwd": str(cwd), "env": env, "leads": True}
    reading, writing = os.pipe()
    with open(writing, "wb") as out:  # noqa: PTH123  # a descriptor
        pid, ended = _ask(kind, order, out, out)
    return Begun(pid, ended, open(reading))  # noqa: PTH123  # closed by `communicate`


class Begun:
    """The part of `subprocess.Popen` that tests use, for a process that is not our child."""

    def __init__(self, pid, ended, stdout):
        self.pid, self.stdout, self.returncode = pid, stdout, None
        self._ended, self._read, self._reader = ended, [], None

    def wait(self, timeout=None):
        if self.returncode is None:
            self._ended.settimeout(timeout)
            try:
                self.returncode = int(self._ended.recv(64))
            except (TimeoutError, BlockingIOError) as error:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout) from error
            self._ended.close()
        return self.returncode

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def communicate(self, timeout=None):
        if self._reader is None:
            reader = threading.Thread(target=lambda: self._read.append(self.stdout.read()))
            reader.daemon = True
            reader.start()
            self._reader = reader
        self._reader.join(timeout)
        if self._reader.is_alive():
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        self.stdout.close()
        self.wait(timeout)
        return self._read[0], None

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _ask(kind, order, out, err):
    """Have a command forked; return its process id, and the socket that reports its end."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, tempfile.TemporaryFile() as asked:
        asked.write(json.dumps(order).encode())
        asked.flush()
        files = array.array("i", [file.fileno() for file in (asked, out, err, theirs)])
        _server(kind).sendmsg([b"!"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
    return int(mine.recv(64)), mine


def _needs_torch(module, arguments):
    """Return whether the command trains on this machine with torch, or starts such a command."""
    if module in {"torch.distributed.run", "pytest"} or arguments[:1] == ["audit"]:
        return True
    trains = module == "orchestrator.launch" or arguments[:1] in ([verb] for verb in TRAINING)
    return trains and not any("slurm" in word or word.startswith("--") for word in arguments)


def ranks(module, processes, folder):
    """Return what a script of `folder` prints on so many ranks, with torchrun's variables; their
    store is in this process.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }

    def rank(number):
        env = {**os.environ, **variables, "RANK": str(number), "LOCAL_RANK": str(number)}
        return call(module, [], cwd=folder, env=env, timeout=800, kind="runs")

    _server("runs")
    with ThreadPoolExecutor(processes) as threads:
        ended = list(threads.map(rank, range(processes)))
    assert all(done.returncode == 0 for done in ended), "\n".join(d.stderr[-2000:] for d in ended)
    return "".join(done.stdout for done in ended)


# ------------------------------------------------------------------------- the process that forks


def main():
    asked = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # nothing that an import leaves is garbage
    for name in IMPORTED[sys.argv[2]]:
        importlib.import_module(name)
    gc.enable()
    for name in COMMANDS:
        sys.modules.pop(name, None)  # each fork runs it again
    _compose_once()
    gc.freeze()
    wake, waking = socket.socketpair()
    waking.setblocking(False)
    signal.set_wakeup_fd(waking.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(asked, selectors.EVENT_READ)
    selector.register(wake, selectors.EVENT_READ)
    running = {}  # pid -> where its end is reported
    while True:
        for key, _ in selector.select():
            if key.fileobj is wake:
                wake.recv(4096)
                _tell_ends(running)
                continue
            _, files, *_ = socket.recv_fds(asked, 1, 4)
            if not files:
                return
            order, out, err, ended = files
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (asked, wake, waking, selector, *running.values()):
                    other.close()
                os.close(ended)
                _become(order, out, err)
            running[pid] = socket.socket(fileno=ended)
            _say(running[pid], pid)
            for file in (order, out, err):
                os.close(file)


def _compose_once():
    """Compose once, which fills the parsers' tables and the schemas: a third of a second that each
    command would take again.
    """
    from orchestrator.config.composer import compose
    from orchestrator.config.reading import to_yaml

    to_yaml(compose(["job._target_=tests.light_job.Light", "train.seed=1"]))


def _tell_ends(running):
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with running.pop(pid) as ended:
            _say(ended, os.waitstatus_to_exitcode(status))


def _say(ended, number):
    with contextlib.suppress(BrokenPipeError):  # a test that was given up has closed it
        ended.send(b"%d" % number)


def _become(order, out, err):
    with open(order, "rb") as file:  # noqa: PTH123  # a descriptor
        file.seek(0)
        asked = json.load(file)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    sys.path[0] = asked["cwd"]
    if sys.argv[2] == "runs":
        from orchestrator.clusters.local import handle

        handle.spawn_nodes = spawn_nodes
    if asked.get("leads"):
        os.setsid()
        name_after([sys.executable, "-m", asked["module"], *asked["arguments"]])
    sys.argv = [asked["module"], *asked["arguments"]]
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    main()
