"""Somebody else's framework, of NumPy, which the tests of SLURM train with: is it a real one?"""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

from orchestrator.engine.api import GroupSpec
from orchestrator.engine.conformance import CHECKS
from orchestrator.errors import StopRequested
from tests import warm
from tests.helpers import LIGHT, call, compare, result, verb

HERE = warm.PATH.split(os.pathsep)[1]
WORDS = (
    LIGHT,
    "tracker=none",
    "accumulation.global_batch=40",
    "accumulation.steps=2",
    "train.updates=9",
    "train.checkpoint_every=3",
    "cluster.nodes=1",
)


@pytest.fixture
def form(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    from toy_letters import Letters

    def one(rank, size, *, stop=False):
        place = {"rank": rank, "size": size, "local_rank": rank, "node": "n"}
        where = {"address": "127.0.0.1", "folder": tmp_path}
        return Letters(GroupSpec(**place, **where, stop_requested=lambda: stop))

    return one


@pytest.fixture
def groups(form):
    def on_every_rank(size, be):
        def form_and_be(rank):
            with closing(form(rank, size)) as group:
                be(group)

        with ThreadPoolExecutor(size) as threads:
            list(threads.map(form_and_be, range(size)))

    return on_every_rank


class Float32:
    def make(self, values, shape):
        return np.array(values, np.float32).reshape(shape)

    def read(self, tensor):
        return tensor.ravel().tolist()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_its_groups_keep_the_contract_of_all_groups(groups, size):
    groups(size, lambda group: [check(group, Float32()) for check in CHECKS])


def test_who_sees_all_ranks_after_one_has_left_at_a_stop_is_stopped_too(form):
    for rank, stop in ((0, True), (1, False)):
        with pytest.raises(StopRequested):
            form(rank, 2, stop=stop)


def test_a_run_of_it_has_the_same_losses_on_any_ranks_and_goes_on_where_it_stood(tmp_path):
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    faults = ("job.fault=kill", "job.fault_after=9", "run.max_restarts=2")
    for run, *more in (
        (alone, "cluster.ranks_per_node=1"),
        (killed, "cluster.ranks_per_node=3", *faults),
    ):
        call(*WORDS, *more, f"run.dir={run}", code=0)
    assert [one["resumed_from"] for one in result(killed)["restarts"]] == [3, 6]
    assert compare(alone, killed)["max_relative_difference"] < 1e-5


def test_what_it_declares_is_refused_before_the_start(tmp_path):
    lacking = ("accumulation.reduction=reproducible", "accumulation.micro_batch=2")
    done = call(*WORDS, "accumulation.steps=null", *lacking, f"run.dir={tmp_path}/run", code=2)
    assert "reduction=reproducible is not available with numpy; try" in done.stderr
    done = call(*WORDS, "run.survive=true", f"run.dir={tmp_path}/run", code=2)
    assert "run.survive=true is not available with numpy; try run.max_restarts=3" in done.stderr
    assert not (tmp_path / "run").exists()


PROGRAM = """
import os, socket
host, port = os.environ["LETTERBOX"].split(":")
socket.create_connection((host, int(port))).close()
print("sender", os.environ["SENDER"])
"""


def test_a_program_gets_the_variables_of_its_launcher(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    words = ("job.style=letters", "cluster.nodes=1", "cluster.ranks_per_node=2", "run.dir=run")
    plan = verb("plan", *words, "--", "train.py", cwd=tmp_path, code=0)
    assert "letterrun's variables" in plan.stdout
    verb("run", *words, "--", "train.py", cwd=tmp_path, code=0)
    logs = [(tmp_path / f"run/logs/rank-0000{rank}.log").read_text() for rank in (0, 1)]
    assert ["sender 0" in logs[0], "sender 1" in logs[1]] == [True, True]
