"""A node that computes wrongly is named as it is typed, and the run ends without it."""

import re

import pytest

from tests.refusals import mentions
from tests.slurm import runs

pytestmark = pytest.mark.slurm

pytest.importorskip("orchestrator.sentinel")  # an add-on

SETTINGS = (
    "job._target_=tests.sentinel.jobs.Wrong",
    "+job.rank=1",
    "+job.since=3",
    "train.updates=12",
    "cluster.nodes=3",
    "accumulation.steps=null",
    "accumulation.micro_batch=4",
    "accumulation.global_batch=24",
    "accumulation.reduction=reproducible",
    "accumulation.sentinel_every=4",
    "accumulation.sentinel=exclude",
    "run.survive=true",
    "train.evaluate_every=0",
)


def test_a_node_that_computes_wrongly_is_left_out_and_named_as_it_is_typed(slurm, tmp_path):
    run = tmp_path / "run"
    runs.submit(slurm, run, *SETTINGS)
    ended = runs.wait_over(slurm, run)
    assert (ended["state"], ended["updates"]) == ("finished", 12)
    [loss] = ended["survived"]
    [why] = loss["why"]  # by the agents
    assert loss["gone"] == [1]
    assert "joined" not in ended
    text = " ".join(runs.verb("status", run, code=0).stdout.split())
    named = re.search(r"rank 1 on (\S+) [^:]*wrongly [^:]*update 3", text)
    assert named is not None, text
    assert mentions(why, f"on {named[1]}: wrongly"), why
    assert f"cluster.exclude={named[1]}" in text
