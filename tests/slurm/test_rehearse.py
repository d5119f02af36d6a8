"""A rehearsal on SLURM."""

import json

import pytest

from tests.helpers import TINY
from tests.slurm import runs

pytest.importorskip("orchestrator.rehearse")  # an add-on
pytestmark = [pytest.mark.slurm, pytest.mark.long]


def test_a_rehearsal_whose_batch_script_is_killed_ends_with_the_undisturbed_bits(slurm, tmp_path):
    small = (
        "+cluster=slurm_dev",
        f"cluster.slurm_conf={slurm.slurm_conf}",
        TINY,
        "job.pause_s=0.05",
        "accumulation.global_batch=32",
        "accumulation.micro_batch=4",
        "cluster.nodes=2",
        "cluster.ranks_per_node=1",
        "train.updates=20",
    )
    done = runs.verb(
        "rehearse",
        *small,
        "--faults",
        1,
        "--only",
        "kill the batch script",
        "--seed",
        1,
        "--into",
        tmp_path / "of",
        "--json",
        code=0,
    )
    [row] = json.loads(done.stdout)["rows"]
    assert (row["how"], row["equal"], row["samples_lost"]) == ("restart", True, 0)
