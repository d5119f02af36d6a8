"""Environment of a program, and settings that request accelerators."""

import pytest

from orchestrator.config.schema import ClusterConfig
from orchestrator.errors import ClusterError
from orchestrator.trainer.environment import device_request, lacking_devices
from tests.trainer.program_variables import variables_of


@pytest.mark.parametrize(
    ("env", "style", "variable", "seen", "number"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2, 5"}, "torch", "CUDA_VISIBLE_DEVICES", "5", "LOCAL_RANK"),
        ({"HIP_VISIBLE_DEVICES": "0,1"}, "torch", "HIP_VISIBLE_DEVICES", "1", "LOCAL_RANK"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, "plain", "CUDA_VISIBLE_DEVICES", "GPU-b", None),
        ({}, "torch", "CUDA_VISIBLE_DEVICES", "1", "LOCAL_RANK"),
    ],
)
def test_a_rank_that_has_its_own_device_sees_no_other(run, env, style, variable, seen, number):
    found = variables_of(run, env, style=style)
    assert found[variable] == seen
    assert number is None or found[number] == "0"
    assert variables_of(run, env, style=style, devices="node").get(variable) == env.get(variable)


@pytest.mark.parametrize("devices", ["0", ""])
def test_a_node_with_fewer_devices_than_ranks_is_refused(run, devices):
    with pytest.raises(ClusterError, match=r"ask for more by cluster\.gpus_per_node"):
        variables_of(run, {"CUDA_VISIBLE_DEVICES": devices}, style="torch")


@pytest.mark.parametrize(
    ("cluster", "env", "who"),
    [
        ({}, {}, ""),
        ({"gpus_per_node": 0}, {"CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"gpus_per_node": 4}, {}, "cluster.gpus_per_node=4"),
        ({"slurm_flags": {"gres": "npu:8"}}, {}, "cluster.slurm_flags.gres=npu:8"),
        ({"slurm_flags": {"gres": "tmpdisk:8"}}, {}, ""),
        ({"slurm_flags": {"gpus": 16}}, {}, "cluster.slurm_flags.gpus=16"),
        ({"srun_flags": {"gpus-per-task": 1}}, {}, "cluster.srun_flags.gpus-per-task=1"),
        ({}, {"CUDA_VISIBLE_DEVICES": "0,1"}, "CUDA_VISIBLE_DEVICES=0,1"),
        ({}, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ""),
        ({}, {"ASCEND_RT_VISIBLE_DEVICES": "3"}, "ASCEND_RT_VISIBLE_DEVICES=3"),
        ({"exclusive": True}, {"SLURM_JOB_GPUS": "0,1,2,3"}, ""),  # as every whole node
        ({"exclusive": "user"}, {"SLURM_JOB_GPUS": "0"}, "SLURM_JOB_GPUS=0"),  # a part of a node
        ({"exclusive": True, "gpus_per_node": 4}, {}, "cluster.gpus_per_node=4"),
        ({}, {"SLURM_STEP_GPUS": "2"}, "SLURM_STEP_GPUS=2"),
    ],
)
def test_who_asked_for_devices_is_said(cluster, env, who):
    found = device_request(ClusterConfig(kind="slurm", **cluster), env, scheduled=True)
    assert who in found
    assert bool(found) == bool(who)


def test_a_laptops_own_variable_asks_for_nothing():
    assert not device_request(ClusterConfig(), {"CUDA_VISIBLE_DEVICES": "0"}, scheduled=False)


@pytest.mark.parametrize(
    ("requested", "env", "sentence"),
    [
        (2, {"CUDA_VISIBLE_DEVICES": ""}, "it has 0 of the 2 devices"),
        (2, {"CUDA_VISIBLE_DEVICES": "0,1"}, ""),
        (2, {"ASCEND_RT_VISIBLE_DEVICES": "0"}, "it has 1 of the 2 devices"),
        # No driver lists any, as on WSL2 or a Jetson, which have one.
        (1, {}, "it is not known how many it has"),
        (None, {}, ""),
    ],
)
def test_a_program_is_warned_of_devices_that_its_node_lacks_or_may_lack(
    monkeypatch, tmp_path, requested, env, sentence
):
    monkeypatch.setattr("orchestrator.machine.NVIDIA", tmp_path)
    monkeypatch.setattr("orchestrator.machine.AMD", tmp_path)
    warning = lacking_devices(ClusterConfig(gpus_per_node=requested), env)
    assert sentence in warning
    assert bool(warning) == bool(sentence)
