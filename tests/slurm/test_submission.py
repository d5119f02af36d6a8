"""Submission to SLURM: queued jobs, refusals, and a submitter that is killed."""

import json
import signal
import subprocess
import sys

import pytest

from orchestrator.clusters.api import cluster_of
from orchestrator.clusters.slurm.scheduler import SlurmClient, accounted_scripts
from orchestrator.config.composer import compose
from orchestrator.errors import ClusterError
from tests.helpers import (
    TINY,
    await_exit,
    begin,
    call,
    commit,
    contents,
    environment,
    result,
    until,
)
from tests.refusals import mentions, refused
from tests.slurm import runs
from tests.slurm.runs import printed, queued, wrapped_sbatch

pytestmark = [pytest.mark.slurm, pytest.mark.long]

HELD = "+cluster.slurm_flags.begin=now+3600"
ENCLOSING_JOB = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "9",
    "SLURM_JOB_PARTITION": "short",
    "RANK": "5",
    "SRUN_CPUS_PER_TASK": "3",
    "SLURM_CPU_BIND": "verbose",
    "SUBMITIT_EXECUTOR": "local",
    "MASTER_PORT": "1",
}


def test_a_submitted_run_is_as_planned_and_ends_with_the_local_runs_weights(slurm, tmp_path):
    """It imports no framework to submit, and an enclosing job's environment does not reach it."""
    run = tmp_path / "run"
    shape = (TINY, "cluster.ranks_per_node=2", "train.updates=10")
    options = runs.overrides(slurm, run, *shape)
    planned = json.loads(runs.verb("plan", *options, "--json").stdout)["request"]
    assert "to start at" in planned["scheduler"]
    assert not run.exists()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "orchestrator.launch", *options],
        env=environment(**ENCLOSING_JOB),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "submitit" in imported
    assert not {"torch", "mindspore", "numpy", "sklearn"} & imported
    job = runs.job_of(run)
    shown = slurm.command("scontrol", "--oneliner", "show", "job", job)
    assert " Partition=main " in shown
    assert printed(done.stdout, f"job {job} queued")
    for verb in ("status", "logs", "cancel"):
        assert f"python -m orchestrator {verb} {run}" in done.stdout
    assert (run / "submitit" / "000.sh").read_text() == planned["sbatch"]

    expected = runs.reference(tmp_path / "local", *shape)
    ended = runs.wait_over(slurm, run)
    assert (ended["state"], ended["weights_sha256"]) == ("finished", expected)
    assert runs.accounted(slurm, job) == "COMPLETED"
    found = runs.status(run)
    assert (found["state"], found["updates"], found["restarts"]) == ("finished", 10, 0)


def test_a_job_runs_the_code_that_was_submitted(slurm, tmp_path):
    source = tmp_path / "project" / "mine.py"
    source.parent.mkdir()
    source.write_text(
        "from tests.light_job import Light\n"
        "class Mine(Light):\n"
        "    def evaluate(self, model):\n"
        "        return {'version': 1.0}\n"
    )
    submitted = commit(source.parent)
    options = ("job._target_=mine.Mine", "train.updates=2", HELD)
    for name, snapshot in (("kept", "true"), ("live", "false")):
        call(
            *runs.overrides(slurm, tmp_path / name, *options, f"run.snapshot={snapshot}"),
            cwd=source.parent,
            code=0,
        )
    source.write_text(source.read_text().replace("1.0", "2.0"))
    later = commit(source.parent)
    for name in ("kept", "live"):
        runs.release(slurm, tmp_path / name)
    for name, version, expected in (("kept", 1.0, submitted), ("live", 2.0, later)):
        assert runs.wait_over(slurm, tmp_path / name)["metrics"] == {"version": version}
        environment_file = tmp_path / name / "environment.json"
        assert json.loads(environment_file.read_text())["git"]["commit"] == expected


