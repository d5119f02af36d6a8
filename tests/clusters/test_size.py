"""Runs that are too large for this machine: a warning, or a refusal before anything starts."""

from pathlib import Path

import pytest

from orchestrator.clusters.api import cluster_of
from orchestrator.clusters.local import cluster as local
from orchestrator.config.composer import compose
from orchestrator.errors import ClusterError
from tests.refusals import mentions, refused

PLAIN = ["job=program", "job.command=[ls]", "job.style=plain"]


@pytest.mark.parametrize(
    ("nodes", "width", "free_mib", "job", "warned", "needs"),
    [
        (2, 8, 1600, ["job=digits"], "", ""),
        (3, 6, 1800, ["job=digits"], "18 ranks 2 cores cluster.ranks_per_node=5", ""),
        (
            3,
            6,
            1799,
            ["job=digits"],
            "",
            "18 ranks 1.76 GiB memory 1.76 GiB cluster.ranks_per_node=5",
        ),
        (1, 1, 0, ["job=digits"], "", ""),
        (
            2,
            1,
            100,
            ["job=program", "job.command=[ls]"],
            "",
            "2 ranks 200 MiB memory 100 MiB cluster.nodes=1",
        ),
        (2, 1, 100, PLAIN, "", ""),
        (2, 9, 100, PLAIN, "18 ranks 2 cores cluster.ranks_per_node=8", ""),
    ],
)
def test_a_run_that_is_too_large_for_this_machine(
    nodes, width, free_mib, job, warned, needs, monkeypatch, tmp_path
):
    monkeypatch.setattr(local, "cores", lambda: 2)
    monkeypatch.setattr(local, "free_memory_bytes", lambda: free_mib << 20)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shape = [f"cluster.nodes={nodes}", f"cluster.ranks_per_node={width}"]
    cluster = cluster_of(compose([*job, *shape]))
    request = cluster.request(tmp_path / "run", 0)
    if needs:
        with refused(ClusterError, needs):
            cluster.check(request)
        return
    warnings = cluster.check(request).warnings
    assert len(warnings) == bool(warned)
    assert all(mentions(warning, warned) for warning in warnings), warnings


@pytest.mark.parametrize(
    ("devices", "asked", "gpus"), [("", 2, None), ("0", 2, None), ("0,1", 2, [["0", "1"]])]
)
def test_a_program_that_asks_for_more_devices_than_there_are_is_refused(
    monkeypatch, tmp_path, devices, asked, gpus
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    shape = ["cluster.nodes=1", "cluster.ranks_per_node=1", f"cluster.gpus_per_node={asked}"]
    cluster = cluster_of(compose([*PLAIN, *shape]))
    request = cluster.request(Path("run"), 0)
    if gpus is not None:
        assert (request.details["gpus"], cluster.share.gpus) == (gpus, asked)
        cluster.check(request)
        return
    with refused(ClusterError, f"cluster.gpus_per_node=2 {int(bool(devices))}"):
        cluster.check(request)
    cluster_of(compose(["job=digits", *shape])).check(request)  # its ranks refuse CPUs
    if not devices:  # not stated, nor listed by a driver: the ranks find out
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        monkeypatch.setattr("orchestrator.machine.NVIDIA", tmp_path)
        monkeypatch.setattr("orchestrator.machine.AMD", tmp_path)
        cluster.check(request)
