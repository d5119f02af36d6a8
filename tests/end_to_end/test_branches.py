"""A run that begins with the state of another one, at its place in the data."""

import json
import os
import shutil
import signal

import pytest

from tests.helpers import TINY, await_exit, call, compare, rank_pid, records, result, verb
from tests.hold import begin_held

pytestmark = pytest.mark.whole_runs

LEAVES = (
    TINY,
    "accumulation.reduction=reproducible",
    "accumulation.micro_batch=8",
    "tracker=none",
    "train.evaluate_every=0",
    "cluster.nodes=1",
    "run.survive=false",
)
SMALL = ("accumulation.global_batch=48", "cluster.ranks_per_node=2")


def started(run, *words, code=0):
    return call(*LEAVES, *words, f"run.dir={run}", code=code)


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    """Return a run of 12 updates, with checkpoints after 4, 8 and 12 of them."""
    run = tmp_path_factory.mktemp("trunk") / "run"
    more = ("train.updates=12", "train.checkpoint_every=4", "train.keep_checkpoints=9")
    started(run, *SMALL, *more, "optimizer.weight_decay=0.01")
    return run


def test_with_the_same_settings_it_ends_with_the_bits_of_the_run_it_is_from(trunk, tmp_path):
    copy, run = tmp_path / "copy", tmp_path / "run"
    shutil.copytree(trunk, copy)
    same = (*SMALL, "optimizer.weight_decay=0.01", f"train.initial_state={copy}@4")
    process, hold = begin_held(
        run, 3, *LEAVES, *same, "train.updates=8", "run.max_restarts=1", "train.checkpoint_every=2"
    )
    shutil.rmtree(copy)  # the branch is whole without it
    hold.wait_until_held(3, (0, 1))
    os.kill(rank_pid(run, 1), signal.SIGKILL)
    hold.release()
    await_exit(process, 0)
    assert result(run)["weights_sha256"] == result(trunk)["weights_sha256"]
    assert result(run)["samples"] == 8 * 48
    whole = {record["update"]: record for record in records(trunk)}
    for record in records(run):  # numbered from 0, at the epochs of the data
        assert record["loss"] == whole[record["update"] + 4]["loss"]
        assert record["epoch"] == whole[record["update"] + 4]["epoch"]


def test_killed_before_its_first_checkpoint_it_begins_with_the_state_again(trunk, tmp_path):
    run = tmp_path / "run"
    same = (*SMALL, "optimizer.weight_decay=0.01", f"train.initial_state={trunk}@8")
    process, hold = begin_held(
        run, 1, *LEAVES, *same, "train.updates=4", "run.max_restarts=1", "train.checkpoint_every=0"
    )
    for rank in (1, 0):
        os.kill(rank_pid(run, rank), signal.SIGKILL)
    hold.release()
    await_exit(process, 0)
    assert result(run)["weights_sha256"] == result(trunk)["weights_sha256"]


def test_ranks_are_lost_and_replaced_while_its_batch_grows_and_no_bit_changes(trunk, tmp_path):
    own = (
        "accumulation.global_batch=32",
        "accumulation.batch_schedule=[[2,80],[5,120]]",
        f"train.initial_state={trunk}@8",
        "train.samples=700",
        "schedule.scaling=linear",
        "job.dropout=0.2",
    )
    whole, run = tmp_path / "whole", tmp_path / "run"
    started(whole, *own, "cluster.ranks_per_node=1")
    ranks = ("cluster.nodes=2", "cluster.ranks_per_node=2", "run.survive=true")
    more = (*LEAVES, *own, *ranks, "train.checkpoint_every=0")
    process, hold = begin_held(run, 1, *more, ranks=range(4))
    os.kill(rank_pid(run, 3), signal.SIGKILL)  # no checkpoint of its own was written yet
    hold.release()
    await_exit(process, 0)
    assert len(result(run)["survived"]) == 1
    assert not result(run)["restarts"]
    assert result(run)["weights_sha256"] == result(whole)["weights_sha256"]
    assert [line["samples"] for line in records(run)] == [
        line["samples"] for line in records(whole)
    ]
    assert {32, 80, 120} <= {line["samples"] for line in records(run)}


