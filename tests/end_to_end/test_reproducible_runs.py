"""Ranks that compute differently are named, within a run and between two."""

import shutil

from orchestrator.rundir.files import read_json, write_json
from tests import helpers


def test_ranks_and_runs_that_compute_differently_are_named_to_the_person(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    done = helpers.call(
        "job._target_=tests.tiny_job.Threads", "accumulation.reduction=reproducible",
        "accumulation.micro_batch=16", "accumulation.global_batch=160", "train.updates=2",
        "tracker=none", "cluster.nodes=1", "cluster.ranks_per_node=3", f"run.dir={a}",
    )  # fmt: skip
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 0, said
    assert "warning: rank 1 computes with another version of torch, number of threads" in said
    assert "the bits of the result may depend on who computes which leaf" in said

    shutil.copytree(a, b)
    environment = read_json(b / "environment.json")
    environment["framework"]["torch"] = "1.0"
    write_json(b / "environment.json", environment)
    said = helpers.verb("compare", a, b).stdout
    assert "the same bits" in said
    assert "computed with another torch: 2." in said
    assert "against 1.0" in said
