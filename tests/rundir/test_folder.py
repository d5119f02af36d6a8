"""The run folder: private, never another run's, written whole or not at all."""

import stat
from pathlib import Path

import pytest

from orchestrator.errors import RunFolderError
from orchestrator.rundir.files import read_json, write_json
from orchestrator.rundir.folder import RunDir


def test_an_empty_folder_is_taken_and_made_private(tmp_path):
    tmp_path.chmod(0o755)
    RunDir(tmp_path).create()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_another_runs_folder_is_refused_with_the_way_to_resume_it(tmp_path):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(RunFolderError, match="resume"):
        RunDir(tmp_path).create()


def test_a_folder_with_other_things_or_a_file_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunFolderError, match="not empty"):
        RunDir(tmp_path).create()
    with pytest.raises(RunFolderError, match="is a file"):
        RunDir(tmp_path / "thesis.tex").create()


def test_a_place_that_cannot_be_written_is_said_in_words():
    with pytest.raises(RunFolderError, match="cannot be written"):
        RunDir(Path("/proc/nowhere/run")).create()


def test_a_place_below_a_file_is_refused_by_the_files_name(tmp_path):
    file = tmp_path / "notes"
    file.touch()
    for path in (file / "run", file / "today" / "run"):
        with pytest.raises(RunFolderError, match=f"cannot be created: {file} is a file"):
            RunDir(path).create()


def test_an_attempt_that_another_start_began_is_refused_in_words(tmp_path, monkeypatch):
    run = RunDir(tmp_path / "run")
    run.create()
    monkeypatch.setattr(run, "attempts_made", lambda: 0)  # as it was when the other one looked
    run.begin_attempt()
    with pytest.raises(RunFolderError, match=r"attempt 0 of .* was begun by another start"):
        run.begin_attempt()


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_folder_without_a_run_is_not_resumed(tmp_path):
    with pytest.raises(RunFolderError, match="there is no run folder"):
        RunDir(tmp_path / "absent").existing()
    with pytest.raises(RunFolderError, match="is not a run folder"):
        RunDir(tmp_path).existing()
