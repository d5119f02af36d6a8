"""A command that is killed while it submits leaves no job that is lost, and none to queue twice."""

import os
import shutil
import signal

import pytest

from orchestrator.clusters.slurm.queue.sbatch import _Asking
from orchestrator.launch import run_app
from orchestrator.rundir import folder as rundir
from orchestrator.scheduler.client import SlurmClient
from orchestrator.scheduler.jobs import accounted_scripts
from tests.helpers import TINY, begin, call, result, until
from tests.slurm import runs
from tests.slurm.test_submission import HELD

POINTS = ("cluster.nodes=1", "cluster.ranks_per_node=1", "accumulation.steps=1,2", HELD)
KILL = "kill -9 $PPID"
MOMENTS = {
    "before": [KILL],
    "after": ['sbatch "$@"', KILL],
    "in between": [KILL, "until [ -e {go} ]; do sleep 0.05; done", 'sbatch "$@"'],
}


def wrapped_sbatch(folder, steps):
    """An `sbatch` that takes these steps of a shell where something is to be submitted."""
    wrapper = folder / "bin" / "sbatch"
    wrapper.parent.mkdir()
    asked = '[ "$1" = --parsable ] || exec sbatch "$@"'  # whether it could run, for one
    real = [step.replace("sbatch", shutil.which("sbatch")) for step in (asked, *steps)]
    wrapper.write_text("\n".join(["#!/bin/bash", *real, ""]))
    wrapper.chmod(0o755)
    return wrapper


def handles(sweep):
    """The elements that the points of a sweep have noted."""
    return [runs.job_of(folder.parent) for folder in sorted(sweep.glob("*/handle.json"))]


def killed_while_submitting(folder, moment, *line):
    """Type a line whose command is killed by -9 in a moment of sbatch's; what lets sbatch go on."""
    go = folder / "go"
    wrapper = wrapped_sbatch(folder, [step.replace("{go}", str(go)) for step in MOMENTS[moment]])
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
    assert run_app(["-q", "-m", *runs.overrides(slurm, sweep, TINY, *POINTS)]) == 0
    made, laid_out, asked, _ = seen
    assert made < laid_out < asked
    assert {file.stem for file, _ in made} >= {"config", "plan", "submission"}
    assert {file.name for file, _ in asked - laid_out} == {"submitting.json", "000.sh"}
    assert {script.stat().st_ino for script in (sweep / "arrays").glob("*.sh")} < synced
    assert len(synced) < 12, "no point waits for the disk by itself"
    slurm.command("scancel", runs.job_of(sweep / "0").split("_")[0])


def test_a_controller_that_goes_between_two_arrays_leaves_what_was_queued_and_no_more(
    mended, tmp_path
):
    """And a Ctrl-C, typed while the command tries again. Two arrays: one for each size."""
    sweep = tmp_path / "sweep"
    points = ("cluster.nodes=1,2", "cluster.ranks_per_node=1", "accumulation.steps=1,2", HELD)
    line = ("-m", *runs.overrides(mended, sweep, *points))
    controller = mended.status().daemons["slurmctld"]
    wrapper = wrapped_sbatch(tmp_path, ['sbatch "$@"', f"kill -9 {controller}"])
    typed = begin(*line, PATH=f"{wrapper.parent}:/usr/bin:/bin")
    said = []
    for told in typed.stdout:
        said.append(told)
        if "trying again" in told:
            break
    typed.send_signal(signal.SIGINT)
    said = "".join(said) + typed.communicate(timeout=30)[0]  # it would try for a minute
    assert typed.returncode == 2, said
    assert "not submitted: interrupted" in said
    assert "2 points of 4 are queued; the same line again submits the others" in said
    mended.up()
    assert len(handles(sweep)) == 2
    assert len({job.split("_")[0] for job in handles(sweep)}) == 1
    done = call(*line, **runs.QUIET)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(set(handles(sweep))) == 4
    assert queued(mended, sweep) == {job.split("_")[0] for job in handles(sweep)}
    assert len(queued(mended, sweep)) == 2
    assert runs.verb("cancel", sweep).returncode == 0