def test_a_program_starts_where_it_was_submitted_or_not_at_all(slurm, tmp_path):
    """A preamble's cd starts no file of the same name, nor does a folder that a node lacks."""
    home, other = tmp_path / "home", tmp_path / "other"
    for folder in (home, other):
        folder.mkdir()
        (folder / "train.py").write_text(f"print('this is {folder.name}')\n")
    for name in ("kept", "gone"):
        shape = ("cluster.ranks_per_node=1", "cluster.nodes=1", f"run.dir={tmp_path / name}", HELD)
        preamble = f"cluster.preamble=[cd {other}]" if name == "kept" else ""
        where = ("+cluster=slurm_dev", f"cluster.slurm_conf={slurm.slurm_conf}", *shape)
        runs.verb("run", *where, *filter(None, [preamble]), "--", "train.py", cwd=home, code=0)
    runs.release(slurm, tmp_path / "kept")
    assert runs.wait_over(slurm, tmp_path / "kept")["state"] == "finished"
    assert "this is home" in (tmp_path / "kept" / "logs" / "rank-00000.log").read_text()
    home.rename(tmp_path / "moved")
    runs.release(slurm, tmp_path / "gone")
    cause = runs.wait_over(slurm, tmp_path / "gone")["culprit"]["cause"]
    assert mentions(cause, f"{home} node"), cause


# Of each request: the scheduler's words, and what we add to them.
REFUSED = (
    ("cluster.partition=hihg", "invalid partition specified: hihg", "'high'"),
    ("cluster.account=devv", "Invalid account", ""),
    ("cluster.qos=fast", "Invalid qos", ""),
    ("cluster.nodes=9", "Node count specification invalid", "cluster.nodes=9 main 4"),
    (
        "+cluster.slurm_flags.gres=npu:1",
        "Invalid generic resource (gres)",
        "cluster.gpus_per_node cluster.slurm_flags.gres",
    ),
    (
        "cluster.partition=short cluster.time_min=5",
        "time limit is",
        "cluster.time_min=5 short cluster.time_min=1",
    ),
)


def test_what_can_never_run_is_refused_and_leaves_nothing(slurm, tmp_path):
    run = tmp_path / "run"
    for override, words, names in REFUSED:
        cluster = cluster_of(compose(runs.overrides(slurm, run, *override.split())))
        with refused(ClusterError, names) as caught:
            cluster.check(cluster.request(run, 0))
        assert words in str(caught.value)
    for override in ("cluster.nodes=9", "cluster.memory_gib=99999"):  # sbatch refuses the latter
        done = call(*runs.overrides(slurm, run, override), **runs.QUIET)
        assert (done.returncode, run.exists()) == (2, False), done.stdout
    assert mentions(done.stderr, "cluster.cpus_per_rank cluster.memory_gib"), done.stderr


def test_a_run_that_only_has_to_wait_is_queued_and_can_be_cancelled_and_resumed(mended, tmp_path):
    run = tmp_path / "run"
    mended.command("scontrol", "update", "nodename=n[0-3]", "state=drain", "reason=test")
    done = call(*runs.overrides(mended, run, "train.updates=1"), **runs.QUIET, code=0)
    assert printed(done.stdout, "warning: scheduler job"), done.stdout
    found = runs.status(run)
    assert (found["state"], bool(found["reason"])) == ("pending", True)
    runs.verb("cancel", run, code=0)
    until(lambda: runs.over(mended, runs.job_of(run)), what="the end")
    assert result(run)["state"] == "stopped"
    runs.verb("resume", run, code=0)
    assert runs.queue_state(mended, runs.job_of(run)) == "PENDING"
    mended.command("scontrol", "update", "nodename=n[0-1]", "state=resume")
    assert runs.wait_over(mended, run)["state"] == "finished"


DOWN = "Unable to contact slurm controller"


