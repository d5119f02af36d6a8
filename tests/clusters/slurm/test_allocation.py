"""An allocation that a run is to start in, as the variables of its shell tell. Without SLURM."""

import pytest

from orchestrator.clusters.api import cluster_of
from orchestrator.config.composer import compose
from orchestrator.errors import ClusterError

SHELL = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}


@pytest.mark.parametrize(
    ("shell", "asked", "said"),
    [
        (
            {},
            "nodes=2",
            r"is not set\); begin one: salloc --nodes=2 .* --cpus-per-task=6; or leave",
        ),
        (SHELL, "nodes=4", "cluster.nodes=4, but job 7 has 3 nodes; try cluster.nodes=3, or begin"),
        (SHELL, "nodes=2", None),
        ({"SLURM_JOB_ID": "7"}, "nodes=9", None),  # srun knows the rest
    ],
)
def test_what_the_allocation_does_not_have_is_refused(monkeypatch, shell, asked, said):
    for name in SHELL:
        monkeypatch.delenv(name, raising=False)
    for name, value in shell.items():
        monkeypatch.setenv(name, value)
    base = (
        "+cluster=slurm", "cluster.allocation=current", "cluster.nodes=2",
        "cluster.cpus_per_rank=2",
    )  # fmt: skip
    cluster = cluster_of(compose([*base, "cluster.ranks_per_node=3", f"cluster.{asked}"]))
    if said is None:
        assert cluster.check(None).message == "starts at once in job 7"
        return
    with pytest.raises(ClusterError, match=said):
        cluster.check(None)
