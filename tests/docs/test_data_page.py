"""The job over shards of the page on data: the same bits on other ranks, and after a resume."""

import json

import pytest

from orchestrator import Shards
from orchestrator.client.options import WindowOptions, plan_of
from orchestrator.plan.window import planner_of
from tests.docs.scripts import script
from tests.helpers import call, result, verb

LENGTHS = (20, 7, 33, 12, 25, 3)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "shards.py").write_text(script("data.md", "shards.py"))
    (tmp_path / "data").mkdir()
    number = 0
    for shard, length in enumerate(LENGTHS):
        rows = [[n / 100, n / 50 + 1] for n in range(number, number + length)]
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (tmp_path / "data" / f"{shard}.jsonl").write_text(text)
        number += length
    return tmp_path


def test_the_job_over_shards_has_the_same_bits_on_other_ranks_and_after_a_resume(folder):
    same = (
        "job._target_=shards.Numbers", "job.folder=data", "accumulation.global_batch=24",
        "accumulation.micro_batch=4", "accumulation.reduction=reproducible", "cluster.nodes=1",
        "tracker=none", "schedule.base_lr=0.05", "-q",
    )  # fmt: skip
    whole = call(*same, "cluster.ranks_per_node=3", "train.updates=11", "run.dir=a", cwd=folder)
    assert whole.returncode == 0, whole.stderr
    half = call(*same, "cluster.ranks_per_node=1", "train.updates=6", "run.dir=b", cwd=folder)
    assert half.returncode == 0, half.stderr
    more = ("train.updates=11", "cluster.ranks_per_node=2", "-q")
    assert verb("resume", "b", *more, cwd=folder).returncode == 0
    assert result(folder / "a")["weights_sha256"] == result(folder / "b")["weights_sha256"]
    plan = json.loads((folder / "a" / "plan.json").read_text())
    assert plan["shards"] == {"lengths": list(LENGTHS), "lanes": 16}


def test_windows_of_a_loop_take_the_shards():
    shards = Shards(LENGTHS, 4)
    options = WindowOptions.of({"global_batch": 10, "steps": 1, "shards": shards})
    plan = plan_of(sum(LENGTHS), options, ranks=2, reduction="fast")
    assert planner_of(plan).order.shards == shards