def test_a_refused_resume_leaves_the_run_as_it_was_and_a_lost_answer_is_no_refusal(slurm, tmp_path):
    """A run that has finished here would go on there."""
    run = tmp_path / "run"
    call(*runs.BATCH, *runs.SHAPE, "train.updates=2", f"run.dir={run}", **runs.QUIET, code=0)
    there = ("+cluster=slurm_dev", f"cluster.slurm_conf={slurm.slurm_conf}", *runs.SHAPE)
    before = contents(run)
    for name, code, steps in (
        ("refusing", 2, ["exit 1"]),
        ("interrupted", 2, ["kill -INT $PPID", f"echo {DOWN} >&2", "exit 1"]),
        ("silent", 0, ['sbatch "$@"', "echo Socket timed out >&2", "exit 1"]),
    ):
        path = wrapped_sbatch(tmp_path / name, steps).parent
        where = {"PATH": f"{path}:/usr/bin:/bin", "code": code}
        done = runs.verb("resume", run, "train.updates=4", *there, **where)
        assert mentions(done.stderr, f"{DOWN} interrupted") == (name == "interrupted")
        if code:
            assert contents(run) == before, name
            assert printed(runs.verb("resume", run, code=0).stdout, f"{run} finished")
    assert runs.wait_over(slurm, run)["updates"] == 4


# ------------------------------------------------------------------ a submitter that is killed

POINTS = ("cluster.nodes=1", "cluster.ranks_per_node=1", "accumulation.steps=1,2", HELD)
KILL = "kill -9 $PPID"
MOMENTS = {
    "after": ['sbatch "$@"', KILL],
    "in between": [KILL, "until [ -e {go} ]; do sleep 0.05; done", 'sbatch "$@"'],
}


def killed_while_submitting(folder, moment, *line):
    """Run a command that is killed while sbatch runs; return the file that lets sbatch go on."""
    go = folder / "go"
    wrapper = wrapped_sbatch(folder, [step.replace("{go}", str(go)) for step in MOMENTS[moment]])
    typed = begin(*line, PATH=f"{wrapper.parent}:/usr/bin:/bin")
    await_exit(typed, -9)
    return go


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_sweep_whose_submitter_was_killed_is_queued_once(slurm, tmp_path, moment):
    sweep = tmp_path / "sweep"
    line = ("-m", *runs.overrides(slurm, sweep, *POINTS))
    go = killed_while_submitting(tmp_path, moment, *line)
    found = runs.verb("status", sweep, "--json")
    if moment == "in between":
        assert found.stdout.count('"unknown"') == 2
        again = call(*line, **runs.QUIET)
        assert "(unknown)" in again.stdout
        resumed = runs.verb("resume", sweep / "0", code=2)
        assert mentions(resumed.stderr, f"{sweep} submitted"), resumed.stderr
        assert not queued(slurm, sweep)
        go.touch()
        until(lambda: runs.status(sweep / "0")["state"] == "pending", what="the job")
    else:
        assert found.stdout.count('"pending"') == 2
        assert mentions(found.stderr, f"{sweep} job queued"), found.stderr
    call(*line, **runs.QUIET, code=0)
    assert len(queued(slurm, sweep)) == 1
    assert {runs.job_of(sweep / n).split("_")[0] for n in "01"} == queued(slurm, sweep)
    cancelled = runs.verb("cancel", sweep)
    assert printed(cancelled.stdout, "points 0-1 cancelled"), cancelled.stderr
    assert [result(sweep / n)["state"] for n in "01"] == ["stopped"] * 2


def test_a_run_whose_submitter_was_killed_trains_and_is_found_when_it_is_over(slurm, tmp_path):
    run = tmp_path / "run"
    killed_while_submitting(
        tmp_path, "after", *runs.overrides(slurm, run, "train.updates=3", "cluster.nodes=1")
    )
    [job] = queued(slurm, run)
    until(lambda: runs.over(slurm, job), what="the end of the run")
    assert not (run / "handle.json").exists()
    assert result(run)["updates"] == 3
    assert runs.status(run)["state"] == "finished"
    assert runs.job_of(run) == job
    client = SlurmClient(str(slurm.slurm_conf))
    script = str(run / "submitit" / "000.sh")
    until(
        lambda: (job, script) in accounted_scripts(client, run.stat().st_uid, since=0.0 + 2e5),
        30,
        "sacct's row: a job that squeue has forgotten is found there",
    )


