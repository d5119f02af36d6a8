"""A run on SLURM: submitted, left alone, found again, and the same as a local one."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from orchestrator.start_from_copy import DISK, MEMORY, bases
from tests.helpers import TINY, call, commit, environment, result, until
from tests.slurm import runs

HELD = "+cluster.slurm_flags.begin=now+3600"


def test_two_nodes_of_two_ranks_end_with_the_local_runs_weights(slurm, tmp_path):
    shape = (TINY, "cluster.ranks_per_node=2", "train.updates=10")
    job = runs.submit(slurm, tmp_path / "run", *shape)
    expected = runs.reference(tmp_path / "local", *shape)
    ended = runs.wait_over(slurm, tmp_path / "run")
    assert ended["state"] == "finished"
    assert ended["weights_sha256"] == expected
    assert runs.accounted(slurm, job) == "COMPLETED"
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (plan["nodes"], plan["ranks"]) == (2, 4)
    found = runs.status(tmp_path / "run")
    assert (found["state"], found["updates"], found["restarts"]) == ("finished", 10, 0)
    for base in {MEMORY, DISK, Path(os.environ.get("TMPDIR", DISK))}:
        assert not list(base.glob(f"orchestrator-code-{os.getuid()}-*-{job}-0-n?"))
    assert not [path for path in (tmp_path / "run" / "code").iterdir() if path.is_dir()]


def test_submission_imports_no_framework_and_leaves_one_archive_of_the_code(slurm, tmp_path):
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "orchestrator.launch",
         *runs.overrides(slurm, run, HELD)],
        env=environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert {"submitit", "orchestrator.clusters.slurm.queue.executor"} <= imported
    unwanted = {"torch", "mindspore", "numpy", "sklearn", "rich.progress", "rich.table"}
    assert not unwanted & imported
    # beside the archive, what it is a copy of, its digest, and what unpacks it on each node
    made = sorted(path.name for path in (run / "code").iterdir())
    assert made == ["000.json", "000.py", "000.sha256", "000.tar"]
    runs.verb("cancel", run, "--now")


def test_submission_returns_with_job_folder_and_next_commands(slurm, tmp_path):
    run = tmp_path / "run"
    done = call(*runs.overrides(slurm, run, "train.updates=500", "job.pause_s=0.05"))
    assert done.returncode == 0, done.stderr
    job = runs.job_of(run)
    assert f"job {job} is queued" in done.stdout
    assert str(run) in done.stdout
    for verb in ("status", "logs", "cancel"):
        assert f"python -m orchestrator {verb} {run}" in done.stdout
    assert not runs.over(slurm, job)
    assert run.stat().st_mode & 0o777 == 0o700
    runs.verb("cancel", run, "--now")


def test_a_job_runs_the_code_that_was_submitted(slurm, tmp_path):
    source = tmp_path / "project" / "mine.py"
    source.parent.mkdir()
    source.write_text(
        textwrap.dedent(
            """
            from tests.light_job import Light

            class Mine(Light):
                metric_names = ("error",)
                def evaluate(self, model):
                    return {"version": 1.0, "in_memory": float(__file__.startswith("/dev/shm/"))}
            """
        )
    )
    submitted = commit(source.parent)
    options = ("job._target_=mine.Mine", "train.updates=2", HELD)
    for name, snapshot in (("kept", "true"), ("live", "false")):
        done = call(
            *runs.overrides(slurm, tmp_path / name, *options, f"run.snapshot={snapshot}"),
            cwd=source.parent,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert runs.status(tmp_path / "kept")["state"] == "pending"
    source.write_text(source.read_text().replace("1.0", "2.0"))
    later = commit(source.parent)
    for name in ("kept", "live"):
        runs.release(slurm, tmp_path / name)
    # slurmd sets a TMPDIR of its own, which is nobody's wish
    in_memory = bases(str(tmp_path / "kept" / "code" / "000"))[0] == MEMORY
    kept, live = (runs.wait_over(slurm, tmp_path / name)["metrics"] for name in ("kept", "live"))
    assert kept == {"version": 1.0, "in_memory": in_memory}
    assert live == {"version": 2.0, "in_memory": False}
    commits = {
        name: json.loads((tmp_path / name / "environment.json").read_text())["git"]["commit"]
        for name in ("kept", "live")
    }
    assert commits == {"kept": submitted, "live": later}


def test_a_sweep_submits_its_points_and_returns(slurm, tmp_path):
    sweep = tmp_path / "sweep"
    done = call(
        "-m",
        *runs.overrides(
            slurm, sweep, "train.updates=3", "accumulation.steps=1,2,4,8",
            "cluster.nodes=1", "cluster.ranks_per_node=1",
        ),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"python -m orchestrator status {sweep}" in done.stdout
    listed = json.loads(runs.verb("status", sweep, "--json").stdout)
    assert [entry["folder"] for entry in listed] == [str(sweep / str(n)) for n in range(4)]

    def all_ended():
        found = json.loads(runs.verb("status", sweep, "--json").stdout)
        return all(entry["state"] == "finished" for entry in found)

    until(all_ended, 90, "the end of all four points")
    for number, steps in enumerate((1, 2, 4, 8)):
        plan = json.loads((sweep / str(number) / "plan.json").read_text())
        assert plan["steps"] == steps
        assert result(sweep / str(number))["updates"] == 3


@pytest.mark.parametrize(
    ("override", "words", "hint"),
    [
        ("cluster.partition=hihg", "invalid partition specified: hihg", "did you mean 'high'?"),
        ("cluster.account=devv", "no account 'devv'", "did you mean 'dev'?"),
        ("cluster.qos=fast", "no qos 'fast'", "normal"),
        ("cluster.nodes=9", "Node count specification invalid", "partition main gives 4 at most"),
        ("cluster.gpus_per_node=9", "Requested node configuration is not available", "gpus"),
        ("+cluster.slurm_flags.gres=npu:1", "Invalid generic resource (gres)", "no such resource"),
        ("cluster.constraint=gold", "Invalid feature specification", "cluster.constraint"),
        ("cluster.exclude=n[0-2]", "gives 1 at most", "without the 3 of cluster.exclude"),
        ("cluster.exclude=zz", "Invalid node name specified", "cluster.exclude"),
        ("cluster.reservation=r1", "Requested reservation is invalid", "not yours"),
        ("cluster.memory_gib=900", "Requested node configuration", "cluster.memory_gib"),
    ],
)
def test_what_can_never_run_is_refused_and_leaves_nothing(slurm, tmp_path, override, words, hint):
    done = call(*runs.overrides(slurm, tmp_path / "run", override), **runs.QUIET)
    assert done.returncode == 2
    assert words in done.stderr
    assert hint in done.stderr
    assert not (tmp_path / "run").exists()


def test_what_only_has_to_wait_is_queued_as_plain_sbatch_would(mended, tmp_path):
    run = tmp_path / "run"
    mended.command("scontrol", "update", "nodename=n[0-3]", "state=drain", "reason=test")
    done = call(*runs.overrides(mended, run, "train.updates=1"), **runs.QUIET)
    assert done.returncode == 0, done.stderr
    assert "warning: the scheduler cannot place the job at present" in done.stdout
    assert runs.status(run)["state"] == "pending"
    assert runs.verb("cancel", run, "--now").returncode == 0
    again = runs.verb("resume", run)
    assert again.returncode == 0, again.stderr
    assert runs.queue_state(mended, runs.job_of(run)) == "PENDING"
    mended.command("scontrol", "update", "nodename=n[0-1]", "state=resume")
    assert runs.wait_over(mended, run)["state"] == "finished"


def test_the_persons_own_defaults_for_sbatch_decide_what_the_configuration_leaves_open(
    slurm, tmp_path
):
    own = {"SBATCH_PARTITION": "low,high", "SBATCH_ACCOUNT": "dev", "SBATCH_TIMELIMIT": "5"}
    held = (HELD, "+cluster.slurm_flags.mail-type=END,FAIL", "+cluster.srun_flags.cpu-bind=none")
    done = call(*runs.overrides(slurm, tmp_path / "run", *held), **own)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = slurm.command("scontrol", "--oneliner", "show", "job", runs.job_of(tmp_path / "run"))
    for words in ("Partition=low,high", "Account=dev", "TimeLimit=01:00:00", "MailType=END,FAIL"):
        assert f" {words} " in shown
    shorter = runs.verb("plan", *runs.overrides(slurm, tmp_path / "other"), **own)
    assert "as set in the environment: SBATCH_PARTITION, SBATCH_ACCOUNT" in shorter.stdout
    refused = call(
        *runs.overrides(slurm, tmp_path / "no", "cluster.time_min=5"), SBATCH_PARTITION="short"
    )
    assert "try cluster.time_min=1" in refused.stderr
    runs.verb("cancel", tmp_path / "run", "--now")


def test_a_time_limit_above_the_partitions_is_refused(slurm, tmp_path):
    more = ("cluster.partition=short", "cluster.time_min=5")
    done = call(*runs.overrides(slurm, tmp_path / "run", *more), **runs.QUIET)
    assert done.returncode == 2
    assert "time limit is invalid" in done.stderr
    assert "try cluster.time_min=1" in done.stderr
    assert not (tmp_path / "run").exists()


def test_plan_prints_the_script_that_is_submitted_and_what_the_scheduler_says(slurm, tmp_path):
    options = runs.overrides(slurm, tmp_path / "run", "train.updates=1")
    shown = json.loads(runs.verb("plan", *options, "--json").stdout)
    assert "to start at" in shown["request"]["scheduler"]
    assert not (tmp_path / "run").exists()
    assert call(*options).returncode == 0
    assert (tmp_path / "run" / "submitit" / "000.sh").read_text() == shown["request"]["sbatch"]
    refused = runs.verb("plan", *options, "cluster.nodes=9")
    assert "Node count specification invalid" in refused.stdout
    assert "#SBATCH --nodes=9" in refused.stdout
    runs.wait_over(slurm, tmp_path / "run")


def test_a_run_folder_that_the_nodes_cannot_see_is_named_as_the_cause(slurm, tmp_path):
    run = tmp_path / "run"
    runs.submit(slurm, run, "train.updates=1", HELD)
    run.rename(tmp_path / "elsewhere")
    runs.release(slurm, tmp_path / "elsewhere")
    until(lambda: runs.over(slurm, runs.job_of(tmp_path / "elsewhere")), 60, "the job's end")
    found = runs.status(tmp_path / "elsewhere")
    assert found["state"] == "failed"
    assert "not visible" in found["reason"]


def test_nothing_of_an_enclosing_job_reaches_the_run(slurm, tmp_path):
    run = tmp_path / "run"
    done = call(
        *runs.overrides(slurm, run, "train.updates=1"),
        SLURM_JOB_ID="77", SLURM_NTASKS="9", SLURM_JOB_PARTITION="short", SRUN_CPUS_PER_TASK="3",
        SLURM_CPU_BIND="verbose", SUBMITIT_EXECUTOR="local", RANK="5", MASTER_PORT="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = slurm.command("scontrol", "--oneliner", "show", "job", runs.job_of(run))
    assert " Partition=main " in shown
    assert runs.wait_over(slurm, run)["state"] == "finished"
