"""A run folder that takes no data for a while: real file systems, one full and one read-only."""

import json
import os
import re
import shutil
import subprocess

import pytest

from slurm.errors import DevClusterError
from slurm.install import ensure_installed
from tests import helpers
from tests.helpers import SMALL, TINY
from tests.hold import Hold

LONG = (
    TINY, SMALL, "train.updates=120", "accumulation.global_batch=24", "accumulation.steps=2",
    "train.checkpoint_every=10", "train.evaluate_every=0", "job.dropout=0.5",
)  # fmt: skip


def must(*command):
    subprocess.run(command, check=True, capture_output=True)


class Full:
    """A file system of 4 MiB, and a file that takes all the room there is."""

    words, programs = "No space left on device", {"mount": ("mount",)}

    def __init__(self, tmp_path):
        self.mounted, self._image = tmp_path / "disk", tmp_path / "image"
        self.mounted.mkdir()
        self.folder = self._make()

    def _make(self):
        must("mount", "-t", "tmpfs", "-o", "size=4m", "none", self.mounted)
        return self.mounted

    def _make_image(self, *command, size):
        with self._image.open("wb") as file:
            file.truncate(size)
        must(*command, self._image)
        must("mount", "-o", "loop", self._image, self.mounted)

    def stop(self):
        with (self.folder / "filler").open("ab", buffering=0) as file:
            for size in (65536, 4096, 1):
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    continue

    def mend(self):
        (self.folder / "filler").unlink()

    def remove(self):
        must("umount", "-l", self.mounted)


class ReadOnly(Full):
    """A file system that stops taking anything, in open files too.

    Another mount namespace has it mounted, too, as those have that tests beside this one make.
    There the superblock that was stopped lives on, and whoever mounts the same image is given it
    again: what is mounted after that is a copy.
    """

    words, programs = "Read-only file system", {"e2fsprogs": ("mkfs.ext4",)}

    def _make(self):
        self._make_image("mkfs.ext4", "-q", size=16 * 2**20)
        self._beside = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", "echo ready && exec sleep 900"],
            stdout=subprocess.PIPE,
        )
        assert self._beside.stdout.readline() == b"ready\n"
        return self.mounted

    def stop(self):
        must("mount", "-o", "remount,abort", self.mounted)

    def mend(self):
        must("umount", self.mounted)
        os.sync()  # the loop device may still hold what it was given
        copy = shutil.copyfile(self._image, self._image.with_name("copy"))
        must("mount", "-o", "loop", copy, self.mounted)

    def remove(self):
        super().remove()
        self._beside.kill()
        self._beside.communicate()


@pytest.fixture
def disk(tmp_path, request):
    """A mounted file system that can be stopped and mended."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system to fill")
    try:
        ensure_installed(request.param.programs, say=print)
    except DevClusterError as error:
        pytest.skip(str(error))
    disk = request.param(tmp_path)
    yield disk
    disk.remove()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert helpers.call(*LONG, f"run.dir={run}").returncode == 0
    return helpers.result(run)["weights_sha256"]


def lines(run):
    text = (run / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("disk", [Full], indirect=True)
@pytest.mark.timeout(180)
def test_a_disk_that_is_full_for_a_while_costs_no_update_no_line_and_no_bit(
    disk, undisturbed, tmp_path
):
    run = disk.folder / "run"
    hold = Hold(tmp_path / "hold").hold_before(12)
    process = helpers.begin(*LONG, hold.override, f"run.dir={run}")
    hold.wait_until_held(12, (0, 1))
    disk.stop()
    hold.hold_before(36)  # it trains on
    hold.wait_until_held(36, (0, 1))
    assert len(helpers.records(run)) < 30
    disk.mend()
    hold.release()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert [r["update"] for r in lines(run) if "loss" in r] == list(range(120))
    for words in (
        f"metrics.jsonl could not be written: {disk.words}",
        "; the run goes on, the last good checkpoint is kept",
        "there is room again",
    ):
        assert words in output, output
    assert helpers.result(run)["weights_sha256"] == undisturbed


@pytest.mark.parametrize("disk", [ReadOnly], indirect=True)
@pytest.mark.timeout(120)
def test_a_disk_that_takes_nothing_to_the_end_is_a_failure_that_says_so_and_resumes(disk, tmp_path):
    run = disk.folder / "run"
    hold = Hold(tmp_path / "hold").hold_before(12)
    process = helpers.begin(*LONG, "train.updates=60", hold.override, f"run.dir={run}")
    hold.wait_until_held(12, (0, 1))
    disk.stop()
    hold.release()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Traceback" not in output
    assert "rank 0 on node0 failed first: trained to the end, but the checkpoint after" in output
    assert re.search(rf"{disk.words}( \(os error \d+\))?; make room, and resume", output), output
    assert not (run / "result.json").exists()
    disk.mend()
    assert helpers.verb("resume", run).returncode == 0
    assert helpers.result(run)["state"] == "finished"
