"""Stop signals that come while the agents' parent forks an agent, or collects one that ended."""

import json
import subprocess
import sys

import pytest

from orchestrator.rundir.folder import RunDir
from tests.helpers import environment

NODES = """
import json, os, signal, sys
from pathlib import Path
from orchestrator.agent import local_nodes
from orchestrator.agent.processes import exit_with
from orchestrator.agent.workers import STOP_SIGNALS
from tests.agent.specs import node_spec

def stop():
    os.kill(os.getpid(), signal.SIGTERM)

def stops_after_fork():
    pid = fork_session()
    if not pid:
        stop()
    return pid

def stops_after_waitpid(*how):
    found = waitpid(*how)
    if found[0]:
        stop()
    return found

class Agent:
    def __init__(self, spec):
        self.index = spec.index

    def serve(self):
        waits = where == "fork" or self.index
        got = signal.sigwait(STOP_SIGNALS) if waits else None  # they are blocked until here
        print(json.dumps([self.index, got]), file=out, flush=True)

where, out = sys.argv[1], os.fdopen(os.dup(1), "w")
fork_session, waitpid = local_nodes.fork_session, os.waitpid
if where == "fork":
    local_nodes.fork_session = stops_after_fork
else:
    os.waitpid = stops_after_waitpid
specs = [node_spec(Path(sys.argv[2]), nodes=2, index=index) for index in (0, 1)]
exit_with(lambda: local_nodes.NodeProcesses(specs, [{}, {}], Agent).serve() or 0)
"""


@pytest.mark.parametrize(
    ("where", "signals"), [("fork", [[0, 15], [1, 15]]), ("waitpid", [[0, None], [1, 15]])]
)
def test_a_stop_reaches_exactly_the_agents_that_live(tmp_path, where, signals):
    run = RunDir(tmp_path / "run")
    run.create()
    run.begin_attempt()
    done = subprocess.run(
        [sys.executable, "-c", NODES, where, str(run.path)],
        stdout=subprocess.PIPE, env=environment(), text=True, timeout=20, check=True,
    )  # fmt: skip
    assert sorted(map(json.loads, done.stdout.splitlines())) == signals
