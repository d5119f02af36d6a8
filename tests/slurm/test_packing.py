"""Points that share an allocation, on SLURM: what happens to one of them happens to no other."""

import json
import signal

from tests.helpers import call, processes_of, result, until
from tests.slurm import runs
from tests.slurm.test_sweeps import ended, states

POINTS = ("schedule.base_lr=0.1,0.2,0.3,0.4", "sweep.pack=true", "cluster.memory_gib=1")
SLOW = ("train.updates=300", "job.pause_s=0.05", "job._target_=tests.slurm.jobs.Hurried")


def steps(slurm, job):
    """The names of a job's steps that run now."""
    listed = slurm.command("squeue", "-h", "-s", "-j", job, "-o", "%j").split()
    return sorted(name for name in listed if name.isdigit())


def jobs_of(sweep):
    return {number: runs.job_of(sweep / number) for number in "0123"}


def test_points_share_a_job_and_each_has_its_own_kill_cancel_resume_and_preemption(slurm, tmp_path):
    sweep = tmp_path / "sweep"
    shape = ("cluster.nodes=1", "cluster.ranks_per_node=1", "cluster.partition=low")
    until_here = f"job.until={tmp_path / 'hurry'}"
    line = ("-m", *runs.overrides(slurm, sweep, *SLOW, until_here, *shape, *POINTS))
    shared = "4 points share 1 allocation, 4 at once in it"
    assert shared in runs.verb("plan", *line).stdout
    done = call(*line, **runs.QUIET)
    assert shared in done.stdout, done.stdout + done.stderr
    [first] = set(jobs_of(sweep).values())
    for number in "0123":
        runs.wait_for_update(sweep / number, 2)
    assert steps(slurm, first) == ["0", "1", "2", "3"]
    shown = slurm.command("scontrol", "show", "job", first)
    assert "NumNodes=1 NumCPUs=4 NumTasks=4" in shown
    assert "MinMemoryNode=4G" in shown

    ranks = [p for p in processes_of(sweep / "1") if "rank" in p.cmdline()]
    [rank] = [p for p in ranks if p.cmdline()[0] != "srun"]
    rank.send_signal(signal.SIGKILL)
    said = runs.verb("cancel", sweep / "2")
    assert said.returncode == 0, said.stderr
    until(
        lambda: states(sweep)["1"] == "failed" and states(sweep)["2"] == "stopped", 30, "two ends"
    )
    assert (states(sweep)["0"], states(sweep)["3"]) == ("running", "running")
    assert steps(slurm, first) == ["0", "3"]

    again = call(*line, **runs.QUIET)
    assert "2 points share 1 allocation" in again.stdout, again.stdout + again.stderr
    now = jobs_of(sweep)
    assert (now["0"], now["3"]) == (first, first)
    assert now["1"] == now["2"] != first
    for number in "12":
        runs.wait_for_update(sweep / number, 3, attempt=1)

    other = runs.occupy(slurm, "true", "-p", "high", "-N", "4", "--exclusive")
    until(lambda: runs.over(slurm, other), 60, "the preempting job's end")
    for number in "0123":
        runs.wait_for_update(sweep / number, 4, attempt=1 if number in "03" else 2)
    (tmp_path / "hurry").touch()
    assert ended(sweep) == dict.fromkeys("0123", "finished")
    for number in "0123":
        whys = [note["why"] for note in result(sweep / number)["restarts"]]
        assert whys[-1] == "preempted", (number, whys)
        assert result(sweep / number)["updates"] == 300
    until(lambda: runs.over(slurm, first), 30, "the end of the first job")
    rows = slurm.command("sacct", "-nPD", "-j", first, "-o", "JobID,JobName").split()
    told = [row.partition("|")[2] for row in rows if row.partition("|")[2].isdigit()]
    assert sorted(told) == ["0", "0", "1", "2", "3", "3"], "those of another job start there alone"
    page = runs.verb("report", sweep, "--format", "json")
    assert len(json.loads(page.stdout)["runs"]) == 4
