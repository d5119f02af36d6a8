"""Whole runs of MindSpore jobs, as a user starts them."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from orchestrator import open_run
from orchestrator.data import HeldOutData
from orchestrator.engine.api import EngineSettings
from orchestrator.engine.common.rendezvous import keep_port
from orchestrator.engine.mindspore.engine import build_engine
from orchestrator.engine.mindspore.group import MindSporeGroup
from orchestrator.rundir.checkpoints import WEIGHTS
from tests import helpers
from tests.docs.printed import typed
from tests.docs.scripts import script as page_script
from tests.docs.scripts import shell_block
from tests.engine.held_out import evaluate_held_out
from tests.engine.mindspore.jobs import HeldOut
from tests.hold import Hold
from tests.programs import script
from tests.refusals import mentions

pytestmark = [pytest.mark.whole_runs, pytest.mark.long]

SLOW = "job._target_=tests.engine.mindspore.jobs.SlowLine"


def test_both_engines_agree_from_the_same_start(tmp_path):
    """The block of docs/how-to/mindspore.md, with a narrower net."""
    block = shell_block("mindspore.md", "orchestrator compare")
    assert "layers=[784,512,512,10]" in block
    (tmp_path / "typed").mkdir()
    for _, _, module, *words in typed(block.replace("512,512", "48"), tmp_path / "typed"):
        helpers.call(*words, module=module, cwd=tmp_path, code=0)
    torchs, ours = tmp_path / "runs" / "torch", tmp_path / "runs" / "mindspore"
    assert "torch" in json.loads((torchs / "environment.json").read_text())["framework"]
    assert "mindspore" in json.loads((ours / "environment.json").read_text())["framework"]
    assert [r["update"] for r in helpers.records(ours)] == list(range(10))
    assert all(r["micro_steps"] == 4 for r in helpers.records(ours))
    found = helpers.compare(ours, torchs)
    assert 0 < found["max_relative_difference"] <= 1e-5
    start = tmp_path / "runs" / "start"
    done = helpers.verb("compare", ours, start, "--at-most", "1e-5", code=1)
    assert mentions(done.stderr, "--at-most 1e-05"), done.stderr
    figures = [helpers.result(run)["metrics"] for run in (ours, torchs)]
    assert figures[0].keys() == {"loss", "accuracy"}
    assert figures[0] == pytest.approx(figures[1], rel=1e-4)


def test_ranks_evaluate_together_with_the_statistics_of_rank_0(tmp_path):
    run = tmp_path / "run"
    helpers.call(
        "job._target_=tests.engine.mindspore.jobs.HeldOut",
        "cluster.nodes=2",
        helpers.SMALL,
        "accumulation.global_batch=32",
        "accumulation.micro_batch=8",
        "train.updates=3",
        "train.evaluate_every=0",
        "tracker=none",
        f"run.dir={run}",
        code=0,
    )
    job = HeldOut()
    group = MindSporeGroup(rank=0, size=1, transport="mccl")
    engine = build_engine(job, EngineSettings(metric_names=job.metric_names), group)
    checkpoint = max((run / "checkpoints").iterdir())
    engine.load_weights(checkpoint / WEIGHTS)  # with the statistics of rank 0
    report = evaluate_held_out(engine, group, HeldOutData({"": job.validation()}), size=8)
    assert helpers.result(run)["metrics"] == report.figures
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    [collectives] = [line["collectives"] for line in lines if "evaluation" in line]
    assert collectives == 1 + 4 + 1, "digests, the statistics of two norms, sums"


def test_a_batch_that_grows_is_the_same_update_on_one_and_on_two_ranks(tmp_path):
    growing = (
        "job=line",
        "accumulation.global_batch=100",
        "train.samples=2000",
        "tracker=none",
        "accumulation.batch_schedule=[[3,150],[8,333]]",
        "schedule.scaling=linear",
        "cluster.nodes=1",
    )
    for ranks, steps in ((1, 1), (2, 3)):
        more = (f"cluster.ranks_per_node={ranks}", f"accumulation.steps={steps}")
        helpers.call(*growing, *more, f"run.dir={tmp_path / str(ranks)}", code=0)
    sizes = [100, 100, 100, 150, 150, 150, 150, 124, 333, 333, 333]  # epochs of 1,024
    lines = helpers.records(tmp_path / "2")
    assert [line["samples"] for line in lines] == sizes
    assert lines[-1]["learning_rate"] == pytest.approx(3.33 * lines[0]["learning_rate"])
    found = helpers.compare(tmp_path / "2", tmp_path / "1")
    assert found["max_relative_difference"] <= 1e-5


def test_micro_steps_by_tokens_are_the_same_update_on_one_and_on_two_ranks(tmp_path):
    padded = (
        "job._target_=tests.engine.mindspore.jobs.Padded",
        "accumulation.global_batch=32",
        "train.updates=6",
        "tracker=none",
        "cluster.nodes=1",
        "schedule.base_lr=0.1",
    )
    by_tokens = ("accumulation.micro_tokens=56", "accumulation.pad_to=7", "job.pad_to=7")
    one, two = tmp_path / "one", tmp_path / "two"
    whole = ("cluster.ranks_per_node=1", "accumulation.steps=1")
    helpers.call(*padded, *whole, f"run.dir={one}", code=0)
    dealt = (*by_tokens, "cluster.ranks_per_node=2", "accumulation.balance=measured")
    done = helpers.call(*padded, *dealt, f"run.dir={two}", code=0)
    assert mentions(done.stdout, "padded tokens"), done.stdout
    assert helpers.records(two)[0]["micro_steps"] > 2
    assert helpers.records(two)[0]["speeds"] == [1.0, 1.0]
    assert helpers.compare(two, one)["max_relative_difference"] <= 1e-5


def test_a_branch_goes_on_from_the_state_of_another_run(tmp_path):
    same = (
        "job=line",
        "optimizer=adam",
        "schedule.base_lr=0.1",
        "accumulation.global_batch=100",
        "tracker=none",
        "cluster.nodes=1",
    )
    two, whole, run = "cluster.ranks_per_node=2", tmp_path / "whole", tmp_path / "run"
    every = ("train.updates=8", "train.checkpoint_every=5")
    helpers.call(*same, two, *every, f"run.dir={whole}", code=0)
    begins = f"train.initial_state={whole}@5"
    helpers.call(*same, two, begins, "train.updates=3", f"run.dir={run}", code=0)
    assert helpers.result(run)["weights_sha256"] == helpers.result(whole)["weights_sha256"]
    torchs = ("job._target_=tests.tiny_job.Tiny", begins, "tracker=none", f"run.dir={run}2")
    done = helpers.call(*torchs, "train.updates=1", "job.samples=1024")
    assert done.returncode
    said = "".join((done.stdout + done.stderr).split())
    assert re.search(r"mindspore[\w.]*\.Adam", said)
    assert "begin" in said


TRAIN = """\
import json, os, sys
import mindspore as ms, numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init
ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
init()
rank, size = get_rank(), get_group_size()
draw = np.random.default_rng(0)
x = draw.standard_normal((32, 3)).astype(np.float32)
y = x @ np.asarray([[1.0], [-2.0], [0.5]], np.float32)
net = nn.Dense(3, 1, weight_init="zeros", bias_init="zeros")
own = [ms.Tensor(every[rank::size]) for every in (x, y)]
mean = nn.DistributedGradReducer(net.trainable_params(), mean=True, degree=size)
step = nn.SGD(net.trainable_params(), 0.1)
of = ms.value_and_grad(lambda a, b: ((net(a) - b) ** 2).mean(), None, step.parameters)
for update in range(5):
    loss, found = of(*own)
    step(mean(found))
