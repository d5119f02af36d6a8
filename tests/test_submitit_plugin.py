"""The submitit plug-in: several runs of one array, and the address of a job's first node."""

import os
import threading

from orchestrator import submitit_plugin
from orchestrator.agent.node_spec import publish_agent
from orchestrator.errors import ClusterError
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.program_link import ATTEMPT, RUN
from tests.agent.specs import node_spec


def test_a_run_that_cannot_be_cancelled_leaves_no_other_one_queued(tmp_path, monkeypatch, capsys):
    codes, cancelled = iter((0, 0, 2)), []

    def cancel(run, *, now):
        cancelled.append((run.path.name, now))
        if run.path.name == "a":
            raise ClusterError("the scheduler does not answer")

    monkeypatch.setattr("orchestrator.launch.main", lambda _: next(codes))
    monkeypatch.setattr("orchestrator.cli.status.cancel", cancel)
    runs = [tmp_path / name for name in "abc"]
    assert submitit_plugin.queue(tmp_path, runs, ["cluster=slurm"]) == 2
    assert cancelled == [("a", True), ("b", True)]
    assert "the scheduler does not answer" in capsys.readouterr().err


def test_a_rank_that_begins_before_the_first_nodes_agent_waits_for_its_address(
    tmp_path, monkeypatch
):
    run = RunDir(tmp_path)
    run.attempt(0).mkdir(parents=True)
    for name, value in ((RUN, tmp_path), (ATTEMPT, 0), ("SLURM_JOB_NODELIST", "nowhere[0-1]")):
        monkeypatch.setenv(name, str(value))
    later = threading.Timer(0.3, publish_agent, (node_spec(tmp_path), 1))
    later.start()
    submitit_plugin._name_first_node()
    later.join()
    assert os.environ["SLURM_JOB_NODELIST"] == "127.0.0.1,nowhere1"
