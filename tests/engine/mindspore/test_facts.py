"""What is known of MindSpore without importing it: limits, survival, msrun's variables."""

from orchestrator.clusters.api import cluster_of
from orchestrator.config.composer import compose
from orchestrator.config.rules import OFF, planned_survival, refuse_unsupported
from orchestrator.errors import ConfigError
from orchestrator.plan.wire import Wire
from orchestrator.runs.start import prepare
from tests.helpers import run_python
from tests.plan.stated import make_plan
from tests.refusals import refused
from tests.trainer.program_variables import variables_of

JOB = "job=digits_mindspore"


def test_a_setting_that_its_engine_lacks_is_refused_before_the_start():
    with refused(ConfigError, "engine.shard_optimizer=true mindspore"):
        prepare(compose([JOB, "engine.shard_optimizer=true"]))
    prepare(compose([JOB, "optimizer=adam"]))


def test_its_ranks_do_not_survive_others():
    with refused(ConfigError, "run.survive=true MindSpore run.max_restarts=3"):
        refuse_unsupported(compose([JOB, "run.survive=true"]), "mindspore")
    on, reason = planned_survival(compose([JOB, "cluster.nodes=2"]))
    assert not on
    assert reason.startswith(OFF)
    assert "run.max_restarts=3" in reason


def test_a_coupled_loss_is_refused():
    with refused(ConfigError, "embed() loss_of_embeddings() torch"):
        refuse_unsupported(compose([JOB]), "mindspore", coupled=True)


def test_its_gradient_travels_at_the_boundary():
    figures = make_plan(
        nodes=2, ranks_per_node=2, parameters=9_000_000, framework="mindspore"
    ).figures()
    wire = Wire(ranks=4, itemsize=4, metric_count=0, early=False)
    assert figures["collectives_per_update"] == wire.collectives(9_000_000)
    assert figures["bytes_on_wire_per_update"] == wire.bytes_sent(9_000_000)


def test_too_few_gpus_are_refused_with_its_transport_on_cpus():
    gpus = ("cluster.gpus_per_node=a100:4", "cluster.ranks_per_node=8", "transport=nccl")
    with refused(
        ConfigError, "cluster.gpus_per_node=a100:4 cluster.ranks_per_node=4 transport=mccl"
    ):
        cluster_of(compose(["+cluster=slurm", *gpus])).refuse("mindspore")


def test_a_program_gets_the_variables_of_msrun(run):
    alone, shared = (
        variables_of(run, {}, style="mindspore", devices=devices) for devices in ("rank", "node")
    )
    assert (alone["ASCEND_RT_VISIBLE_DEVICES"], alone["DEVICE_ID"]) == ("1", "0")
    assert ("ASCEND_RT_VISIBLE_DEVICES" in shared, shared["DEVICE_ID"]) == (False, "1")
    assert {name: alone[name] for name in alone if name.startswith(("MS_", "RANK_"))} == {
        "MS_ROLE": "MS_WORKER",
        "MS_WORKER_NUM": "4",
        "MS_NODE_ID": "3",
        "MS_SCHED_HOST": "127.0.0.1",
        "MS_SCHED_PORT": "4242",
        "MS_TOPO_TIMEOUT": "60",
        "RANK_ID": "3",
        "RANK_SIZE": "4",
    }


def test_submitting_imports_neither_mindspore_nor_its_engine():
    modules = ", ".join(f"orchestrator.engine.mindspore.{name}" for name in ("facts", "msrun"))
    done = run_python(f"import sys, {modules}; print(*sys.modules)")
    imported = {*done.stdout.split()}
    assert "orchestrator.config.launchers" in imported
    assert imported.isdisjoint({"mindspore", "numpy", "orchestrator.engine.api"})
