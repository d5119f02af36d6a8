"""Taken away and given back: the run ends with the bits of one that was left alone."""

import random
import time

import pytest

from slurm import breaking
from tests.helpers import TINY, until
from tests.slurm import runs

TIMES = 5


@pytest.mark.timeout(420)
def test_ten_preemptions_at_random_moments_change_nothing(slurm, tmp_path):
    """Two runs beside each other lose their nodes to the same jobs, each five times."""
    more_than_fit_in_between = "train.updates=180"
    chance = random.Random(4)
    both = {}
    for name in ("one", "another"):
        both[tmp_path / name] = runs.submit(
            slurm, tmp_path / name, more_than_fit_in_between, "train.checkpoint_every=5",
            "job.pause_s=0.03", "cluster.partition=low",
        )  # fmt: skip
    waits = []
    for number in range(TIMES):
        for run in both:
            runs.wait_for_update(run, 0, attempt=number)
        time.sleep(chance.uniform(0.0, 0.5))  # the moment is what is random here
        other = runs.occupy(slurm, "true", "-p", "high", "-N", "4", "--exclusive")
        until(lambda other=other: runs.over(slurm, other), 60, "the preempting job's end")
        free = time.monotonic()
        for run, job in both.items():
            began = f"the restart of {run.name}"
            until(lambda job=job: runs.queue_state(slurm, job) == "RUNNING", 60, began)
        waits.append(time.monotonic() - free)
    expected = runs.reference(tmp_path / "local", more_than_fit_in_between)
    assert max(waits) < 20
    for run in both:
        ended = runs.wait_over(slurm, run)
        assert ended["state"] == "finished"
        assert ended["weights_sha256"] == expected
        notes = [record["restart"] for n, record in runs.first_records(run).items() if n]
        assert len(notes) == TIMES
        assert all(note["why"] == "preempted" for note in notes)
        assert all(note["lost_updates"] <= 1 for note in notes)
        found = runs.status(run)
        assert found["restarts"] == TIMES
        assert found["why"] == "preempted"


def test_a_stop_that_cannot_wait_for_the_boundary_loses_its_window_only(slurm, tmp_path):
    """A requeue by hand leaves KillWait, 3 s here, and an update takes five."""
    run = tmp_path / "run"
    more = ("train.updates=3", "accumulation.steps=16", "train.checkpoint_every=100")
    expected = runs.reference(tmp_path / "local", *more)
    job = runs.submit(slurm, run, *more, "job.pause_s=0.3", "cluster.signal_ahead_s=3")
    runs.wait_for_update(run, 1)
    slurm.command("scontrol", "requeue", job)
    until(lambda: runs.queue_state(slurm, job) == "PENDING", 10, "leaving inside the window")
    ended = runs.wait_over(slurm, run)
    assert ended["weights_sha256"] == expected
    note = runs.first_records(run)[1]["restart"]
    assert (note["resumed_from"], note["lost_updates"]) == (2, 0)
    assert note["lost_micro_steps"] > 0
    assert "longer than the 3 s" in (run / "logs" / "rank-00000.log").read_text()


def test_a_requeue_by_hand_and_a_node_set_down_are_survived(mended, tmp_path):
    run, more = tmp_path / "run", (TINY, "train.updates=60", "run.survive=false")
    job = runs.submit(mended, run, *more, "job.pause_s=0.05")
    runs.wait_for_update(run, 5)
    mended.command("scontrol", "requeue", job)
    runs.wait_for_update(run, 6, attempt=1)
    lost = runs.nodes_of(mended, job)[1]
    breaking.set_node_down(mended, lost)
    runs.wait_for_update(run, 7, attempt=2)
    assert lost not in runs.nodes_of(mended, job)
    ended = runs.wait_over(mended, run)
    assert ended["weights_sha256"] == runs.reference(tmp_path / "local", *more)
    assert runs.first_records(run)[1]["restart"]["why"].startswith("requeued (scontrol requeue")
    assert runs.status(run)["restarts"] == 2
