"""Whom a local run blames, of all that it has lost (`run.survive`)."""

import pytest

from orchestrator.clusters.local.losses import Losses
from orchestrator.clusters.request import Request
from orchestrator.clusters.root_cause import End
from orchestrator.lifecycle.survival.record import GenerationRecord
from orchestrator.rundir.folder import RunDir


@pytest.mark.parametrize(
    ("lost", "blamed"),
    [([5, 3, 4], [4]), ([5, 3], [3]), ([5, 4, 2], [4, 2])],
    ids=["the last one", "all of whom were survived", "two that nobody survived"],
)
def test_of_all_that_are_lost_those_that_nobody_survived_are_blamed(lost, blamed, tmp_path):
    run = RunDir(tmp_path)
    run.attempt(0).mkdir(parents=True)
    record = GenerationRecord(run.attempt(0))
    record.publish(0, range(6))
    record.publish(1, (0, 1, 2, 3, 4), gone=[5])
    record.publish(2, (0, 1, 2, 4), gone=[3])
    losses = Losses(run, Request(run=tmp_path, attempt=0, ranks_per_node=1, nodes=6,
                                 details={"survive": True}))  # fmt: skip
    for time, rank in enumerate(lost):
        assert losses.take(End(time=time, node="n", rank=rank, status=-9), {rank: rank}, "")
    assert [end.rank for end in losses.blamed] == blamed
