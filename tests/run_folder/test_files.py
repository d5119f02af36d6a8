"""Files of a run folder: regular ones only, nothing is followed out of it, nothing waits."""

import os
import random
import shutil
import threading
import time

import pytest
from rich.console import Console

from orchestrator.config.composer import compose
from orchestrator.config.reading import to_yaml
from orchestrator.errors import RunFolderError, UsageError
from orchestrator.lifecycle.checkpoint import check_initial, digest_of
from orchestrator.lifecycle.fence import Fence
from orchestrator.lifecycle.signs.progress import ProgressWriter
from orchestrator.outcome.lock_holder import held
from orchestrator.report.metrics import read_metrics
from orchestrator.report.safetensors_file import SafetensorsFile
from orchestrator.run_folder import files
from orchestrator.run_folder.files import open_regular, read_bytes, start_of_last
from orchestrator.run_folder.rundir import (
    INITIAL_BYTES,
    INITIAL_DIGEST,
    RunDir,
    read_json,
    write_json,
)
from orchestrator.runs.console import Manner
from orchestrator.runs.start import resumed
from orchestrator.runs.status import statuses


def other_things(folder, target):
    """One of everything that is no regular file, under names."""
    (folder / "link").symlink_to(target)
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "device").symlink_to("/dev/zero")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "fifo")
    return [folder / name for name in ("link", "dangling", "device", "folder", "fifo")]


@pytest.mark.timeout(120)
def test_what_is_no_regular_file_is_neither_read_nor_written_nor_waited_for(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("keep")
    (tmp_path / "in").mkdir()
    for path in other_things(tmp_path / "in", precious):
        for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_RDWR | os.O_CREAT):
            with pytest.raises(RunFolderError, match="holds regular files and folders only"):
                os.close(open_regular(path, flags))
        with pytest.raises(RunFolderError):
            read_json(path)
        with pytest.raises(RunFolderError):
            ProgressWriter(path)
        with pytest.raises(RunFolderError):
            Fence(path, 3).take()
    assert precious.read_text() == "keep"
    assert not (tmp_path / "in" / "nowhere").exists()


def test_a_lock_that_is_a_link_never_empties_what_it_points_to(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("keep")
    run = made(tmp_path / "run")
    run.lock.unlink()
    run.lock.symlink_to(precious)
    with pytest.raises(RunFolderError, match="is a link"), held(run):
        raise AssertionError("it was held")
    assert precious.read_text() == "keep"


@pytest.mark.parametrize("name", ["logs", "checkpoints", "attempts", "attempts/000", "tensorboard"])
def test_a_folder_that_leads_elsewhere_is_refused_before_anything_is_written(tmp_path, name):
    run = made(tmp_path / "run")
    run.begin_attempt()
    elsewhere = tmp_path / "elsewhere"
    place = run.path / name
    if place.exists():
        place.rename(elsewhere)
    else:
        elsewhere.mkdir()
    place.symlink_to(elsewhere)
    with pytest.raises(RunFolderError, match="is a link"):
        run.existing()


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return made(tmp_path_factory.mktemp("files") / "run").path


def damaged_by(kind, path, outside):
    """Put something in a file's place that leads a write, or a reader's patience, elsewhere."""
    path.unlink(missing_ok=True)
    if kind == "a fifo":
        os.mkfifo(path)
    elif kind == "a link":
        path.symlink_to(outside)
    elif kind == "a second name":
        path.hardlink_to(outside)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "larger than":
        path.touch()
        os.truncate(path, 1 << 40)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["a fifo", "a link", "a second name", "a folder"])
@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", ".lock", "attempts/newest", "logs/node0.log", "logs/ranks-00512/x.log"],
)
def test_a_start_writes_into_no_file_that_is_not_its_runs_alone(sound, tmp_path, name, kind):
    run = RunDir(shutil.copytree(sound, tmp_path / "run"))
    precious = tmp_path / "precious"
    precious.write_text("keep")
    (run.path / name).parent.mkdir(exist_ok=True)
    damaged_by(kind, run.path / name, precious)
    with pytest.raises(RunFolderError, match=rf"{(run.path / name).name} .*{kind}"):
        resumed(run.path, Manner(console=Console(quiet=True))).__enter__()
    assert precious.read_text() == "keep"
    assert run.attempts_made() == 0


@pytest.mark.timeout(120)
def test_metrics_without_an_end_are_refused_before_a_start(sound, tmp_path):
    run = RunDir(shutil.copytree(sound, tmp_path / "run"))
    damaged_by("larger than", run.metrics, None)
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl is damaged: it is larger than"):
        resumed(run.path, Manner(console=Console(quiet=True))).__enter__()
    with pytest.raises(RunFolderError, match="larger than"):
        read_metrics(run.metrics)


def test_a_file_with_a_second_name_may_still_be_read(tmp_path):
    (tmp_path / "one").write_text("text")
    (tmp_path / "two").hardlink_to(tmp_path / "one")
    assert read_bytes(tmp_path / "two") == b"text"