loss = float((ops.AllReduce()(loss) / size).asnumpy())
weights = b"".join(each.asnumpy().tobytes() for each in net.trainable_params())
variables = {name: os.environ[name] for name in os.environ if name.startswith(("MS_", "RANK_"))}
sys.stdout.write(f"final {loss.hex()} {weights.hex()}\\n{json.dumps(variables, sort_keys=True)}\\n")
"""


@pytest.mark.timeout(600)
def test_on_two_nodes_it_ends_with_the_bits_that_it_has_under_msrun(tmp_path):
    script(tmp_path, TRAIN)
    with keep_port("127.0.0.1") as keeper:  # one after the other, since each takes gigabytes
        theirs = helpers.call(
            "--worker_num=2",
            "--local_worker_num=2",
            "--join=True",
            "--log_dir=theirs",
            f"--master_port={keeper.getsockname()[1]}",
            "train.py",
            module="mindspore.parallel.cluster.run",
            cwd=tmp_path,
            PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin",
        )
    # At less than half a core its workers may crash as they exit, after their last line.
    printed = [(tmp_path / f"theirs/worker_{rank}.log").read_text() for rank in range(2)]
    assert all("final " in text for text in printed), theirs.stdout + theirs.stderr
    helpers.call(
        "run",
        "job.style=mindspore",
        "run.dir=ours",
        helpers.SMALL,
        "cluster.rendezvous_timeout_s=600",
        "--",
        "train.py",
        module="orchestrator",
        cwd=tmp_path,
        code=0,
    )

    endings = set()
    for rank in range(2):
        at = (f"theirs/worker_{rank}.log", f"ours/logs/rank-{rank:05d}.log")
        texts = [(tmp_path / name).read_text() for name in at]
        endings |= {tuple(re.findall("^final (.*)", text, re.MULTILINE)) for text in texts}
        reports = [json.loads(re.findall(r"^\{.*\}$", text, re.MULTILINE)[-1]) for text in texts]
        for one in reports:
            assert one.pop("MS_SCHED_PORT")
            assert one.pop("MS_SCHED_HOST").startswith("127.0.")
        assert reports[0] == reports[1], "the same variables, of the same values"
    assert len(endings) == 1
    assert len(endings.pop()) == 1


def test_a_worker_refuses_what_the_engine_lacks_when_the_source_hides_the_framework(tmp_path):
    """The submitting command refuses it for any other job: tests/config/test_composer.py."""
    done = helpers.call(
        "job._target_=tests.engine.mindspore.jobs.Hidden",
        "engine.shard_optimizer=true",
        "cluster.nodes=1",
        "cluster.ranks_per_node=1",
        "tracker=none",
        "run.dir=run",
        cwd=tmp_path,
        code=2,
    )
    assert mentions(done.stderr, "engine.shard_optimizer=true mindspore"), done.stderr
    assert mentions(done.stdout, "1 rank"), "refused by the worker"


LINE = (
    "job=line",
    "cluster.nodes=2",
    "cluster.ranks_per_node=1",
    "tracker=none",
    "train.epochs=null",
    "train.updates=60",
    "train.checkpoint_every=10",
    "train.evaluate_every=0",
)


def scheduler_of(run):
    children = psutil.Process(helpers.rank_pid(run, 0)).children()
    return next(c.pid for c in children if "scheduler_process.py" in " ".join(c.cmdline()))


def test_killed_scheduler_is_reported_and_the_run_restarts(tmp_path):
    """tests/slurm kills a rank, and compares the bits."""
    run, hold = tmp_path / "run", Hold(tmp_path / "hold").hold_before(59)
    held = (SLOW, "job.pause_s=0.02", hold.override)
    process = helpers.begin(*LINE, *held, f"run.dir={run}", "run.max_restarts=1")
    helpers.until(lambda: len(helpers.records(run)) > 15, what="training")
    doomed = helpers.processes_of(run)
    os.kill(scheduler_of(run), signal.SIGKILL)
    helpers.until((run / "attempts" / "001").exists, 20, "the next attempt")
    assert not [p for p in doomed if helpers.name_of(p).startswith("rank")]
    hold.release()
    helpers.await_exit(process, 0, timeout=helpers.LIMIT_S)
    assert not helpers.processes_of(run)
    plan = json.loads((run / "plan.json").read_text())
    kept = helpers.records(run)
    assert all(r["collectives"] == plan["collectives_per_update"] for r in kept)
    assert kept[0]["compile_s"] > 0
    assert "compile_s" not in kept[-1]
    found = helpers.result(run)
    assert abs(found["metrics"]["slope"] - 2) < 0.02
    assert abs(found["metrics"]["intercept"] - 3) < 0.02
    [note] = found["restarts"]
    assert "MindSpore's scheduler" in note["why"]
    assert note["resumed_from"] > 0


def test_a_job_has_callbacks(tmp_path):
    run = tmp_path / "run"
    helpers.call(
        "job._target_=tests.engine.mindspore.jobs.JournaledWeighted",
        "cluster.nodes=1",
        "cluster.ranks_per_node=2",
        "accumulation.global_batch=24",
        "accumulation.micro_batch=4",
        "accumulation.steps=null",
        "train.updates=6",
        "tracker=none",
        f"run.dir={run}",
        code=0,
    )
    recorded = [[row["update"], row["loss"], row["metrics"]] for row in helpers.records(run)]
    for rank in (0, 1):
        text = (run / f"calls-{rank}.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        assert [line[4] for line in lines if line[0] == "second"] == list(range(6))
        assert [line[4:] for line in lines if line[0] == "on_boundary"] == recorded


def test_a_run_as_an_object_gives_its_model_and_weights(tmp_path):
    folder = tmp_path / "run"
    words = ("cluster.nodes=1", "train.updates=4", "train.precision=float64", f"run.dir={folder}")
    helpers.call("job=line", helpers.SMALL, *words, code=0)
    run = open_run(folder)
    state, model = run.state_dict(), run.load_model()
    parameters = model.parameters_dict()
    assert state.keys() == parameters.keys()
    for name, tensor in state.items():
        assert parameters[name].asnumpy() == pytest.approx(tensor.asnumpy(), rel=1e-6)


def test_the_frameworks_own_accumulation_under_model_train_takes_the_big_batchs_steps(tmp_path):
    (tmp_path / "model_train.py").write_text(page_script("mindspore.md", "model_train.py"))
    done = subprocess.run(
        [sys.executable, "model_train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=helpers.LIMIT_S,
        env={**os.environ, "GLOG_v": "3"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    x = np.random.default_rng(0).standard_normal((200, 3))
    y = x.sum(1) + 1
    inputs, weights = np.concatenate([x, np.ones((200, 1))], axis=1), np.zeros(4)
    for update in range(5):
        batch = slice(40 * update, 40 * update + 40)
        error = inputs[batch] @ weights - y[batch]
        weights -= 0.1 * 2 * error @ inputs[batch] / 40
    assert list(map(float, done.stdout.split())) == pytest.approx(weights, abs=1e-6)
