"""What is known of MindSpore without importing it: limits, survival, msrun's variables."""

import subprocess
import sys

from orchestrator.agent.topology import Topology
from orchestrator.clusters.api import cluster_of
from orchestrator.config.composer import compose
from orchestrator.config.program import ProgramConfig
from orchestrator.config.rules import OFF, planned_survival, refuse_unsupported
from orchestrator.errors import ConfigError
from orchestrator.plan.wire import Wire
from orchestrator.runs.start import prepare
from orchestrator.trainer.program import ProgramStart, Rendezvous, environment
from tests.helpers import ROOT
from tests.plan.stated import make_plan
from tests.refusals import refused

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
    run.write_config("job: {}\n")
    topology = Topology(
        rank=3,
        size=4,
        local_rank=1,
        node_index=1,
        nodes=2,
        node="n1",
        address="127.0.0.1",
        job_id="1",
    )

    def variables(devices):
        start = ProgramStart(
            program=ProgramConfig(command=("train.py",), style="mindspore", devices=devices),
            topology=topology,
            rendezvous=Rendezvous("127.0.0.1", 4242),
            run=run,
            attempt=0,
            most_restarts=0,
            timeout_s=60,
        )
        return environment({}, start, {})

    alone, shared = variables("rank"), variables("node")
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
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {modules}; print(*sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {*done.stdout.split()}
    assert "orchestrator.config.launchers" in imported
    assert imported.isdisjoint({"mindspore", "numpy", "orchestrator.engine.api"})
