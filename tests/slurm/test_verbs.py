"""From another shell: status, logs, cancel, resume, with and without what they could ask."""

import json
import os
import shutil
import signal
import time

import pytest

from slurm import breaking
from tests.helpers import begin, call, result, until
from tests.slurm import runs


def test_cancel_stops_at_a_boundary_and_resume_ends_with_the_same_weights(
    slurm, tmp_path, digest_of_60
):
    run = tmp_path / "run"
    job = runs.submit(slurm, run, "train.updates=60", "job.pause_s=0.06")
    runs.wait_for_update(run, 3)
    assert runs.verb("resume", run).returncode == 2
    done = runs.verb("cancel", run)
    assert done.returncode == 0, done.stderr
    assert "next update boundary" in done.stdout
    stopped = runs.wait_over(slurm, run)
    assert stopped["state"] == "stopped"
    assert runs.accounted(slurm, job) == "COMPLETED"
    assert runs.status(run)["state"] == "stopped"
    assert runs.verb("cancel", run).returncode == 2
    assert runs.verb("resume", run).returncode == 0
    assert runs.wait_over(slurm, run)["weights_sha256"] == digest_of_60
    assert runs.first_records(run)[1]["update"] == stopped["updates"]
    again = runs.verb("resume", run)
    assert "has finished already" in again.stdout


def test_a_run_moves_to_slurm_and_back_and_is_watched_meanwhile(slurm, tmp_path, digest_of_60):
    run = tmp_path / "run"
    begun = call(*runs.BATCH, *runs.SHAPE, "train.updates=20", f"run.dir={run}", **runs.QUIET)
    assert begun.returncode == 0, begun.stdout + begun.stderr
    there = ("cluster=slurm_dev", f"cluster.slurm_conf={slurm.slurm_conf}", *runs.SHAPE)
    moved = runs.verb("resume", run, "train.updates=40", *there)
    assert moved.returncode == 0, moved.stdout + moved.stderr
    assert "going on after update 20 of 40" in moved.stdout
    watched = runs.verb("attach", run, timeout=90)
    assert watched.returncode == 0, watched.stderr
    assert "40 of 40" in watched.stdout
    back = runs.verb("resume", run, "train.updates=60", "cluster=local", *runs.SHAPE)
    assert back.returncode == 0, back.stdout + back.stderr
    assert result(run)["weights_sha256"] == digest_of_60
    assert runs.status(run)["state"] == "finished"


def test_cancel_now_ends_a_job_at_once_that_was_stopped_as_a_whole(slurm, tmp_path):
    run = tmp_path / "run"
    job = runs.submit(slurm, run, "train.updates=500", "job.pause_s=0.05")
    runs.wait_for_update(run, 1)
    slurm.command("scancel", "-s", "STOP", job)
    until(lambda: runs.queue_state(slurm, job) == "STOPPED", 20, "the stop")
    assert f"`scancel -s CONT {job}` lets it go on" in runs.verb("cancel", run).stdout
    assert runs.verb("cancel", run, "--now").returncode == 0
    until(lambda: runs.over(slurm, job), 20, "the end")
    assert runs.queue_state(slurm, job) == "CANCELLED"
    assert runs.status(run)["state"] == "cancelled"


def test_a_pending_run_says_why_and_can_be_cancelled(slurm, tmp_path):
    run = tmp_path / "run"
    job = runs.submit(slurm, run, "+cluster.slurm_flags.begin=now+3600")
    found = runs.status(run)
    assert (found["state"], found["reason"]) == ("pending", "BeginTime")
    assert runs.verb("cancel", run).returncode == 0
    until(lambda: runs.over(slurm, job), 20, "the end")
    assert result(run)["state"] == "stopped"


