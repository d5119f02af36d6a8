"""Files of a run folder: private, durable, and no links followed."""

import errno
import os
import random
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.errors import RunFolderError
from orchestrator.rundir import checkpoints as checkpoint
from orchestrator.rundir import files
from orchestrator.rundir.checkpoints import Fence
from orchestrator.rundir.files import (
    open_nofollow,
    read_json,
    start_of_last,
    write_json,
    written_together,
)
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import ProgressWriter
from tests.run_folders import make_run


def links(folder, target):
    """Create one of each kind of link."""
    (folder / "link").symlink_to(target)
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "device").symlink_to("/dev/zero")
    return [folder / name for name in ("link", "dangling", "device")]


def test_links_are_neither_read_nor_written(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("keep")
    (tmp_path / "in").mkdir()
    for path in links(tmp_path / "in", precious):
        for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_RDWR | os.O_CREAT):
            with pytest.raises(RunFolderError, match="holds regular files and folders only"):
                os.close(open_nofollow(path, flags))
        with pytest.raises(RunFolderError):
            read_json(path)
        with pytest.raises(RunFolderError):
            ProgressWriter(path)
        with pytest.raises(RunFolderError):
            Fence(path, 3).publish()
    assert precious.read_text() == "keep"
    assert not (tmp_path / "in" / "nowhere").exists()


@pytest.mark.parametrize("name", ["logs", "attempts/000", "tensorboard"])
def test_linked_folder_is_refused(tmp_path, name):
    run = make_run(tmp_path / "run")
    run.begin_attempt()
    elsewhere = tmp_path / "elsewhere"
    path = run.path / name
    if path.exists():
        path.rename(elsewhere)
    else:
        elsewhere.mkdir()
    path.symlink_to(elsewhere)
    with pytest.raises(RunFolderError, match="is a link"):
        run.existing()


def test_a_write_replaces_a_link_and_not_what_it_points_to(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("keep")
    (tmp_path / "plan.json").symlink_to(precious)
    write_json(tmp_path / "plan.json", {"ranks": 2})
    assert precious.read_text() == "keep"
    assert read_json(tmp_path / "plan.json") == {"ranks": 2}


def test_of_two_that_start_in_one_folder_one_wins_and_keeps_it(tmp_path):
    """60 pairs, released together; the loser is refused and touches nothing of the winner's."""
    chance = random.Random(7)

    def start(folder, gate, delay_s):
        run = RunDir(folder)
        gate.wait()
        time.sleep(delay_s)
        try:
            run.create()
            run.write_config("job: {}\n")
        except RunFolderError as error:
            run.withdraw()
            return str(error)
        return "made"

    with ThreadPoolExecutor(2) as threads:
        for pair in range(60):
            folder, gate = tmp_path / f"{pair}", threading.Barrier(2)
            if pair % 3 == 0:
                folder.mkdir()
            pair_of = [threads.submit(start, folder, gate, chance.random() / 5000) for _ in "12"]
            outcomes = [one.result() for one in pair_of]
            assert sorted(outcome == "made" for outcome in outcomes) == [False, True], outcomes
            names = {path.name for path in folder.iterdir()}
            assert names == {".lock", "config.yaml", "logs", "checkpoints", "attempts"}


@pytest.mark.parametrize("was_there", [False, True])
def test_a_start_that_is_refused_takes_back_what_it_made_and_no_more(tmp_path, was_there):
    run = RunDir(tmp_path / "run")
    if was_there:
        run.path.mkdir()
    run.create()
    run.write_config("job: {}\n")
    run.withdraw()
    assert run.path.exists() == was_there
    assert [p for p in tmp_path.rglob("*") if p != run.path] == []


@pytest.mark.parametrize("was_there", [False, True])
def test_a_folder_is_private_whatever_the_umask(tmp_path, was_there):
    before = os.umask(0)
    if was_there:
        (tmp_path / "run").mkdir()
    try:
        run = make_run(tmp_path / "run")
        os.umask(0o277)
        run.begin_attempt()
    finally:
        os.umask(before)
    modes = {p.name: p.stat().st_mode & 0o777 for p in [run.path, *run.path.rglob("*")]}
    assert {modes[name] for name in ("run", "logs", "attempts", "000")} == {0o700}
    assert not any(mode & 0o077 for mode in modes.values()), modes


def test_files_of_a_run_belong_to_the_group_of_a_projects_folder(tmp_path):
    tmp_path.chmod(0o2770)  # its new folders inherit the group and the setgid bit
    run = make_run(tmp_path / "run")
    run.begin_attempt()
    folders = [run.path, run.logs, run.attempt(0)]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o2700}


@pytest.mark.parametrize("lines", range(5))
@pytest.mark.parametrize("text", ["", "a", "a\n", "a\nb", "\n\na\nb\n"])
def test_the_last_lines_of_a_file_are_found(tmp_path, text, lines):
    (tmp_path / "log").write_text(text)
    wanted = "".join(text.splitlines(keepends=True)[-lines:] if lines else [])
    assert text[start_of_last(tmp_path / "log", lines) :] == wanted


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


def test_new_files_wait_for_the_disk_together_and_replaced_ones_alone(tmp_path, calls, monkeypatch):
    write_json(tmp_path / "old.json", {"a": 1})
    calls.clear()
    real = files._sync_disks
    monkeypatch.setattr(  # called all the same
        files, "_sync_disks", lambda folders: calls.append(("disk", "")) or real(folders)
    )
    with written_together([tmp_path]):
        for number in range(3):
            write_json(tmp_path / f"{number}.json", {"a": number})
        assert {name for name, _ in calls} == {"replace"}
        write_json(tmp_path / "old.json", {"a": 2})
    assert [name for name, _ in calls] == ["replace"] * 3 + ["fsync", "replace", "disk"]
    write_json(tmp_path / "later.json", {})
    assert [name for name, _ in calls[-2:]] == ["fsync", "replace"]
    assert calls[-2][1] == calls[-1][1] != "later.json"


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


def test_a_folder_with_a_files_name_is_named(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(RunFolderError, match=r"a\.json is a folder, but must be a file"):
        write_json(tmp_path / "a.json", {})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


# ------------------------------------------------------------------ The folder


@pytest.mark.parametrize(
    ("file", "folder", "said"),
    [
        ("config.yaml", ".", "resume"),
        ("thesis.tex", ".", "not empty"),
        ("notes", "notes", "is a file"),
        ("notes", "notes/run", "cannot be created: .*/notes is a file"),
        ("notes", "notes/today/run", "cannot be created: .*/notes is a file"),
        ("notes", "/proc/nowhere/run", "cannot be written"),
    ],
)
def test_a_place_that_cannot_be_a_new_runs_folder_is_refused(tmp_path, file, folder, said):
    (tmp_path / file).touch()
    with pytest.raises(RunFolderError, match=said):
        RunDir(tmp_path / folder).create()


def test_attempt_of_another_start_is_refused(tmp_path, monkeypatch):
    run = RunDir(tmp_path / "run")
    run.create()
    monkeypatch.setattr(run, "attempts_made", lambda: 0)  # as it was when the other one looked
    run.begin_attempt()
    with pytest.raises(RunFolderError, match=r"attempt 0 of .* was begun by another start"):
        run.begin_attempt()


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"a": 2})
    assert read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_folder_without_a_run_is_not_resumed(tmp_path):
    with pytest.raises(RunFolderError, match="there is no run folder"):
        RunDir(tmp_path / "absent").existing()
    with pytest.raises(RunFolderError, match="is not a run folder"):
        RunDir(tmp_path).existing()
