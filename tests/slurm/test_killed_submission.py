"""A command that is killed while it submits leaves no job that is lost, and none to queue twice."""

import os
import shutil

import pytest

from orchestrator.clusters.slurm.queueing import _Asking
from orchestrator.launch import run_app
from orchestrator.run_folder import rundir
from orchestrator.scheduler.client import SlurmClient
from orchestrator.scheduler.jobs import accounted_scripts
from tests.helpers import begin, call, result, until
from tests.slurm import runs
from tests.slurm.test_submission import HELD

POINTS = ("cluster.nodes=1", "cluster.ranks_per_node=1", "accumulation.steps=1,2", HELD)
KILL = "kill -9 $PPID"
MOMENTS = {
    "before": [KILL],
    "after": ['sbatch "$@"', KILL],
    "in between": [KILL, "until [ -e {go} ]; do sleep 0.05; done", 'sbatch "$@"'],
}


def killed_while_submitting(folder, moment, *line):
    """Type a line whose command is killed by -9 in a moment of sbatch's; what lets sbatch go on."""
    wrapper, go = folder / "bin" / "sbatch", folder / "go"
    wrapper.parent.mkdir()
    real = shutil.which("sbatch")
    asked = '[ "$1" = --parsable ] || exec sbatch "$@"'  # whether it could run, for one
    steps = [s.replace("{go}", str(go)).replace("sbatch", real) for s in (asked, *MOMENTS[moment])]
    wrapper.write_text("\n".join(["#!/bin/bash", *steps, ""]))
    wrapper.chmod(0o755)
    typed = begin(*line, PATH=f"{wrapper.parent}:/usr/bin:/bin")
    said, _ = typed.communicate(timeout=60)
    assert typed.returncode == -9, said
    return go


def queued(slurm, script):
    """The jobs and arrays that the queue knows of a script below a folder."""
    rows = (
        row.split("|") for row in slurm.command("squeue", "-h", "-a", "-o", "%F|%o").splitlines()
    )
    return {job for job, command in rows if command.startswith(str(script))}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_sweep_whose_submitter_was_killed_is_queued_once(slurm, tmp_path, moment):
    sweep = tmp_path / "sweep"
    line = ("-m", *runs.overrides(slurm, sweep, *POINTS))
    go = killed_while_submitting(tmp_path, moment, *line)
    found = runs.verb("status", sweep, "--json")
    if moment == "in between":
        assert found.stdout.count('"unknown"') == 2
        again = call(*line, **runs.QUIET)
        assert "in progress (unknown)" in again.stdout
        refused = runs.verb("resume", sweep / "0")
        assert refused.returncode == 2
        assert "is being submitted at this moment" in refused.stderr
        assert not queued(slurm, sweep)
        go.touch()
        until(lambda: runs.status(sweep / "0")["state"] == "pending", 20, "the job")
    else:
        assert found.stdout.count('"pending"' if moment == "after" else '"lost"') == 2
        assert ("was queued by a command" in found.stderr) == (moment == "after")
    if moment == "before":
        gone_on = runs.verb("resume", sweep)
        assert "2 points queued" in gone_on.stdout, gone_on.stderr
    done = call(*line, **runs.QUIET)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(queued(slurm, sweep)) == 1
    assert {runs.job_of(sweep / n).split("_")[0] for n in "01"} == queued(slurm, sweep)
    assert not list(sweep.rglob("submitting.json"))
    cancelled = runs.verb("cancel", sweep)
    assert "points 0-1: each is cancelled" in cancelled.stdout, cancelled.stderr
    assert [result(sweep / n)["state"] for n in "01"] == ["stopped"] * 2
    assert "none of the 2 points" in runs.verb("cancel", sweep).stderr


def test_a_run_whose_submitter_was_killed_trains_and_is_found_when_it_is_over(slurm, tmp_path):
    run = tmp_path / "run"
    killed_while_submitting(
        tmp_path, "after", *runs.overrides(slurm, run, "train.updates=3", "cluster.nodes=1")
    )
    [job] = queued(slurm, run)
    until(lambda: runs.over(slurm, job), 60, "the end of a run that nobody knows of")
    assert not (run / "handle.json").exists()
    assert result(run)["updates"] == 3
    assert runs.status(run)["state"] == "finished"
    assert runs.job_of(run) == job
    client = SlurmClient(str(slurm.slurm_conf))
    script = str(run / "submitit" / "000.sh")
    until(
        lambda: (job, script) in accounted_scripts(client, run.stat().st_uid, since=0.0 + 2e5),
        20, "sacct's row: where squeue has forgotten the job, it is found there",
    )  # fmt: skip


def test_all_of_a_sweep_is_on_the_disk_before_sbatch_is_asked(slurm, tmp_path, monkeypatch):
    sweep = tmp_path / "sweep"
    seen, synced = [], set()

    def files():
        return {(f, f.stat().st_mtime_ns) for f in sweep.rglob("[!.]*") if f.is_file()}

    def spied(of, name, note):  # called all the same
        real = getattr(of, name)
        monkeypatch.setattr(of, name, lambda *a, **more: note(*a) or real(*a, **more))

    spied(rundir, "wait_for_disk", lambda _: seen.append(files()))
    spied(os, "fsync", lambda fd: synced.add(os.fstat(fd).st_ino))
    spied(_Asking, "_ask", lambda _: seen.append(files()))
    assert run_app(["-q", "-m", *runs.overrides(slurm, sweep, *POINTS)]) == 0
    made, laid_out, asked, _ = seen
    assert made < laid_out < asked
    assert {file.stem for file, _ in made} >= {"config", "plan", "submission"}
    assert {file.name for file, _ in asked - laid_out} == {"submitting.json", "000.sh"}
    assert {script.stat().st_ino for script in (sweep / "arrays").glob("*.sh")} < synced
    assert len(synced) < 12, "no point waits for the disk by itself"
    slurm.command("scancel", runs.job_of(sweep / "0").split("_")[0])
