"""What is written survives a crash at any point: seen from outside, at every call that counts."""

import os
from pathlib import Path

import pytest

from orchestrator.lifecycle import checkpoint
from orchestrator.run_folder import rundir
from orchestrator.run_folder.rundir import read_json, write_json, written_together

# Spies that call the real thing: whether data reached the disk cannot be seen without a power cut.
CALLS = ("fsync", "rename", "replace")


def path_of(descriptor):
    return Path(f"/proc/self/fd/{descriptor}").readlink().name


@pytest.fixture
def calls(monkeypatch):
    """The calls of `os` in order, as (name, file's name)."""
    seen = []

    def spied(name):
        real = getattr(os, name)

        def call(*arguments, **more):
            first = arguments[0]
            seen.append((name, path_of(first) if isinstance(first, int) else Path(first).name))
            return real(*arguments, **more)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, spied(name))
    return seen


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path, calls):
    write_json(tmp_path / "x.json", {"a": 1})
    assert [name for name, _ in calls] == ["fsync", "replace"]
    assert calls[0][1] == calls[1][1] != "x.json"


def test_many_new_files_wait_for_the_disk_together_and_what_is_replaced_for_itself(
    tmp_path, calls, monkeypatch
):
    write_json(tmp_path / "old.json", {"a": 1})
    calls.clear()
    real = rundir.wait_for_disk
    monkeypatch.setattr(  # called all the same
        rundir, "wait_for_disk", lambda folders: calls.append(("disk", "")) or real(folders)
    )
    with written_together([tmp_path]):
        for number in range(3):
            write_json(tmp_path / f"{number}.json", {"a": number})
        assert {name for name, _ in calls} == {"replace"}
        write_json(tmp_path / "old.json", {"a": 2})
    assert [name for name, _ in calls] == ["replace"] * 3 + ["fsync", "replace", "disk"]
    write_json(tmp_path / "later.json", {})
    assert calls[-2][0] == "fsync"


def test_a_disk_that_cannot_take_what_was_written_together_is_said(tmp_path):
    with pytest.raises(FileNotFoundError), written_together([tmp_path / "gone"]):
        pass


class Engine:
    def save_state(self, folder):
        (folder / checkpoint.WEIGHTS).write_bytes(b"weights")
        (folder / "optimizer.safetensors").write_bytes(b"optimizer")
        return {}


def test_a_checkpoint_is_on_the_disk_whole_before_it_appears(tmp_path, calls):
    final = checkpoint.save(tmp_path, Engine(), updates=3, samples=30, keep=2)
    appears = next(n for n, (call, _) in enumerate(calls) if call == "rename")
    partial = calls[appears][1]
    before = {name for call, name in calls[:appears] if call == "fsync"}
    assert {checkpoint.WEIGHTS, "optimizer.safetensors", partial} <= before
    assert any(checkpoint.STATE in name for name in before)
    assert ("fsync", tmp_path.name) in calls[appears + 1 :]
    assert final.name not in [name for _, name in calls[:appears]]


@pytest.mark.parametrize("step", range(12))
def test_a_crash_at_any_step_leaves_a_sound_checkpoint(tmp_path, step):
    """A child process dies at its n-th call; what it leaves is sound."""
    checkpoint.save(tmp_path, Engine(), updates=1, samples=10, keep=2)
    child = os.fork()
    if child == 0:
        left = [step]

        def dying(real):
            def call(*arguments, **more):
                if left[0] == 0:
                    os._exit(9)
                left[0] -= 1
                return real(*arguments, **more)

            return call

        for name in (*CALLS, "mkdir"):
            setattr(os, name, dying(getattr(os, name)))
        checkpoint.save(tmp_path, Engine(), updates=2, samples=20, keep=2)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    found, passed_over = checkpoint.newest(tmp_path)
    assert passed_over == []
    assert found.updates in (1, 2)
    assert (found.folder / checkpoint.WEIGHTS).read_bytes() == b"weights"
    if os.waitstatus_to_exitcode(status) == 0:
        assert found.updates == 2
    assert read_json(found.folder / checkpoint.STATE)["updates"] == found.updates
