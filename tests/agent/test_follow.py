"""Which agent follows which, at the start."""

from orchestrator.agent.agent import Agent
from orchestrator.agent.node_spec import publish_agent, secret_of
from orchestrator.engine.common.rendezvous import listen
from orchestrator.rundir.folder import RunDir
from tests.agent.specs import node_spec


def test_an_agent_waits_for_the_first_nodes_agent_whoever_else_comes_earlier(tmp_path):
    run = RunDir(tmp_path / "run")
    run.create()
    run.begin_attempt()
    secret_of(run, 0)
    agent = Agent(node_spec(run.path, index=2))
    listeners = {index: listen("127.0.0.1") for index in (1, 0)}
    for index, listener in listeners.items():
        assert agent._up is None
        publish_agent(node_spec(run.path, index=index), listener.getsockname()[1])
        agent._follow()
    assert agent._up is not None
    assert agent._up.rank == 0
    agent._up.close()
    for listener in listeners.values():
        listener.close()
    agent._close_in_fork()
