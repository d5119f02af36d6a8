"""The address that other nodes reach, where a node's own name means 127.0.1.1."""

import json

import pytest

from orchestrator.agent.topology import (
    address_of_interface,
    interface_variables,
    own_address,
    source_towards,
)
from orchestrator.errors import UsageError
from tests.agent import networks

MEET = """
import json, os, sys
from pathlib import Path
from orchestrator.engine.api import GroupSpec
from orchestrator.agent.topology import interface_variables
from orchestrator.agent.topology import Topology

framework, folder, transport = sys.argv[1:]
who = Topology.from_env(os.environ)
os.environ.update(interface_variables(os.environ, who.address))
spec = GroupSpec(rank=who.rank, size=who.size, local_rank=who.local_rank, node=who.node,
                 address=who.address, folder=Path(folder), transport=transport, timeout_s=60)
if framework == "torch":
    import torch
    from orchestrator.engine.torch import form_group
    group, mine = form_group(spec), torch.ones(3) * (1 + who.rank)
    interface = os.environ["GLOO_SOCKET_IFNAME"]
else:
    import mindspore
    from orchestrator.engine.mindspore.group import form_group
    from orchestrator.engine.mindspore.rendezvous import ahead
    ahead(spec)
    group = form_group(spec)
    mine, interface = mindspore.ops.ones(3, mindspore.float32) * (1 + who.rank), "cable0"
group.all_reduce_sum(mine)
found = {"address": who.address, "sum": mine.tolist(), "interface": interface}
print(json.dumps(found), flush=True)
getattr(group, "close", lambda: None)()
os._exit(0)
"""


def of_slurm(index: int, **more: str) -> dict[str, str]:
    """The environment of the one rank of a node."""
    return {
        "SLURM_PROCID": str(index), "SLURM_NTASKS": "2", "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(index), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7",
        "SLURMD_NODENAME": networks.NODES[index], "SLURM_JOB_NODELIST": "left,right", **more,
    }  # fmt: skip


@pytest.mark.skipif(not networks.available(), reason="needs root, for network namespaces")
def test_nodes_whose_own_names_mean_loopback_meet_under_both_frameworks(tmp_path):
    with networks.two_nodes(tmp_path) as nodes:
        ranks = []
        for framework, transport in (("torch", "gloo"), ("mindspore", "mccl")):
            folder = tmp_path / framework
            folder.mkdir()
            for index, node in enumerate(nodes):
                env = of_slurm(index, GLOG_v="3", MS_OM_PATH=str(folder))
                rank = node.begin(MEET, framework, str(folder), transport, **env)
                ranks.append((index, rank))
        for index, rank in ranks:
            out, _ = rank.communicate(timeout=120)
            assert rank.returncode == 0, out
            expected = {
                "address": networks.ADDRESSES[index], "sum": [3.0] * 3, "interface": networks.CABLE,
            }  # fmt: skip
            assert json.loads(out.splitlines()[-1]) == expected


def test_a_nodes_loopback_is_no_way_to_another_node():
    assert source_towards("127.0.1.1") is None
    assert source_towards("not an address") is None


def test_simulated_nodes_on_one_machine_meet_on_its_loopback():
    env = {"SLURM_JOB_NODELIST": "localhost,localhost", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}
    for index in (0, 1):
        assert own_address(env, node="localhost", node_index=index, nodes=2) == "127.0.0.1"


def test_the_interface_that_is_named_decides_and_frameworks_are_told():
    env = {"ORCHESTRATOR_INTERFACE": "ib*,lo", "NCCL_SOCKET_IFNAME": "eth7"}
    address = own_address(env, node="n0", node_index=0, nodes=2)
    assert address == "127.0.0.1"
    variables = interface_variables(env, address)
    assert variables == {"GLOO_SOCKET_IFNAME": "lo", "HCCL_SOCKET_IFNAME": "lo"}
    assert interface_variables({}, address) == {"GLOO_SOCKET_IFNAME": "lo"}


def test_an_interface_that_a_node_does_not_have_is_named_with_those_it_has():
    with pytest.raises(UsageError, match=r"cluster.interface=ib0: node n3 .* it has .*lo \(127"):
        address_of_interface("ib0", "n3")
