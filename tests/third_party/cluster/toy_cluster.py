"""`cluster.kind=listed`: a list of names, whose ranks are processes of this machine."""

import ctypes
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field

from orchestrator.agent.root_cause import End, blame, failures_among
from orchestrator.clusters.api import Cluster, Handle, State
from orchestrator.errors import EXIT_STOPPED, ClusterError
from orchestrator.rundir.folder import RunDir


@dataclass
class Options:
    names: list[str] = field(default_factory=list)


class ListedCluster(Cluster):
    Options = Options

    def request(self, run, attempt):
        asked, names = super().request(run, attempt), self.options.names
        if asked.nodes != len(names):
            raise ClusterError(f"cluster.nodes={asked.nodes}, but cluster.options.names={names}")
        return asked

    def submit(self, request):
        return ListedHandle(request, self.options.names)


def at_birth():
    """A rank ends with its launcher, and keeps a SIGTERM until it has a handler for it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


class ListedHandle(Handle):
    def __init__(self, request, names):
        self._run, self._attempt = RunDir(request.run), request.attempt
        self._ends, self._state = {}, State.RUNNING
        self._nodes = [name for name in names for _ in range(request.ranks_per_node)]
        places = [request.rank_environment(n, names, "127.0.0.1") for n in range(request.ranks)]
        how = {"stdin": subprocess.DEVNULL, "start_new_session": True, "preexec_fn": at_birth}
        self._ranks = [subprocess.Popen(request.rank_command, env=env, **how) for env in places]

    def poll(self, timeout_s):
        if not self._state.ended:
            time.sleep(timeout_s)
            self._state = self._look()
        return self._state

    def stop(self):
        for process in self._ranks:
            process.terminate()

    def kill(self):
        for process in self._ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
                process.wait()

    def _look(self):
        for rank, process in enumerate(self._ranks):
            if rank not in self._ends and (status := process.poll()) is not None:
                node = self._nodes[rank]
                self._ends[rank] = End(time=time.time(), node=node, rank=rank, status=status)
        failed = failures_among(self._run, self._attempt, self._ends.values())
        if failed and time.time() > failed[0].time + 1.0:  # the others have said why, too
            self.kill()
        elif len(self._ends) < len(self._ranks):
            return State.RUNNING
        if failed:
            self.culprit = blame(self._run, self._run.failures(self._attempt), failed)
            return State.FAILED
        stopped = any(end.status == EXIT_STOPPED for end in self._ends.values())
        return State.STOPPED if stopped else State.FINISHED
