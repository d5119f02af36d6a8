"""A run's code is unpacked once on each node, is nobody else's, and is gone when nobody runs it."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import snapshot, start_from_copy
from orchestrator.start_from_copy import DISK, MEMORY, NAME, SMALL_BYTES, bases, remove
from tests.helpers import until

PROGRAM = """\
import mine, os, sys, time
print(mine.__file__, os.environ["PYTHONPATH"], flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the code of a run."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "mine.py").write_text("mine = 1\n")
    (source / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(snapshot, "source_roots", lambda _: {source: {"mine", "program"}})
    snapshot.take("mine.Job", tmp_path / "nowhere", tmp_path / "code" / "000")
    return tmp_path / "code" / "000"


@pytest.fixture
def start(copy, tmp_path):
    """Start a rank on a node; its local disk is `tmp_path/NODE`."""
    running = []

    def start(node="n0", rank=0, seconds=0.0, **more):
        (tmp_path / node).mkdir(exist_ok=True)
        env = {
            "TMPDIR": str(tmp_path / node), "SLURM_JOB_ID": "7", "SLURMD_NODENAME": node,
            "SLURM_LOCALID": str(rank), "PYTHONPATH": "/site", **more,
        }  # fmt: skip
        words = ["-I", f"{copy}.py", copy, "0/program.py", str(seconds)]
        process = subprocess.Popen(
            [sys.executable, *words], env=env, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def copies(tmp_path, node="n0"):
    return sorted((tmp_path / node).glob(f"{NAME}-*"))


def test_ranks_of_a_node_share_one_copy_that_is_theirs_alone_and_comes_first(start, tmp_path):
    ranks = [start(node, rank) for node in ("n0", "n1") for rank in range(4)]
    said = {process.communicate()[0] for process in ranks}
    assert all(process.returncode == 0 for process in ranks)
    places = [*copies(tmp_path, "n0"), *copies(tmp_path, "n1")]
    assert said == {f"{place}/0/mine.py {place}/0:/site\n" for place in places}
    assert len(places) == 2
    assert {place.stat().st_mode & 0o777 for place in places} == {0o700}


def test_it_is_removed_when_nobody_runs_from_it_also_what_another_job_left(start, tmp_path):
    one = start(seconds=60)
    until(one.stdout.readline, what="its start")
    (place,) = copies(tmp_path)
    remove(place)
    assert place.exists()
    os.kill(one.pid, signal.SIGKILL)
    one.wait()
    start(SLURM_JOB_ID="8").communicate()
    (other,) = copies(tmp_path)
    assert other.name != place.name
    remove(other)
    assert not copies(tmp_path)


def test_one_that_was_killed_while_it_unpacked_is_begun_again(start, tmp_path):
    start().communicate()
    (place,) = copies(tmp_path)
    (place / "whole").unlink()
    (place / "0" / "mine.py").write_text("mine = 2\n")
    process = start()
    process.communicate()
    assert process.returncode == 0
    assert (place / "0" / "mine.py").read_text() == "mine = 1\n"


def test_a_folder_that_is_open_to_others_or_a_link_is_not_used_and_that_is_said(start, tmp_path):
    for befall in (lambda p: p.mkdir(mode=0o777) or p.chmod(0o777), lambda p: p.symlink_to("/")):
        start().communicate()
        (place,) = copies(tmp_path)
        shutil.rmtree(place)
        befall(place)
        out, err = start().communicate()
        assert out.startswith(f"{tmp_path}/code/{place.name}/0/mine.py")
        assert err.startswith(f"note: the code is unpacked in {tmp_path}/code: it cannot be in ")
        place.unlink() if place.is_symlink() else place.rmdir()


@pytest.mark.parametrize("local", ["/dev/null", "/proc", "/nowhere"])
def test_without_a_local_disk_it_is_unpacked_in_the_run_folder_and_that_is_said(
    start, tmp_path, local
):
    out, err = start(TMPDIR=local).communicate()
    assert out.startswith(f"{tmp_path}/code/{NAME}-")
    assert f"it cannot be in {local} (" in err


@pytest.mark.parametrize("suffix", [".tar", ".py", ".sha256"])
def test_nothing_is_unpacked_that_was_changed(start, copy, tmp_path, suffix):
    changed = Path(f"{copy}{suffix}")
    changed.write_bytes(changed.read_bytes() + b"\n#")
    process = start()
    _, err = process.communicate()
    assert process.returncode == 1
    assert f"error: the code in {copy}.tar is damaged" in err
    assert not [path for place in copies(tmp_path) for path in place.iterdir()]


def test_a_job_of_the_same_number_runs_its_own_code(start, copy, tmp_path):
    start().communicate()
    (tmp_path / "source" / "mine.py").write_text("mine = 2\n")
    snapshot.take("mine.Job", tmp_path / "nowhere", copy)
    out, _ = start().communicate()
    assert Path(out.split()[0]).read_text() == "mine = 2\n"


def test_without_tmpdir_what_is_small_is_in_memory_and_what_is_large_on_the_disk(copy, monkeypatch):
    archive = Path(f"{copy}.tar")
    monkeypatch.delenv("TMPDIR", raising=False)
    assert bases(str(copy)) == [MEMORY, DISK, copy.parent]
    monkeypatch.setenv("TMPDIR", str(DISK))  # as slurmd sets it
    assert bases(str(copy)) == [MEMORY, DISK, copy.parent]
    os.truncate(archive, SMALL_BYTES + 1)
    assert bases(str(copy)) == [DISK, copy.parent]
    os.truncate(archive, SMALL_BYTES)
    # a machine without it
    monkeypatch.setattr(start_from_copy, "MEMORY", copy / "nowhere")
    assert bases(str(copy)) == [DISK, copy.parent]
    monkeypatch.setenv("TMPDIR", "/scratch")
    assert bases(str(copy)) == [Path("/scratch"), copy.parent]
