"""A resume that is refused before its ranks are placed leaves the run as it was, in bytes; a new
run is removed then, and never once an attempt may have saved something.
"""

import contextlib
import errno
import json
import os

import pytest

from orchestrator.config.composer import compose
from orchestrator.config.program import is_program
from orchestrator.errors import ClusterError, RefusedByRank, RunFailed, RunFolderError
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.runs.follow import OutputOptions
from orchestrator.runs.resume import prepared_resume
from orchestrator.runs.start import prepared_run
from tests.helpers import LIGHT, SMALL, call, contents, verb
from tests.programs import QUICK, script
from tests.run_folders import Screen

pytestmark = pytest.mark.whole_runs

SHAPE = (
    LIGHT,
    SMALL,
    "tracker=none",
    "accumulation.global_batch=40",
    "accumulation.steps=2",
    "train.updates=4",
)
FAILS = f"{QUICK}\nsys.exit(1)\n"
PAGE = 4096
LONGER = ["train.updates=200"]


def quiet():
    return OutputOptions(console=Screen(), quiet=True)


@contextlib.contextmanager
def without_ranks(run):
    """Let no attempt start: a link is in the place of a log, which may lead out of the folder."""
    log = run / "logs" / "node0.log"
    kept = log.rename(run / "logs" / "kept")
    log.symlink_to(kept)
    yield
    log.unlink()
    kept.rename(log)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = tmp_path_factory.mktemp("withdrawn") / "run"
    call(*SHAPE, f"run.dir={run}", code=0)
    return run


@pytest.mark.parametrize("number", ["the first", "a later"])
def test_a_finished_run_whose_longer_resume_is_refused_is_finished(finished, number):
    """The second time the refusal meets what the first has put back."""
    before = contents(finished)
    with without_ranks(finished):
        refused = verb("resume", finished, *LONGER, code=2)
        assert "is a link" in refused.stderr, number
    assert contents(finished) == before
    assert "has finished already" in verb("resume", finished, code=0).stdout
    assert contents(finished) == before


def test_a_program_whose_resume_is_refused_has_the_settings_that_it_had(tmp_path):
    run = tmp_path / "run"
    script(tmp_path, FAILS)
    words = (SMALL, f"run.dir={run}", "--", "train.py")
    call("run", *words, module="orchestrator", cwd=tmp_path, code=1)
    before = contents(run)
    with without_ranks(run):
        verb("resume", run, "run.max_restarts=3", "cluster.nodes=1", code=2)
    assert contents(run) == before
    assert json.loads(verb("status", run, "--json").stdout)[0]["state"] == "failed"


def test_a_resume_for_which_the_disk_has_no_room_changes_nothing(disk):
    """Page by page more of its files fit, until all of them do."""
    run = disk.folder / "run"
    call(*SHAPE, f"run.dir={run}", code=0)
    before, pages = contents(run), 0
    while (plan := json.loads((run / "plan.json").read_text()))["updates"] == 4:
        disk.fill()
        with (disk.folder / "filler").open("r+b") as file:
            file.truncate(file.seek(0, 2) - pages * PAGE)
        with contextlib.suppress(RunFailed), prepared_resume(run, quiet(), LONGER):
            disk.make_room()
            continue
        disk.make_room()
        assert contents(run) == before, f"with {pages} pages"
        pages += 1
    assert plan["updates"] == 200
    assert pages > 2


def test_what_a_submission_has_written_goes_with_it_and_the_handle_comes_back(finished):
    """A run that was on a scheduler once and is to go on here; then an error ends the command."""
    run = RunDir(finished)
    write_json(run.handle, {"kind": "local", "job_id": "7", "attempt": 0, "slurm_conf": None})
    write_json(run.cancel, {"how": "stop", "time": 1.0})
    run.code.mkdir(exist_ok=True)
    before = contents(finished)

    def give_up():
        with prepared_resume(finished, quiet(), [*LONGER, "run.note=x"]) as ready:
            assert not any(path.exists() for path in (run.handle, run.cancel, run.result))
            assert not ready.is_queued
            run.snapshot(1).mkdir()
            (run.snapshot(1) / "job.py").touch()
            run.submitit.mkdir(exist_ok=True)
            (run.submitit / "001.sh").touch()
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        give_up()
    assert contents(finished) == before
    run.handle.unlink()
    run.cancel.unlink()
    run.code.rmdir()


def test_what_begins_or_may_be_queued_is_not_put_back(finished):
    run = RunDir(finished)
    before = contents(finished)
    with prepared_resume(finished, quiet(), LONGER) as ready:
        run.submitting.touch()
    ready.withdraw()
    assert run.read_plan()["updates"] == 200
    run.submitting.unlink()
    job = {"kind": "local", "job_id": "8", "attempt": 1, "slurm_conf": None}
    write_json(run.handle, job)
    ready.withdraw()
    assert run.read_plan()["updates"] == 200
    run.handle.unlink()
    run.begin_attempt()
    ready.withdraw()
    assert run.read_plan()["updates"] == 200
    run.attempt(1).rmdir()
    ready.withdraw()
    assert contents(finished) == before


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def begin_and_raise(config, error, *, attempt, saved):
    """Begin a run, and an attempt of it that saves something, and end the launcher with an error.
    Return the run.
    """
    with prepared_run(config, quiet()) as ready:
        if attempt:
            ready.run.begin_attempt()
        if saved:
            (ready.run.checkpoints / "model.bin").write_text("weights")
        raise error


@pytest.mark.parametrize("program", [True, False])
@pytest.mark.parametrize(
    ("error", "attempt", "saved", "kept", "raised"),
    [
        (FULL, True, True, True, RunFailed),
        (RunFolderError("plan.json cannot be read"), True, True, True, RunFolderError),
        (RunFolderError("plan.json cannot be read"), True, False, True, RunFolderError),
        (RefusedByRank("data_dir is empty"), True, True, True, RefusedByRank),
        (FULL, False, False, False, RunFolderError),
        (ClusterError("no such partition"), False, False, False, ClusterError),
    ],
)
def test_a_new_run_is_removed_only_before_its_first_attempt(
    tmp_path, monkeypatch, program, error, attempt, saved, kept, raised
):
    """A program need not report: without metrics.jsonl it may have trained for days."""
    monkeypatch.chdir(tmp_path)
    run = RunDir(tmp_path / "run")
    script(tmp_path, QUICK)
    job = ["job.command=[train.py]", "job.style=plain"] if program else ["train.updates=1"]
    config = compose([*job, f"run.dir={run.path}", "cluster.nodes=1", "cluster.ranks_per_node=1"])
    assert is_program(config.job) == program
    with pytest.raises(raised):
        begin_and_raise(config, error, attempt=attempt, saved=saved)
    assert run.path.exists() == kept
    assert (run.checkpoints / "model.bin").exists() == saved


def test_a_job_that_a_rank_refuses_leaves_no_folder(tmp_path):
    config = compose(["train.updates=1", f"run.dir={tmp_path / 'run'}"])
    with pytest.raises(RefusedByRank):
        begin_and_raise(config, RefusedByRank("wrong"), attempt=True, saved=False)
    assert not (tmp_path / "run").exists()