@pytest.mark.timeout(120)
def test_weights_that_are_no_regular_file_are_refused_at_once(tmp_path):
    for path in other_things(tmp_path, tmp_path):
        if path.name not in ("link", "dangling"):
            with pytest.raises(UsageError, match="no regular file"):
                SafetensorsFile(path)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("damage", ["a fifo", "a link", "larger than", "gone"])
def test_initial_weights_that_are_not_those_of_the_start_are_refused_at_once(
    sound, tmp_path, damage
):
    run = RunDir(shutil.copytree(sound, tmp_path / "run"))
    run.initial_weights.write_bytes(b"weights")
    digest = {INITIAL_DIGEST: digest_of(run.initial_weights), INITIAL_BYTES: 7}
    run.write_own(run.submission, {**run.read_submission(), **digest})
    check_initial(run)
    damaged_by(damage, run.initial_weights, tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match=r"initial_weights\.safetensors "):
        check_initial(run)


def test_a_write_replaces_a_link_and_not_what_it_points_to(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("keep")
    (tmp_path / "plan.json").symlink_to(precious)
    write_json(tmp_path / "plan.json", {"ranks": 2})
    assert precious.read_text() == "keep"
    assert read_json(tmp_path / "plan.json") == {"ranks": 2}


def test_files_are_read_up_to_a_bound(tmp_path):
    path = tmp_path / "large"
    path.touch()
    os.truncate(path, 1 << 40)  # a hole: no such disk is needed
    with pytest.raises(RunFolderError, match="larger than"):
        read_bytes(path, at_most=1000)


def made(path):
    """A run folder as a start makes it, nothing trained."""
    run = RunDir(path)
    run.create()
    run.write_config(to_yaml(compose(["train.updates=3"])))
    run.write_own(run.submission, {"cluster": "local", "sealed": True})
    run.write_own(run.plan, {"updates": 3, "ranks": 4})
    return run


def test_of_two_that_start_in_one_folder_one_wins_and_keeps_it(tmp_path):
    """300 pairs, released together; the loser is refused and touches nothing of the winner's."""
    chance = random.Random(7)
    for pair in range(300):
        folder = tmp_path / f"{pair}"
        if pair % 3 == 0:
            folder.mkdir()
        gate = threading.Barrier(2)
        outcomes = []
        delays = [chance.random() / 5000 for _ in range(2)]

        def start(folder=folder, gate=gate, outcomes=outcomes, delays=delays):
            run = RunDir(folder)
            time.sleep(delays[gate.wait()])
            try:
                run.create()
                run.write_config("job: {}\n")
                outcomes.append("made")
            except RunFolderError as error:
                run.withdraw()
                outcomes.append(str(error))

        threads = [threading.Thread(target=start) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcome == "made" for outcome in outcomes) == [False, True], outcomes
        assert RunDir(folder).config.is_file()
        assert {p.name for p in folder.iterdir()} == {
            ".lock", "config.yaml", "logs", "checkpoints", "attempts",
        }  # fmt: skip


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


def test_a_folder_is_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        run = made(tmp_path / "run")
        os.umask(0o277)
        run.begin_attempt()
    finally:
        os.umask(before)
    modes = {p.name: p.stat().st_mode & 0o777 for p in [run.path, *run.path.rglob("*")]}
    assert {modes[name] for name in ("run", "logs", "attempts", "000")} == {0o700}
    assert not any(mode & 0o077 for mode in modes.values()), modes


def test_one_damaged_run_hides_no_other_in_status(tmp_path):
    sound = made(tmp_path / "sound")
    for name in ("a", "b", "z"):
        made(tmp_path / name)
    (tmp_path / "a" / "plan.json").write_bytes(b"\xff\xfe")
    (tmp_path / "b" / "submission.json").unlink()
    (tmp_path / "b" / "submission.json").mkdir()
    (tmp_path / "z" / "result.json").write_text("[" * 100_000)
    runs = [RunDir(tmp_path / name) for name in ("a", "b", "sound", "z")]
    found, _ = statuses(runs)
    assert [status.state for status in found] == ["damaged", "damaged", "lost", "damaged"]
    assert found[2].folder == sound.path
    assert "plan.json is damaged: it is not UTF-8" in found[0].reason


def test_the_last_lines_of_a_file_are_found_wherever_pieces_of_it_end(tmp_path, monkeypatch):
    chance, path = random.Random(5), tmp_path / "log"
    for _ in range(400):
        text = "".join(chance.choices("ab\n", k=chance.randrange(24)))
        # pieces so small that lines end anywhere in them
        monkeypatch.setattr(files, "BLOCK", chance.randint(1, 9))
        path.write_text(text)
        for lines in range(6):
            wanted = "".join(text.splitlines(keepends=True)[-lines:] if lines else [])
            assert text[start_of_last(path, lines) :] == wanted, (text, lines)
