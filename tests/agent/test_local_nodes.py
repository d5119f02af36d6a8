"""The parent of all simulated nodes: its import may hang, it may be killed or interrupted, before
there is a worker and after; and a node may be stopped.
"""

import json
import os
import signal
import subprocess
import sys

import pytest

from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.generations import GenerationRecord
from orchestrator.rundir.outcome import CANCELLED_AT_ONCE
from tests import helpers
from tests.helpers import LIGHT, LIMIT_S, SMALL, TINY, environment, until
from tests.refusals import mentions

pytestmark = [pytest.mark.whole_runs, pytest.mark.long]


@pytest.fixture
def hanging(tmp_path):
    """The environment of a machine where `import torch` never returns."""
    package = tmp_path / "modules" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import time\ntime.sleep(600)\n")
    return {"PYTHONPATH": os.pathsep.join([str(package.parent), str(helpers.ROOT)])}


def importing(run, hanging, *more):
    """A run whose framework is being imported."""
    launcher = helpers.begin(TINY, SMALL, f"run.dir={run}", *more, **hanging)
    until((run / "logs" / "node0.log").exists, what="the start of the import")
    return launcher


def test_an_import_that_hangs_ends_the_run_with_its_stack(tmp_path, hanging):
    run = tmp_path / "run"
    launcher = importing(run, hanging, "cluster.hang_timeout_s=3")
    helpers.await_exit(launcher, 1)
    culprit = helpers.result(run)["culprit"]
    assert mentions(culprit["cause"], "import framework 3 s (cluster.hang_timeout_s)")
    assert any("torch/__init__.py" in line for line in culprit["log_tail"])
    assert not helpers.processes_of(run)


def test_an_interrupt_does_not_wait_for_an_import(tmp_path, hanging):
    run = tmp_path / "run"
    launcher = importing(run, hanging)
    launcher.send_signal(signal.SIGINT)
    helpers.await_exit(launcher, 3, timeout=LIMIT_S)
    assert helpers.result(run)["state"] == "stopped"
    assert not helpers.processes_of(run)


def test_nodes_and_ranks_do_not_outlive_the_process_that_they_are_forks_of(tmp_path):
    run = tmp_path / "run"
    launcher = helpers.begin(TINY, SMALL, f"run.dir={run}", "job.pause_s=0.05", "train.updates=400")
    until(lambda: helpers.records(run), what="training")
    helpers.preloaded(run).kill()
    helpers.await_exit(launcher, 1, timeout=LIMIT_S)
    assert "SIGKILL" in helpers.result(run)["culprit"]["cause"]
    assert not helpers.processes_of(run)


def frozen_node(run, *more):
    """A run in mid-training with one stopped node, whose ranks are not stopped."""
    launcher = helpers.begin(
        LIGHT,
        SMALL,
        "cluster.nodes=3",
        "job.pause_s=0.05",
        "train.updates=4000",
        "run.survive=false",
        f"run.dir={run}",
        *more,
    )
    until(lambda: helpers.records(run), what="training")
    helpers.node_process(run, "node1").suspend()
    return launcher


def test_a_node_that_is_stopped_obeys_a_second_interrupt(tmp_path):
    launcher = frozen_node(tmp_path / "run")
    launcher.send_signal(signal.SIGINT)
    until(lambda: "once more" in (launcher.stdout.readline() or "once more"), 30, "the word")
    launcher.send_signal(signal.SIGINT)
    said = helpers.await_exit(launcher, 130, timeout=LIMIT_S)
    assert "failed" not in said
    assert not helpers.processes_of(tmp_path / "run")
    [status] = json.loads(helpers.verb("status", tmp_path / "run", "--json").stdout)
    # What ends its ranks wakes them, too: they may obey the first interrupt before they are ended.
    assert status["state"] in ("cancelled", "stopped")
    assert status["culprit"] is None
    if status["state"] == "cancelled":
        assert CANCELLED_AT_ONCE in " ".join(said.split())


@pytest.mark.parametrize("when", ["it imports", "a node is stopped"])
def test_no_process_outlives_its_launcher(tmp_path, hanging, when):
    run = tmp_path / "run"
    launcher = importing(run, hanging) if when == "it imports" else frozen_node(run)
    until(lambda: helpers.preloaded(run), what="the process that imports")
    launcher.kill()
    launcher.communicate()
    until(lambda: not helpers.processes_of(run), what="the end of all processes")


def test_a_run_does_not_wait_for_a_node_that_is_stopped(tmp_path):
    run = tmp_path / "run"
    launcher = frozen_node(run, "cluster.heartbeat_timeout_s=1")
    helpers.await_exit(launcher, 1, timeout=LIMIT_S)
    found = helpers.result(run)["culprit"]
    assert (found["rank"], found["node"]) == (None, "node1")
    assert mentions(found["cause"], "agent 2.5 s (cluster.heartbeat_timeout_s)"), found["cause"]
    assert not helpers.processes_of(run)


def surviving_nodes(run, *more):
    """A run in mid-training that survives the loss of a node after 2 s of silence."""
    survive = ("run.survive=true", "cluster.heartbeat_timeout_s=2")
    launcher = helpers.begin(TINY, SMALL, f"run.dir={run}", "job.pause_s=0.05", *survive, *more)
    until(lambda: helpers.records(run), what="training")
    return launcher


def test_a_node_that_is_stopped_is_not_started_again_once_the_run_has_ended(tmp_path):
    """Each of its processes would be killed at once, until no replacement is left: for minutes."""
    run = tmp_path / "run"
    words = ("cluster.nodes=2", "train.updates=30", "run.max_replacements=1000")
    launcher = surviving_nodes(run, *words)
    helpers.node_process(run, "node1").suspend()
    helpers.await_exit(launcher, 0, timeout=LIMIT_S)
    assert helpers.result(run)["updates"] == 30
    assert not helpers.processes_of(run)


def test_the_ranks_of_a_coordinator_that_was_stopped_come_back(tmp_path):
    run = tmp_path / "run"
    launcher = surviving_nodes(run, "cluster.nodes=3", "train.updates=100000")
    record = GenerationRecord(RunDir(run).attempt(0))
    agent = helpers.node_process(run, "node0")
    agent.suspend()
    until(lambda: record.read(1), what="the generation without its rank")
    agent.resume()
    until(lambda: len(record.newest()["members"]) == 3, what="its rank's return")
    launcher.send_signal(signal.SIGINT)
    helpers.await_exit(launcher, 3, timeout=LIMIT_S)
    assert not helpers.processes_of(run)


# ------------------------------------------------------------------ Stop signals


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
def test_a_stop_reaches_exactly_the_agents_that_live(begun, where, signals):
    done = subprocess.run(
        [sys.executable, "-c", NODES, where, str(begun.path)],
        stdout=subprocess.PIPE,
        env=environment(),
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert sorted(map(json.loads, done.stdout.splitlines())) == signals
