"""What MindSpore's engine cannot do is refused before anything is queued, with what works
instead."""

import importlib.metadata

import pytest

from orchestrator.cli.start import prepare
from orchestrator.config.composer import compose
from orchestrator.config.frameworks import notes
from orchestrator.config.rules import refuse_unsupported
from orchestrator.errors import ConfigError, JobError

FRAMEWORK = (
    "job=line", "engine.style=framework", "cluster.nodes=1", "cluster.ranks_per_node=1",
    "accumulation.ragged=drop",
)  # fmt: skip


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cluster.ranks_per_node=2", "cluster.nodes=1 cluster.ranks_per_node=1"),
        ("engine.mode=pynative", "engine.mode=graph"),
        ("train.clip_norm=1.0", "engine.style=own"),
        ("accumulation.ragged=update", "accumulation.ragged=drop"),
        ("train.on_non_finite=skip", "train.on_non_finite=stop"),
        ("transport=gloo", "transport=auto"),
        ("train.precision=bfloat16", "train.precision=float32"),
    ],
)
def test_the_frameworks_own_style_is_refused_where_it_cannot_be(override, words):
    prepare(compose(FRAMEWORK))
    with pytest.raises(ConfigError, match=words):
        prepare(compose([*FRAMEWORK, override]))


def test_bfloat16_is_refused_unless_there_is_a_device_for_it():
    with pytest.raises(ConfigError, match=r"train\.precision=float16"):
        prepare(compose(["job=line", "train.precision=bfloat16"]))
    device = ["job=line", "train.precision=bfloat16", "transport=hccl"]
    refuse_unsupported(compose(device), "mindspore")
    prepare(compose(["job=line", "train.precision=float16"]))


def test_a_reproducible_reduction_is_refused():
    wanted = ["job=line", "accumulation.reduction=reproducible", "accumulation.micro_batch=8"]
    with pytest.raises(ConfigError, match="reduction=fast"):
        prepare(compose([*wanted, "accumulation.steps=null"]))


def test_mindspores_keys_are_refused_for_a_torch_job():
    with pytest.raises(ConfigError, match=r"engine\.mode is MindSpore's"):
        refuse_unsupported(compose(["engine.mode=pynative"]), "torch")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["engine.style=framework"], r"engine\.style is MindSpore's"),
        (["engine.framework=mindspore"], "is written for torch"),
        (["job=line", "engine.framework=torch"], "is written for mindspore"),
        (["transport=mccl"], "gloo"),
    ],
)
def test_a_job_written_for_the_other_engine_is_refused(overrides, words):
    with pytest.raises((ConfigError, JobError), match=words):
        prepare(compose(overrides))


def test_a_level_without_compilation_is_refused():
    with pytest.raises(ConfigError, match=r"engine\.mode=jit"):
        prepare(compose(["job=line", "engine.mode=pynative", "engine.jit_level=O1"]))


def test_the_plan_for_ascend_says_what_will_happen_there():
    config = compose(["+cluster=slurm_ascend", "job=line"])
    assert config.transport == "hccl"
    told = " ".join(notes(config, "mindspore"))
    for words in ("no rank table", "local rank (0 to 7)", "without CANN", "waits 600 s"):
        assert words in told
    assert "torch_npu" in " ".join(notes(compose(["+cluster=slurm_ascend"]), "torch"))
    assert notes(compose([]), "torch") == []


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ({}, r"not installed; pip install 'cluster-orchestrator\[mindspore\]'"),
        ({"mindspore": "2.7.0", "numpy": "1.26.4"}, r"MindSpore 2\.7\.0 is installed, but 2\.10"),
        ({"mindspore": "2.10.0", "numpy": "2.4.1"}, r"NumPy 2\.4\.1 .* pip install 'numpy<2'"),
    ],
)
def test_a_mindspore_that_cannot_work_is_refused(monkeypatch, installed, words):
    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(JobError, match=words):
        prepare(compose(["job=line"]))
    prepare(compose(["job=line", "+cluster=slurm"]))  # the login node may have none
