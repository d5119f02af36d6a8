"""Whether anybody asked for accelerators: what makes computing on CPUs an error."""

import pytest

from orchestrator.config.schema import ClusterConfig
from orchestrator.trainer.consistency_checks import devices_asked


@pytest.mark.parametrize(
    ("cluster", "env", "who"),
    [
        ({}, {}, ""),
        ({"gpus_per_node": 0}, {"CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"gpus_per_node": 4}, {}, "cluster.gpus_per_node=4"),
        ({"gpus_per_node": "a100:4"}, {}, "cluster.gpus_per_node=a100:4"),
        ({"slurm_flags": {"gres": "npu:8"}}, {}, "cluster.slurm_flags.gres=npu:8"),
        ({"slurm_flags": {"gres": "tmpdisk:8"}}, {}, ""),
        ({"slurm_flags": {"gpus": 16}}, {}, "cluster.slurm_flags.gpus=16"),
        ({"srun_flags": {"gpus-per-task": 1}}, {}, "cluster.srun_flags.gpus-per-task=1"),
        ({}, {"CUDA_VISIBLE_DEVICES": "0,1"}, "CUDA_VISIBLE_DEVICES=0,1"),
        ({}, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ""),
        ({}, {"ASCEND_RT_VISIBLE_DEVICES": "3"}, "ASCEND_RT_VISIBLE_DEVICES=3"),
        ({"exclusive": True}, {"SLURM_JOB_GPUS": "0,1,2,3"}, ""),  # as every whole node
        ({"exclusive": True, "gpus_per_node": 4}, {}, "cluster.gpus_per_node=4"),
        ({}, {"SLURM_STEP_GPUS": "2"}, "SLURM_STEP_GPUS=2"),
    ],
)
def test_who_asked_for_devices_is_said(cluster, env, who):
    found = devices_asked(ClusterConfig(kind="slurm", **cluster), env, scheduled=True)
    assert who in found
    assert bool(found) == bool(who)


def test_a_laptops_own_variable_asks_for_nothing():
    assert not devices_asked(ClusterConfig(), {"CUDA_VISIBLE_DEVICES": "0"}, scheduled=False)
