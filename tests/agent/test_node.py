"""The spec of a node that a scheduler starts."""

import pytest

from orchestrator.agent.node import node_spec
from orchestrator.config.reading import read_config
from orchestrator.rundir.folder import RunDir

ENVIRONMENT = {
    "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "4", "SLURM_NODEID": "1", "SLURM_JOB_ID": "7",
    "SLURMD_NODENAME": "n2", "SLURM_JOB_NODELIST": "n1,n2",
    "ORCHESTRATOR_NODE_ADDRESS": "10.0.0.2",
}  # fmt: skip


@pytest.mark.parametrize(
    ("job", "stated", "survive"),
    [
        ("tests.light_job.Light", None, False),  # its engine does not say that it can
        ("tests.tiny_job.Tiny", None, True),
        ("tests.tiny_job.Tiny", False, False),
        ("tests.tiny_job.Nobody", None, False),
    ],
)
def test_agents_survive_losses_where_their_workers_plan_to(tmp_path, job, stated, survive):
    config = read_config(
        {
            "job": {"_target_": job},
            "cluster": {"kind": "slurm", "nodes": 2, "ranks_per_node": 2},
            "run": {"survive": stated},
        }
    )
    spec = node_spec(RunDir(tmp_path), 0, config, ENVIRONMENT)
    assert (spec.name, spec.index, spec.nodes, spec.ranks) == ("n2", 1, 2, 4)
    assert spec.survive is survive
    assert spec.replacements == (16 if survive else 0)
    assert spec.silence_s == (5.0 if survive else 20.0)
