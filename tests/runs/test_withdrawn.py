"""A resume that is refused before its ranks are placed leaves the run as it was, in bytes."""

import contextlib
import json

import pytest

from orchestrator.errors import RunFailed
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.runs.follow import OutputOptions
from orchestrator.runs.resume import prepared_resume
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
