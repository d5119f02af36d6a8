"""The Trainer, Lightning and Accelerate on a scheduler: as they are, and taken away at random."""

import os
import random
import re
import time

import pytest

from tests.callbacks.scripts import IN_A_RUN, NAMES, PLAIN, TOLD, log, under_torchrun
from tests.helpers import records, until
from tests.once import once
from tests.programs import script
from tests.slurm import runs
from tests.slurm.test_programs import submit, take_away


@pytest.mark.timeout(400)
def test_unmodified_they_end_with_the_losses_that_they_have_under_torchrun(
    slurm, tmp_path, tmp_path_factory
):
    script(tmp_path, PLAIN)
    submit(slurm, tmp_path, "cluster.ranks_per_node=2")
    printed = once(tmp_path_factory, "under-torchrun", lambda: under_torchrun(tmp_path))
    assert runs.wait_over(slurm, tmp_path / "run", 300)["state"] == "finished"
    logs = "".join(log(tmp_path / "run", rank) for rank in range(4))
    theirs, ours = (sorted(e for e in TOLD.findall(t) if e[0] == "final") for t in (printed, logs))
    assert len(ours) == 12
    assert ours == theirs


EACH = int(os.environ.get("PREEMPTIONS", "1"))
"""How often each of the three is taken away: ten times by hand, see docs/how-to/programs.md."""


@pytest.mark.timeout(300 + 120 * len(NAMES) * EACH)
def test_each_taken_away_at_random_goes_on_from_its_own_checkpoint(slurm, tmp_path):
    chance, updates, run = random.Random(EACH), 50 + 50 * EACH, tmp_path / "run"
    script(tmp_path, IN_A_RUN)
    words = ("train.py", str(EACH), str(updates), *NAMES)
    submit(slurm, tmp_path, "cluster.partition=low", program=words)
    times = EACH * len(NAMES)
    for attempt in range(times):
        there = f"here-{attempt}-*"
        until(lambda t=there: len(list(tmp_path.glob(t))) == 2, 150, there)
        time.sleep(chance.uniform(0.0, 2.0))  # the moment is what is random here
        take_away(slurm, run, chance.choice(("requeue", "preempt")))
    result = runs.wait_over(slurm, run, 150)
    assert (result["state"], len(result["restarts"])) == ("finished", times)

    recorded = [(record["update"], record["attempt"]) for record in records(run)]
    assert [update for update, _ in recorded] == [*range(updates)] * len(NAMES), (
        "no gap, none twice"
    )
    assert {attempt for _, attempt in recorded} == {*range(times + 1)}, "each went on from there"
    for rank in range(2):
        said = log(run, rank)
        assert [int(a) for a in re.findall(r"^attempt (\d+) accelerate", said, re.MULTILINE)] == [
            *range(EACH + 1)
        ]
        ends = {
            (how, name): loss
            for how, name, loss in re.findall(r"^(final|alone) (\w+) (\S+)$", said, re.MULTILINE)
        }
        assert ends["final", "trainer"] == ends["alone", "trainer"]
        assert ends["final", "accelerate"] == ends["alone", "accelerate"]
        assert ("final", "lightning") in ends
