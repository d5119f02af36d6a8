"""Ranks and nodes as the environment tells them, and the address that other nodes reach."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from orchestrator.agent.node import node_spec
from orchestrator.agent.topology import (
    Topology,
    address_of_interface,
    attempt_of,
    interface_variables,
    own_address,
    source_towards,
)
from orchestrator.config.reading import read_config
from orchestrator.errors import UsageError
from orchestrator.plugins import FRAMEWORKS
from orchestrator.rundir.folder import RunDir
from tests.helpers import LIMIT_S, environment
from tests.refusals import refused

pytestmark = pytest.mark.whole_runs

ENVIRONMENT = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURMD_NODENAME": "node1",
    "SLURM_JOB_NODELIST": "node0,node1",
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


@pytest.mark.parametrize(
    ("job", "survive"),
    [("tests.tiny_job.Tiny", True), ("tests.tiny_job.Nobody", False)],  # which cannot be imported
)
def test_agents_survive_losses_where_their_workers_plan_to(tmp_path, job, survive):
    config = read_config(
        {
            "job": {"_target_": job},
            "cluster": {"kind": "slurm", "nodes": 2, "ranks_per_node": 2},
        }
    )
    spec = node_spec(RunDir(tmp_path), 0, config, ENVIRONMENT)
    assert (spec.name, spec.index, spec.nodes, spec.ranks) == ("node1", 1, 2, 4)
    assert spec.survive is survive
    assert spec.replacements == (16 if survive else 0)
    assert spec.silence_s == (5.0 if survive else 20.0)


# ------------------------------------------------------------------ Two nodes without a network
# Two network namespaces of the kernel, with a cable between them.


NODES = ("left", "right")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLE = "cable0"
# As Debian's and Ubuntu's installer writes it: a node's own name means its loopback.
HOSTS = "127.0.0.1 localhost\n127.0.1.1 {own}\n{address} {other}\n"


def available():
    """Return whether this machine allows new namespaces."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "nsenter", "mount"))):
        return False
    return subprocess.run(["unshare", "-n", "-m", "true"], check=False).returncode == 0


class Node:
    """A machine of its own, as far as names and networks go: a process that holds namespaces."""

    def __init__(self, index, folder):
        self.name, other = NODES[index], NODES[1 - index]
        hosts = folder / f"hosts-{self.name}"
        hosts.write_text(HOSTS.format(own=self.name, address=ADDRESSES[1 - index], other=other))
        self.holder = subprocess.Popen(
            [
                "unshare",
                "--net",
                "--mount",
                "--uts",
                "sh",
                "-c",
                (
                    f"hostname {self.name} && mount --bind {hosts} /etc/hosts && echo ready && "
                    f"sleep 900"
                ),
            ],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.holder.stdout.readline() == "ready\n"

    def command(self, *words):
        return ["nsenter", "-t", str(self.holder.pid), "--net", "--mount", "--uts", *words]

    def begin(self, code, *arguments, **env):
        """Start Python on this node."""
        return subprocess.Popen(
            self.command(sys.executable, "-c", code, *arguments),
            env=environment(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@contextlib.contextmanager
def two_nodes(folder):
    nodes = Node(0, folder), Node(1, folder)
    try:
        pids = [str(node.holder.pid) for node in nodes]
        ends = (
            "name",
            CABLE,
            "netns",
            pids[0],
            "type",
            "veth",
            "peer",
            "name",
            CABLE,
            "netns",
            pids[1],
        )
        subprocess.run(["ip", "link", "add", *ends], check=True)
        for node, address in zip(nodes, ADDRESSES, strict=True):
            named = f"addr add {address}/24 dev {CABLE}"
            for words in (named, f"link set {CABLE} up", "link set lo up"):
                subprocess.run(node.command("ip", *words.split()), check=True)
        yield nodes
    finally:
        for node in nodes:  # the namespaces, and the cable with them, go with their last process
            os.killpg(node.holder.pid, signal.SIGKILL)
            node.holder.communicate()


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
else:
    import mindspore
    from orchestrator.engine.mindspore.group import form_group
    from orchestrator.engine.mindspore.rendezvous import ahead
    ahead(spec)
    group = form_group(spec)
    mine = mindspore.ops.ones(3, mindspore.float32) * (1 + who.rank)
group.all_reduce_sum(mine)
told = os.environ["GLOO_SOCKET_IFNAME"]
print(json.dumps([who.address, mine.tolist(), told]), flush=True)
getattr(group, "close", lambda: None)()
os._exit(0)
"""


@pytest.mark.skipif(not available(), reason="needs root, for network namespaces")
def test_nodes_whose_own_names_mean_loopback_meet_under_each_framework(tmp_path):
    with two_nodes(tmp_path) as nodes:
        ranks = []
        for framework, transport in (("torch", "gloo"), ("mindspore", "mccl")):
            if FRAMEWORKS.refusal(framework):  # MindSpore's engine is an add-on
                continue
            folder = tmp_path / framework
            folder.mkdir()
            for index, node in enumerate(nodes):
                env = {
                    "SLURM_PROCID": str(index),
                    "SLURM_NTASKS": "2",
                    "SLURM_LOCALID": "0",
                    "SLURM_NODEID": str(index),
                    "SLURM_JOB_NUM_NODES": "2",
                    "SLURM_JOB_ID": "7",
                    "SLURMD_NODENAME": NODES[index],
                    "SLURM_JOB_NODELIST": "left,right",
                    "GLOG_v": "3",
                    "MS_OM_PATH": str(folder),
                }
                rank = node.begin(MEET, framework, str(folder), transport, **env)
                ranks.append((index, rank))
        for index, rank in ranks:
            out, _ = rank.communicate(timeout=LIMIT_S)
            assert rank.returncode == 0, out
            assert json.loads(out.splitlines()[-1]) == [ADDRESSES[index], [3.0] * 3, CABLE]


def test_loopback_is_no_way_to_another_node_but_of_nodes_on_one_machine():
    assert source_towards("127.0.1.1") is None
    assert source_towards("not an address") is None
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
    with refused(UsageError, "cluster.interface=ib0 node n3 lo (127.0.0.1)"):
        address_of_interface("ib0", "n3")
