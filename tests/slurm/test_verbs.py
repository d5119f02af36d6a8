"""status, cancel, resume and attach from another shell, with and without what they could ask."""

import json
import os
import signal
from datetime import datetime

import pytest

from slurm import breaking
from tests.helpers import LIMIT_S, await_exit, begin, call, result, until
from tests.refusals import mentions
from tests.slurm import runs
from tests.slurm.runs import printed, wrapped_sbatch

pytestmark = [pytest.mark.slurm, pytest.mark.long]


def test_cancel_stops_at_a_boundary_and_resume_ends_with_the_same_bits(slurm, tmp_path, digest):
    run = tmp_path / "run"
    hold = runs.submit_long(slurm, run)
    job = runs.job_of(run)
    runs.wait_for_update(run, 3)
    found = runs.status(run)
    assert (found["state"], found["job_id"], found["total"]) == ("running", job, 600)
    assert found["updates"] >= 3
    assert found["samples_per_second"] > 0
    assert 0 < found["time_left_s"] <= 3600
    table = runs.verb("status", run).stdout
    assert f"running job {job} on {found['nodes']}" in " ".join(table.split())
    for label in ("updates", "loss", "learning rate", "speed", "last boundary", "job's time left"):
        assert label in table
    assert found["boundary_age_s"] >= 0
    runs.verb("resume", run, code=2)
    done = runs.verb("cancel", run, code=0)
    assert printed(done.stdout, f"job {job} boundary checkpoint"), done.stdout
    stopped = runs.wait_over(slurm, run)
    assert stopped["state"] == "stopped"
    assert runs.accounted(slurm, job) == "FAILED"  # `afterok` of another job must not start on it
    assert runs.status(run)["state"] == "stopped"
    runs.verb("cancel", run, code=2)
    hold.release()
    runs.verb("resume", run, code=0)
    assert runs.wait_over(slurm, run)["weights_sha256"] == digest
    assert runs.first_records(run)[1]["update"] == stopped["updates"]
    assert printed(runs.verb("resume", run).stdout, f"{run} finished")
    no_sbatch = wrapped_sbatch(tmp_path / "refusing", ["exit 1"]).parent
    runs.verb("resume", run, "train.updates=700", PATH=f"{no_sbatch}:/usr/bin:/bin", code=2)
    assert result(run)["weights_sha256"] == digest, "what it had is left as it was"


def test_a_program_that_fails_at_once_waits_in_the_queue_until_its_next_restart(slurm, tmp_path):
    run = tmp_path / "run"
    place = ("+cluster=slurm_dev", f"cluster.slurm_conf={slurm.slurm_conf}", "cluster.nodes=1")
    words = (*place, "cluster.ranks_per_node=1", "run.max_restarts=100", f"run.dir={run}")
    runs.verb("run", *words, "--", "false", cwd=tmp_path, code=0)
    job = runs.job_of(run)

    def waits():
        notes = sorted(run.glob("attempts/0*/decision.json"))
        pause = json.loads(notes[-1].read_text()).get("pause") if notes else None
        begins = slurm.command("squeue", "-h", "-t", "PENDING", "-j", job, "-o", "%S").strip()
        if pause is None or begins in ("", "N/A"):
            return False
        return datetime.fromisoformat(begins).timestamp() >= int(pause["until"])

    until(waits, what="SLURM's start time after the pause")
    lines = (run / "logs" / "batch.log").read_text().splitlines()
    restarts = [line for line in lines if mentions(line, "restart 100 run.max_restarts")]
    pauses = [mentions(line, "run.max_restarts restart 3 s") for line in restarts[:3]]
    assert pauses == [False, False, True]
    runs.verb("cancel", run, code=0)
    runs.wait_over(slurm, run)


def test_a_run_moves_to_slurm_and_back_and_is_watched_meanwhile(slurm, tmp_path):
    run = tmp_path / "run"
    call(*runs.BATCH, *runs.SHAPE, "train.updates=20", f"run.dir={run}", **runs.QUIET, code=0)
    there = ("cluster=slurm_dev", f"cluster.slurm_conf={slurm.slurm_conf}", *runs.SHAPE)
    moved = runs.verb("resume", run, "train.updates=40", *there, code=0)
    assert printed(moved.stdout, "update 20 40"), moved.stdout
    watched = runs.verb("attach", run, timeout=LIMIT_S, code=0)
    assert "40 of 40" in watched.stdout
    runs.verb("resume", run, "train.updates=60", "cluster=local", *runs.SHAPE, code=0)
    assert result(run)["weights_sha256"] == runs.reference(tmp_path / "local", "train.updates=60")
    assert runs.status(run)["state"] == "finished"


def test_a_watcher_outlives_the_controller_and_an_interrupt_leaves_the_run(mended, tmp_path):
    run = tmp_path / "run"
    hold = runs.hold_of_long(run)
    watcher = begin(
        *runs.overrides(mended, run, *runs.LONG, "job.pause_s=0.03", "run.watch=true"),
        hold.override,
    )
    runs.wait_for_update(run, 1)
    breaking.stop_controller(mended)
    before = len((run / "metrics.jsonl").read_text().splitlines())
    until(lambda: "has not answered since" in watcher.stdout.readline(), 90, "the watcher's note")
    assert not (run / "result.json").exists()
    assert runs.status(run)["state"] == "unknown"
    assert len((run / "metrics.jsonl").read_text().splitlines()) > before
    mended.up()
    until(lambda: "answers again" in watcher.stdout.readline(), 90, "the watcher's note")
    os.kill(watcher.pid, signal.SIGINT)
    output = await_exit(watcher, 130, timeout=LIMIT_S)
    assert printed(output, f"detached job {runs.job_of(run)}"), output
    hold.release()
    assert runs.wait_over(mended, run)["state"] == "finished"


def test_doctor_shows_the_cluster_and_runs_a_collective_on_its_nodes(slurm, tmp_path):
    run = tmp_path / "run"
    where = ("+cluster=slurm_dev", f"cluster.slurm_conf={slurm.slurm_conf}", f"run.dir={run}")
    done = runs.verb("doctor", "--run", "--json", *where, *runs.SHAPE, code=0)
    facts = [(one["subject"], one["text"]) for one in json.loads(done.stdout)]
    text = "\n".join(found for _, found in facts)
    assert "TaskPlugin=task/none" in text
    assert printed(text, f"{run} 2 ranks 2 nodes"), text
    sums = [found for about, found in facts if about == "collective"]
    assert len(sums) == 2
    assert all(mentions(found, "GB/s rank") for found in sums), sums
