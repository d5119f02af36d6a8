"""Who am I: read from the environment in one place, with a message when it is not there."""

import pytest

from orchestrator.agent.topology import Topology, attempt_of
from orchestrator.errors import UsageError

ENVIRONMENT = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURMD_NODENAME": "node1",
    "SLURM_JOB_ID": "77",
    "ORCHESTRATOR_NODE_ADDRESS": "127.0.1.2",
}


def test_the_variables_of_slurm_say_who_a_rank_is():
    who = Topology.from_env(ENVIRONMENT)
    assert (who.rank, who.size, who.local_rank, who.node_index, who.nodes) == (3, 4, 1, 1, 2)
    assert (who.node, who.address, who.job_id, who.restarts) == ("node1", "127.0.1.2", "77", 0)


@pytest.mark.parametrize("base", [0, 5])
def test_attempts_count_on_over_requeues_and_resubmissions(base):
    env = {**ENVIRONMENT, "SLURM_RESTART_COUNT": "2", "ORCHESTRATOR_BASE_ATTEMPT": str(base)}
    assert Topology.from_env(env).restarts == 2
    assert Topology.from_env(env).scheduled
    assert attempt_of(env) == base + 2
    assert not Topology.from_env(ENVIRONMENT).scheduled


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID"])
@pytest.mark.parametrize("value", [None, "", "x", "-1"])
def test_a_missing_or_odd_variable_is_named(name, value):
    env = {k: v for k, v in ENVIRONMENT.items() if k != name}
    if value is not None:
        env[name] = value
    with pytest.raises(UsageError, match=name):
        Topology.from_env(env)


def test_a_node_without_a_given_address_is_looked_up():
    env = {k: v for k, v in ENVIRONMENT.items() if k != "ORCHESTRATOR_NODE_ADDRESS"}
    assert Topology.from_env({**env, "SLURMD_NODENAME": "localhost"}).address == "127.0.0.1"