def test_of_two_jobs_of_a_run_only_the_recorded_one_trains_while_it_lives(slurm, tmp_path):
    run = tmp_path / "run"
    recorded = runs.submit(slurm, run, "train.updates=2", "cluster.nodes=1", HELD)

    def sbatch() -> str:
        command = ("sbatch", "--parsable", "--begin=now", run / "submitit" / "000.sh")
        where = environment(SLURM_CONF=str(slurm.slurm_conf))
        return subprocess.check_output(command, env=where, text=True).strip()

    other = sbatch()
    until(lambda: runs.over(slurm, other), what="the end of the second job")
    log = (run / "logs" / "batch.log").read_text()
    assert printed(log, f"job ({other}) job {recorded}"), log
    assert not list((run / "attempts").iterdir())
    assert runs.status(run)["state"] == "pending"
    slurm.command("scancel", recorded)
    by_hand = sbatch()
    until(lambda: runs.over(slurm, by_hand), what="the end of the job that a person submitted")
    assert result(run)["updates"] == 2


def test_a_job_whose_reservation_is_gone_waits_and_is_not_taken_for_ended(slurm, tmp_path):
    run, name = tmp_path / "run", "ReservationName=soon"
    facts = ("StartTime=now", "Duration=180", "Users=root", "Nodes=n0")
    slurm.command("scontrol", "create", "reservation", name, *facts)
    reserved = "+cluster.slurm_flags.reservation=soon"
    job = runs.submit(slurm, run, "train.updates=2", "cluster.nodes=1", reserved, HELD)
    slurm.command("scontrol", "update", name, "EndTime=now+5")  # in use, so it cannot be deleted
    until(lambda: runs.queue_state(slurm, job) == "RESV_DEL_HOLD", what="its end")
    found = runs.status(run)
    assert (found["state"], f"`scontrol release {job}`" in found["reason"]) == ("pending", True)
    slurm.command("scontrol", "release", job)
    runs.release(slurm, run)
    assert runs.wait_over(slurm, run)["updates"] == 2


def test_a_controller_that_dies_between_two_arrays_leaves_what_was_queued(mended, tmp_path):
    """Ctrl-C follows while the command tries again. One array for each number of nodes."""
    sweep = tmp_path / "sweep"
    points = ("cluster.nodes=1,2", "cluster.ranks_per_node=1", "accumulation.steps=1,2", HELD)
    line = ("-m", *runs.overrides(mended, sweep, *points))
    controller = mended.status().daemons["slurmctld"]
    wrapper = wrapped_sbatch(tmp_path, ['sbatch "$@"', f"kill -9 {controller}"])
    typed = begin(*line, PATH=f"{wrapper.parent}:/usr/bin:/bin")
    said = []
    for text in typed.stdout:
        said.append(text)
        if "trying again" in text:
            break
    typed.send_signal(signal.SIGINT)
    said = "".join(said) + typed.communicate(timeout=30)[0]  # it would try for a minute
    assert typed.returncode == 2, said
    assert printed(said, "interrupted"), said
    assert printed(said, "2 points 4 queued"), said
    mended.up()
    assert len([runs.job_of(path.parent) for path in sweep.glob("*/handle.json")]) == 2
    call(*line, **runs.QUIET, code=0)
    jobs = {runs.job_of(path.parent) for path in sweep.glob("*/handle.json")}
    assert len(jobs) == 4
    assert queued(mended, sweep) == {job.split("_")[0] for job in jobs}
    assert len(queued(mended, sweep)) == 2
    runs.verb("cancel", sweep, code=0)


def test_a_requeue_and_the_end_are_said_to_a_command(slurm, tmp_path):
    script, notes, run = tmp_path / "note.sh", tmp_path / "notes", tmp_path / "run"
    script.write_text(f'#!/bin/sh\necho "$ORCHESTRATOR_EVENT" >> "{notes}"\n')
    script.chmod(0o700)
    hold = runs.submit_long(slurm, run, f"notify.command={script}")
    until(notes.exists, what="the first update's message")
    slurm.command("scontrol", "requeue", runs.job_of(run))
    until(lambda: "requeue" in notes.read_text(), what="the requeue's message")
    hold.release()
    assert runs.wait_over(slurm, run)["state"] == "finished"
    until(lambda: "end" in notes.read_text(), what="the end's message")
    assert notes.read_text().split() == ["first_update", "requeue", "end"]
