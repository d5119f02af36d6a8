"""The best checkpoint and the early end: `train.keep_best`, `train.patience`."""

import json
import os
import signal

import pytest

from orchestrator.api import open_run, weights_file
from orchestrator.errors import JobError
from orchestrator.rundir.best import BestFigure
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import read_metrics
from tests.helpers import LIMIT_S, await_exit, begin, call, rank_pid, result, verb
from tests.hold import Hold

pytestmark = pytest.mark.whole_runs

CURVE = "job._target_=tests.curve_job.Curve"
COMMON = (
    CURVE,
    "cluster.nodes=1",
    "train.evaluate_every=2",
    "accumulation.global_batch=24",
    "accumulation.micro_batch=4",
    "accumulation.steps=null",
    "accumulation.reduction=reproducible",
    "train.updates=30",
    "train.keep_best=held_out.height",
    "train.patience=3",
    "train.keep_checkpoints=1",
    "train.checkpoint_every=3",
    "tracker=none",
    "run.survive=false",
)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_best_is_kept_and_the_run_ends_early_with_the_same_bits(tmp_path, ranks):
    run = tmp_path / "run"
    said = call(*COMMON, f"cluster.ranks_per_node={ranks}", f"run.dir={run}", code=0).stdout
    assert "held-out after update 8: height 0.9000, other 1.0000, the best so far\n" in said
    assert "other 1.0000; best height 0.9000 after update 8\n" in said
    found = result(run)
    assert (found["state"], found["updates"]) == ("finished", 14)
    assert found["best"] == {"figure": "held_out.height", "value": 0.9, "updates": 8}
    assert found["ended_early"] == "no better held_out.height in 3 evaluations"
    assert [path.name for path in (run / "best").iterdir()] == ["update-000000008"]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["update-000000014"]
    short = tmp_path / "short"
    without = ("train.updates=8", "train.keep_best=null", "train.patience=null")
    call(*COMMON, *without, f"run.dir={short}", code=0)
    file = tmp_path / "best.safetensors"
    verb("export", run, "--best", "-o", file, code=0)
    done = verb("compare", file, weights_file(short), "--json", code=0)
    assert json.loads(done.stdout)["max_relative_difference"] == 0

    said = verb("resume", run, code=0).stdout
    assert "has finished already early (no better held_out.height in 3 evaluations)" in said
    assert "train.patience=null" in said


@pytest.mark.parametrize("update", range(1, 12, 2))
def test_killed_at_an_evaluation_and_resumed_it_finds_the_same(tmp_path, update):
    """Every evaluation is one that some run is killed after, before its next update ends."""
    run, hold = tmp_path / "run", Hold(tmp_path / "hold").hold_before(update + 1)
    words = (*COMMON, "cluster.ranks_per_node=2", f"run.dir={run}", "run.max_restarts=0")
    process = begin(*words, hold.override)
    hold.wait_until_held(update + 1, (0, 1))
    for rank in (0, 1):
        os.kill(rank_pid(run, rank), signal.SIGKILL)
    await_exit(process, 1)
    hold.release()
    said = verb("resume", run, "cluster.ranks_per_node=3", code=0).stdout
    assert "update 14: height 0.9000, other 1.0000; best height 0.9000 after update 8\n" in said
    found = result(run)
    assert (found["updates"], found["best"]["updates"]) == (14, 8)
    assert [path.name for path in (run / "best").iterdir()] == ["update-000000008"]
    evaluations = read_metrics(RunDir(run).metrics).evaluations
    assert [line["update"] for line in evaluations] == list(range(1, 14, 2))


@pytest.mark.parametrize(("rank", "update"), [(1, 8), (0, 9)])
def test_survivors_find_the_same(tmp_path, rank, update):
    """Lost in the window after an evaluation: by another rank, and by the one that judges."""
    run, hold = tmp_path / "run", Hold(tmp_path / "hold").hold_before(update)
    process = begin(
        *COMMON,
        "cluster.nodes=3",
        "cluster.ranks_per_node=1",
        "run.survive=true",
        f"run.dir={run}",
        hold.override,
    )
    hold.wait_until_held(update, (0, 1, 2))
    os.kill(rank_pid(run, rank), signal.SIGKILL)
    hold.release()
    await_exit(process, 0, timeout=LIMIT_S)
    found = result(run)
    assert len(found["survived"]) == 1
    assert (found["updates"], found["best"]["updates"]) == (14, 8)
    assert [path.name for path in (run / "best").iterdir()] == ["update-000000008"]


def test_more_patience_trains_on_and_the_smallest_may_be_the_best(tmp_path):
    run = tmp_path / "run"
    call(*COMMON, "cluster.ranks_per_node=1", "train.updates=16", f"run.dir={run}", code=0)
    said = verb("resume", run, "train.patience=4", code=0).stdout
    assert "update 16: height 0.9500, other 1.0000, the best so far\n" in said
    found = result(run)
    assert (found["updates"], found["best"]["updates"]) == (16, 16)
    assert "ended_early" not in found

    low = ("train.keep_best=-held_out.height", "train.patience=null", "train.updates=16")
    smallest = tmp_path / "smallest"
    call(*COMMON, *low, "cluster.ranks_per_node=1", f"run.dir={smallest}", code=0)
    assert result(smallest)["best"]["updates"] == 2
    assert open_run(smallest).best("-held_out.height")["update"] == 1
    branch = tmp_path / "branch"
    first = f"train.initial_state={smallest}@best"
    call(*COMMON, *low, first, "cluster.ranks_per_node=1", f"run.dir={branch}", code=0)
    assert json.loads((branch / "plan.json").read_text())["branch"]["updates"] == 2


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["train.keep_best=null"], "train.patience=3 needs the figure that has to improve"),
        (["train.keep_best=accuracy"], "try train.keep_best=held_out.accuracy"),
        (["train.keep_best=-loss"], "try train.keep_best=-held_out.loss"),
        (["train.keep_best=held_out.loss"], "the smallest is train.keep_best=-held_out.loss"),
        (["train.keep_best=held_out.hight"], "no 'hight'; did you mean 'height'?"),
        (
            [CURVE.replace("curve_job.Curve", "light_job.Light"), "accumulation.reduction=fast"],
            "no 'height'",
        ),
        (["job._target_=tests.tiny_job.Tiny"], "no 'height'"),
    ],
)
def test_what_cannot_be_best_is_refused(tmp_path, words, text):
    done = call(*COMMON, "cluster.ranks_per_node=1", *words, f"run.dir={tmp_path / 'run'}")
    assert done.returncode in (1, 2)
    assert text in done.stdout + done.stderr


def test_a_figure_is_named_as_the_evaluation_names_it():
    best = BestFigure("-held_out.held_out.x")
    best.add(1, {"held_out.x": 3.0})
    assert (best.updates, best.value) == (1, 3.0)
    with pytest.raises(JobError, match=r"no 'held_out\.x'; did you mean 'held_out\.xx'"):
        best.add(2, {"x": 3.0, "held_out.xx": 1.0})
