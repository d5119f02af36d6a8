"""A sample of damaged run folders; `python -m tests.hostile --folders 1000 --seed N` runs more."""

import shutil
from pathlib import Path

import pytest

from orchestrator.cli.status import follow_log
from orchestrator.cli.verbs import final_weights
from orchestrator.errors import RunFolderError
from orchestrator.rundir.files import read_json, write_json
from orchestrator.rundir.folder import RunDir
from tests.hostile.folders import cases, sources, tried

SEED, COUNT = 20261122, 30


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run that was broken off, and one that finished."""
    return sources(tmp_path_factory.mktemp("runs"), finished=True)


def copy(runs, folder) -> RunDir:
    return RunDir(Path(shutil.copytree(runs[0].path, folder / "run")))


def test_no_damaged_folder_ends_in_a_traceback_a_hang_another_result_or_elsewhere(runs, tmp_path):
    wrong = []
    for case in cases(SEED, COUNT, tmp_path, runs, resumed=0.0):
        ended, faults = tried(case)
        if faults:
            wrong.append((case.verb, case.damages, faults, ended.words[-400:]))
    assert not wrong


def test_the_same_seed_damages_the_same_way(runs, tmp_path):
    def first(name):
        found = cases(7, 6, tmp_path / name, runs, resumed=0.0)
        return [(case.verb, str(case.damages).replace(name, "")) for case in found]

    assert first("folder-1") == first("folder-2")  # words that no file has


@pytest.mark.timeout(120)
def test_a_log_is_followed_no_further_when_nobody_can_tell_whether_the_run_has_ended(
    runs, tmp_path
):
    run = copy(runs, tmp_path)
    run.result.write_text("7")
    with pytest.raises(RunFolderError, match=r"result\.json is damaged"):
        list(follow_log(run, None))


def test_weights_that_are_damaged_or_lie_elsewhere_are_not_compared(runs, tmp_path):
    run = copy(runs, tmp_path)
    weights = final_weights(run.path)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(RunFolderError, match="its digest is not the one"):
        final_weights(run.path)
    newest = weights.parent
    shutil.rmtree(newest)
    newest.symlink_to(runs[0].path / "checkpoints" / newest.name)
    with pytest.raises(RunFolderError, match="is a link"):
        final_weights(run.path)


def test_logs_of_many_ranks_are_not_followed_out_of_the_folder(runs, tmp_path):
    run = copy(runs, tmp_path)
    (tmp_path / "rank-00512.log").write_text("somebody else's")
    (run.logs / "ranks-00512").symlink_to(tmp_path)
    with pytest.raises(RunFolderError, match="is a link"):
        run.existing()


@pytest.mark.parametrize("name", ["plan", "submission", "result"])
def test_a_file_of_another_run_says_nothing_about_this_one(runs, tmp_path, name):
    run = copy(runs, tmp_path)
    path, read = getattr(run, name), getattr(run, f"read_{name}")
    assert read()
    write_json(path, {**read_json(path, checked=True), "run": "0" * 16})
    with pytest.raises(RunFolderError, match=rf"{name}\.json is damaged: it is of another run"):
        read()
