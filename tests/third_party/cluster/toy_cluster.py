"""`cluster.kind=listed`: a list of names, whose nodes are processes of this machine."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass, field

from orchestrator.clusters.api import Cluster, Handle, State
from orchestrator.errors import ClusterError
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import read_outcome


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


class ListedHandle(Handle):
    def __init__(self, request, names):
        self._run, self._attempt, self._state = RunDir(request.run), request.attempt, State.RUNNING
        self._nodes = []
        for index in range(len(names)):
            environment = request.node_environment(index, names, f"127.0.1.{index + 1}")
            self._nodes.append(
                subprocess.Popen(request.node_command, env=environment, start_new_session=True)
            )

    def poll(self, timeout_s):
        time.sleep(timeout_s)
        if not self._state.ended and all(node.poll() is not None for node in self._nodes):
            outcome = read_outcome(self._run, self._attempt)
            self._state = outcome.state if outcome else State.FAILED
            self.culprit = outcome.culprit if outcome else None
        return self._state

    def stop(self):
        for node in self._nodes:
            node.terminate()

    def kill(self):
        for node in self._nodes:
            os.killpg(node.pid, signal.SIGKILL)  # its ranks end with it
            node.wait()
