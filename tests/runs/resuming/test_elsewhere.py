"""Resuming from another folder means the same files and modules as the submission did."""

import sys
from pathlib import Path

import pytest

from orchestrator.errors import RunFolderError
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.runs.resuming.elsewhere import at_home


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run")
    run.create()
    write_json(run.submission, {"folder": str(tmp_path / "project")})
    return run


def test_a_resume_stands_where_the_run_was_submitted(run, tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", [str(elsewhere), "/usr/lib/python"])
    with at_home(run):
        assert Path.cwd() == tmp_path / "project"
        assert sys.path == [str(tmp_path / "project"), "/usr/lib/python"]
    assert Path.cwd() == elsewhere
    assert sys.path == [str(elsewhere), "/usr/lib/python"]


@pytest.mark.parametrize(
    ("given", "stays"), [("", True), ("{elsewhere}", True), (".", False), ("/usr/lib:", False)]
)
def test_what_names_a_folder_in_full_stays_wherever_one_stands(
    given, stays, run, tmp_path, monkeypatch
):
    """`python -m` puts the folder first; a relative PYTHONPATH means it, too; an installation or a
    full path does not.
    """
    (tmp_path / "project").mkdir()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("PYTHONPATH", given.format(elsewhere=elsewhere))
    monkeypatch.setattr(sys, "path", [str(elsewhere), "/usr/lib/python", str(elsewhere)])
    with at_home(run):
        second = elsewhere if stays else tmp_path / "project"
        assert sys.path == [str(tmp_path / "project"), "/usr/lib/python", str(second)]


def test_a_folder_of_submission_that_is_gone_is_named(run, tmp_path):
    with (
        pytest.raises(RunFolderError, match=r"was submitted in .*project, .* entered"),
        at_home(run),
    ):
        raise AssertionError