def test_its_settings_are_its_own_and_its_samples_those_that_come_next(trunk, tmp_path):
    own = (
        "accumulation.global_batch=80",
        "cluster.ranks_per_node=3",
        "train.samples=336",
        "schedule.base_lr=0.002",
        "schedule.decay=linear",
        "optimizer.weight_decay=0.3",
        f"train.initial_state={trunk}@4",
    )
    shown = verb("plan", *LEAVES, *own, "facts.dataset_samples=240", code=0).stdout
    assert f"begins with {trunk} after update 4 (epoch 0, 192 samples into it)" in " ".join(
        shown.replace("\n", " ").split()
    )
    one, two = tmp_path / "one", tmp_path / "two"
    started(one, *own)
    started(two, *own, "cluster.ranks_per_node=1")
    assert result(one)["weights_sha256"] == result(two)["weights_sha256"]
    # 48 of epoch 0 remain; then an epoch of 240.
    lines = records(one)
    assert [line["samples"] for line in lines] == [48, 80, 80, 80, 80]
    assert [line["epoch"] for line in lines] == [0, 1, 1, 1, 2]
    assert lines[0]["learning_rate"] == 0.002
    assert lines[-1]["learning_rate"] == 0.0
    groups = result(one)["optimizer"]["groups"]
    assert groups[0]["weight_decay"] == 0.3, "of this run, not of the checkpoint"
    assert json.loads((one / "plan.json").read_text())["branch"] == {
        "run": str(trunk),
        "updates": 4,
        "epoch": 0,
        "position": 192,
        "global_batch": 48,
        "seed": 0,
        "dataset_samples": 240,
    }


def test_a_branch_of_a_branch_is_at_its_own_place(trunk, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    started(one, *SMALL, f"train.initial_state={trunk}@4", "train.updates=3")
    started(two, *SMALL, f"train.initial_state={one}", "train.updates=1")
    assert json.loads((two / "plan.json").read_text())["branch"]["position"] == 2 * 48
    assert json.loads((two / "plan.json").read_text())["branch"]["epoch"] == 1


def test_a_state_in_shards_is_taken_on_any_ranks_whole_or_in_shards(tmp_path):
    double = (
        TINY,
        "tracker=none",
        "train.precision=float64",
        "train.clip_norm=0.5",
        "train.evaluate_every=0",
        "accumulation.global_batch=22",
        "accumulation.micro_batch=4",
        "run.survive=false",
        "cluster.nodes=1",
    )
    whole, trunk = tmp_path / "whole", tmp_path / "trunk"
    call(*double, "cluster.ranks_per_node=1", "train.updates=6", f"run.dir={whole}", code=0)
    shards = ("engine.shard_model=all", "cluster.ranks_per_node=2", "train.updates=4")
    call(*double, *shards, f"run.dir={trunk}", code=0)
    for name, words in {
        "other ranks": ("engine.shard_model=all", "cluster.ranks_per_node=3"),
        "unsharded": ("cluster.ranks_per_node=1",),
        "optimizer": ("engine.shard_optimizer=true", "cluster.ranks_per_node=2"),
    }.items():
        run = tmp_path / name
        more = (*words, "train.updates=2", f"train.initial_state={trunk}", f"run.dir={run}")
        call(*double, *more, code=0)
        assert compare(run, whole)["max_relative_difference"] <= 1e-10
    own = tmp_path / "own"
    more = ("optimizer.weight_decay=0.3", *more[:-1], f"run.dir={own}")
    call(*double, *more, code=0)
    assert result(own)["optimizer"]["groups"][0]["weight_decay"] == 0.3
    assert compare(own, whole)["max_relative_difference"] > 1e-6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("@5", ["there is no checkpoint after update 5; there are ", "@4, ", "@12 (train.keep_"]),
        (
            "@4 optimizer=sgd",
            [
                (
                    "its optimizer is torch.optim.adam.Adam, whose state torch.optim.sgd.SGD "
                    "cannot use"
                ),
                "To begin with its weights alone: train.initial_weights=",
            ],
        ),
        ("@4 +optimizer.amsgrad=true", ["its optimizer has amsgrad=False, whose state is not for"]),
        (
            "@4 job.samples=230",
            [
                "had a place in a data set of 240 samples, but this one has 230",
                "use train.initial_weights=",
            ],
        ),
        ("@4 job.width=3", ["is of another model"]),
        ("@4 train.initial_weights=x", ["both say where the weights begin"]),
        ("/none", ["train.initial_state=", "there is no run folder"]),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(trunk, tmp_path, words, said):
    reference, *more = words.split()
    done = started(
        tmp_path / "run",
        *SMALL,
        "train.updates=2",
        f"train.initial_state={trunk}{reference}",
        *more,
        code=None,
    )
    assert done.returncode in (1, 2), done.stdout + done.stderr
    message = "".join((done.stdout + done.stderr).split())
    for part in said:
        assert "".join(part.split()) in message
    assert records(tmp_path / "run") == []


def test_a_damaged_copy_is_refused(trunk, tmp_path):
    copy, run = tmp_path / "copy", tmp_path / "run"
    shutil.copytree(trunk, copy)
    weights = copy / "checkpoints" / "update-000000008" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    done = started(run, *SMALL, f"train.initial_state={copy}@8", "train.updates=1", code=2)
    assert "is damaged: its digest is not the one in" in " ".join(done.stderr.split())
    assert not run.exists()


def test_another_seed_is_another_order_and_warned_of(trunk, tmp_path):
    done = started(
        tmp_path / "run",
        *SMALL,
        f"train.initial_state={trunk}@4",
        "train.updates=1",
        "train.seed=3",
    )
    assert "comes in another order, with samples that were used already" in " ".join(
        (done.stdout + done.stderr).split()
    )