def test_logs_follow_a_rank_to_the_end(slurm, tmp_path):
    run = tmp_path / "run"
    runs.submit(slurm, run, "train.updates=5", "job._target_=tests.slurm.jobs.Talking")
    done = runs.verb("logs", run, "--rank", "1", "-f", timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("hello") >= 1
    assert result(run)["state"] == "finished"
    assert runs.verb("logs", run, "--rank", "1").stdout == done.stdout
    missing = runs.verb("logs", run, "--rank", "7")
    assert missing.returncode == 2
    assert "logs of ranks 0 to 1" in missing.stderr


def test_status_tells_more_of_a_running_run_than_its_state(slurm, tmp_path):
    run = tmp_path / "run"
    job = runs.submit(slurm, run, "train.updates=500", "job.pause_s=0.02")
    runs.wait_for_update(run, 3)
    found = runs.status(run)
    assert found["state"] == "running"
    assert found["job_id"] == job
    assert found["total"] == 500
    assert found["updates"] >= 3
    assert found["samples_per_second"] > 0
    assert found["boundary_age_s"] < 10
    assert 0 < found["time_left_s"] <= 3600
    assert found["nodes"]
    table = runs.verb("status", run).stdout
    assert f"running job {job} on {found['nodes']}" in " ".join(table.split())
    for label in ("updates", "loss", "learning rate", "speed", "last boundary", "job's time left"):
        assert label in table
    os.utime(run)  # it changes: the answer of a moment ago, which is shared, will not do
    without = runs.verb("status", run, "--json", PATH=empty_path(tmp_path))
    assert json.loads(without.stdout)[0]["state"] == "running"
    assert "there is no squeue on this machine" in without.stderr
    assert runs.verb("cancel", run, PATH=empty_path(tmp_path)).returncode == 2
    runs.verb("cancel", run, "--now")


def empty_path(folder):
    """A PATH without SLURM's commands."""
    path = folder / "bin"
    path.mkdir(exist_ok=True)
    if not (path / "git").exists():
        (path / "git").symlink_to(shutil.which("git"))
    return str(path)


@pytest.mark.timeout(240)
def test_a_watcher_lives_through_half_a_minute_without_scheduler(mended, tmp_path):
    run = tmp_path / "run"
    watcher = begin(
        *runs.overrides(mended, run, "train.updates=500", "job.pause_s=0.03", "run.watch=true")
    )
    try:
        until((run / "handle.json").exists, 30, "the submission")
        runs.wait_for_update(run, 1)
        breaking.stop_controller(mended)
        silent = runs.wait_for_update(run, 1)
        before = len((run / "metrics.jsonl").read_text().splitlines())
        said = watcher.stdout.readline  # when the watcher asks next, and how long squeue tries
        until(lambda: "has not answered since" in said(), 90, "the watcher's word")
        until(lambda: time.monotonic() - silent > 20, 30, "twenty seconds")
        breaking.stop_munge(mended)  # then squeue fails in another way, and at once
        until(lambda: time.monotonic() - silent > 30, 40, "thirty seconds")
        assert not (run / "result.json").exists()
        assert runs.status(run)["state"] == "running"
        assert len((run / "metrics.jsonl").read_text().splitlines()) > before
        mended.up()
        output, _ = watcher.communicate(timeout=120)
    finally:
        if watcher.poll() is None:
            os.kill(watcher.pid, signal.SIGKILL)
    assert watcher.returncode == 0, output
    assert "answers again" in output
    assert result(run)["state"] == "finished"


def test_an_interrupt_detaches_the_watcher_and_leaves_the_run(slurm, tmp_path):
    run = tmp_path / "run"
    watcher = begin(
        *runs.overrides(slurm, run, "train.updates=300", "job.pause_s=0.03", "run.watch=true")
    )
    until((run / "handle.json").exists, 30, "the submission")
    runs.wait_for_update(run, 1)
    os.kill(watcher.pid, signal.SIGINT)
    output, _ = watcher.communicate(timeout=20)
    assert watcher.returncode == 130
    assert f"detached; job {runs.job_of(run)} goes on" in output
    assert runs.status(run)["state"] == "running"
    runs.verb("cancel", run, "--now")


def test_without_a_client_submission_says_so(slurm, tmp_path):
    done = call(*runs.overrides(slurm, tmp_path / "run"), PATH=empty_path(tmp_path), **runs.QUIET)
    assert done.returncode == 2
    assert "on this machine" in done.stderr
    assert not (tmp_path / "run").exists()
