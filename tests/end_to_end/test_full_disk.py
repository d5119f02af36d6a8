"""A run folder on a disk without room: a real one, of four megabytes, filled to the last byte."""

import json
import os
import subprocess

import pytest

from tests import helpers
from tests.helpers import SMALL, TINY

LONG = (
    TINY, SMALL, "train.updates=120", "accumulation.global_batch=24", "accumulation.steps=2",
    "job.pause_s=0.05", "train.checkpoint_every=10", "train.evaluate_every=0", "job.dropout=0.5",
)  # fmt: skip


@pytest.fixture
def disk(tmp_path):
    """A mounted file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system to fill")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder):
    """Take all the room there is; give the file that holds it."""
    filler = folder / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return filler


def lines(run):
    text = (run / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.timeout(180)
def test_a_disk_that_is_full_for_a_while_costs_no_update_no_line_and_no_bit(disk, tmp_path):
    run, undisturbed = disk / "run", tmp_path / "undisturbed"
    process = helpers.begin(*LONG, f"run.dir={run}")
    helpers.until(lambda: len(helpers.records(run)) >= 12, what="training")
    filler = fill(disk)
    place = run / "attempts" / "000" / "progress"
    before = len(helpers.records(run))
    helpers.until(lambda: place.read_bytes()[0] > before + 25, what="training on")
    assert len(helpers.records(run)) < before + 15
    filler.unlink()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert [r["update"] for r in lines(run) if "loss" in r] == list(range(120))
    for words in (
        "metrics.jsonl could not be written: No space left on device",
        "; the run goes on, the last good checkpoint is kept",
        "there is room again",
    ):
        assert words in output, output
    assert helpers.call(*LONG, f"run.dir={undisturbed}", "job.pause_s=0").returncode == 0
    assert helpers.result(run)["weights_sha256"] == helpers.result(undisturbed)["weights_sha256"]


@pytest.mark.timeout(120)
def test_a_disk_that_stays_full_to_the_end_is_a_failure_that_says_so_and_resumes(disk):
    run = disk / "run"
    few = (*LONG, "train.updates=60")
    process = helpers.begin(*few, f"run.dir={run}")
    helpers.until(lambda: len(helpers.records(run)) >= 12, what="training")
    filler = fill(disk)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Traceback" not in output
    assert "rank 0 on node0 failed first: trained to the end, but the checkpoint after" in output
    assert "No space left on device (os error 28); make room, and resume" in output, output
    assert not (run / "result.json").exists()
    filler.unlink()
    assert helpers.verb("resume", run).returncode == 0
    assert helpers.result(run)["state"] == "finished"
