"""GPUs of this machine: shared out to ranks, or left unused, which is said."""

import pytest

from orchestrator import machine
from orchestrator.clusters.api import cluster_of
from orchestrator.clusters.local.environment import build_environment
from orchestrator.config.composer import compose
from orchestrator.errors import TransportError


@pytest.mark.parametrize(
    ("visible", "overrides", "shared", "warning"),
    [
        ("", [], None, ""),
        ("0", [], [[], []], "so its GPU stays unused: cluster.nodes=1 cluster.ranks_per_node=1"),
        ("4,5", [], [[], []], "its 2 GPUs stay unused: cluster.nodes=1 cluster.ranks_per_node=2"),
        ("4,5", ["transport=gloo"], [[], []], ""),
        ("4,5", ["cluster.nodes=1"], [["4", "5"]], ""),
        ("0,1,2,3,4", [], [["0", "1"], ["2", "3"]], ""),
        ("4,5", ["transport=nccl"], [["4", "5"]] * 2, "nodes share GPUs 4, 5, and NCCL"),
    ],
)
def test_gpus_are_shared_out_or_their_idleness_is_said(
    visible, overrides, shared, warning, monkeypatch, tmp_path
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cluster = cluster_of(compose(["job=digits", *overrides]))
    request = cluster.request(tmp_path / "run", 0)
    assert request.details["gpus"] == shared
    warnings = cluster.check(request).warnings
    assert len(warnings) == bool(warning)
    assert warning in "".join(warnings)


@pytest.mark.parametrize(
    ("visible", "overrides", "line"),
    [
        ("", [], "a lost rank or node does not end the run"),
        ("0", [], "a lost rank or node does not end the run"),
        ("0,1,2,3", [], "a lost rank ends the run: over NCCL"),
        ("0,1,2,3", ["transport=gloo"], "a lost rank or node does not end the run"),
        ("0,1,2,3", ["run.survive=true"], "a lost rank or node does not end the run"),
        ("0,1,2,3", ["run.survive=false"], ""),
    ],
)
def test_what_a_lost_rank_means_is_said_for_the_transport_that_gpus_will_use(
    visible, overrides, line, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = cluster_of(compose(["job=digits", *overrides])).survival_line
    assert found.startswith(line)
    assert bool(found) == bool(line)


@pytest.mark.parametrize(("visible", "hosts"), [("4", ["node0", "node1"]), ("4,5", [None] * 2)])
def test_nodes_that_share_a_gpu_are_hosts_of_their_own(visible, hosts, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cluster = cluster_of(compose(["job=digits", "cluster.ranks_per_node=1", "transport=nccl"]))
    request = cluster.request(tmp_path / "run", 0)
    found = [build_environment(request, index, ("node0", "node1")) for index in range(2)]
    assert [one.get("NCCL_HOSTID") for one in found] == hosts
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == [visible[0], visible[-1]]
    assert {one.get("NCCL_SOCKET_IFNAME") for one in found} == {"lo" if hosts[0] else None}
    assert cluster.share.gpus == len(visible.split(","))  # of which a sweep gives none to others


@pytest.mark.parametrize("variable", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_nodes_get_their_gpus_by_the_variable_that_states_them(variable, monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv(variable, "2,3")
    request = cluster_of(compose(["job=digits", "cluster.ranks_per_node=1"])).request(tmp_path, 0)
    found = [build_environment(request, index, ("node0", "node1")) for index in range(2)]
    assert [one[variable] for one in found] == ["2", "3"]
    assert not any("CUDA_VISIBLE_DEVICES" in one for one in found)


def test_a_node_with_too_few_gpus_for_its_ranks_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    config = compose(["job=digits", "cluster.ranks_per_node=2", "transport=nccl"])
    with pytest.raises(TransportError, match="each of the 2 ranks of a node, but this machine has"):
        cluster_of(config).refuse("torch")


def test_gpus_of_amd_are_counted_without_the_processors_in_the_drivers_list(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "AMD", tmp_path)
    for number, gpu in enumerate(("0", "48213", "1022")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "gpu_id").write_text(f"{gpu}\n")
    assert machine.visible_gpus({}) == ["0", "1"]
    assert machine.visible_gpus({"HIP_VISIBLE_DEVICES": "1"}) == ["1"]
    for none in ("", "-1", "NoDevFiles"):
        assert machine.visible_gpus({"CUDA_VISIBLE_DEVICES": none}) == []
