"""A sweep on SLURM: one array, of which one element can fail, be requeued or cancelled alone."""

import getpass
import json
import os
import signal

import pytest

from tests.helpers import begin, call, processes_of, result, until
from tests.slurm import runs
from tests.slurm.test_killed_submission import queued

STEPS = ("accumulation.steps=1,2,4,8", "cluster.nodes=1", "cluster.ranks_per_node=1")


def states(sweep):
    listed = json.loads(runs.verb("status", sweep, "--json").stdout)
    return {entry["folder"].rpartition("/")[2]: entry["state"] for entry in listed}


def jobs(slurm):
    return set(slurm.command("sacct", "-nPX", "-o", "JobID").split())


def ended(sweep):
    def all_over():
        found = states(sweep)
        over = all(s in ("finished", "failed", "cancelled", "stopped") for s in found.values())
        return found if over else None

    return until(all_over, 120, f"the end of all points in {sweep}")


@pytest.fixture(scope="module")
def swept(slurm, tmp_path_factory):
    """A sweep of four points whose terminal is gone: one rank was killed, one cell cancelled, and
    the element that has the array's own number was requeued by hand.
    """
    sweep = tmp_path_factory.mktemp("sweeps") / "sweep"
    line = ("-m", *runs.overrides(slurm, sweep, "train.updates=30", "job.pause_s=0.1", *STEPS))
    before = jobs(slurm)
    typed = begin(*line, **runs.QUIET)
    until((sweep / "3" / "handle.json").exists, 60, "the submission")
    os.killpg(typed.pid, signal.SIGKILL)  # the terminal is closed
    typed.communicate()
    for number in "123":
        runs.wait_for_update(sweep / number, 2)
    [array] = {runs.job_of(sweep / number).split("_")[0] for number in "0123"}
    show = slurm.command("scontrol", "show", "job", f"{array}_3")
    assert f"JobId={array} " in show, "the last element has the array's own number"
    slurm.command("scontrol", "requeue", f"{array}_3")
    ranks = [p for p in processes_of(sweep / "1") if "rank" in p.cmdline()]
    [rank] = [p for p in ranks if p.cmdline()[0] != "srun"]
    rank.kill()
    done = runs.verb("cancel", sweep / "2")
    assert done.returncode == 0, done.stderr
    return line, sweep, ended(sweep), jobs(slurm) - before


def test_a_sweep_is_one_array_and_what_happens_to_one_element_happens_to_no_other(swept):
    _, sweep, found, submitted = swept
    assert found == {"0": "finished", "1": "failed", "2": "stopped", "3": "finished"}
    assert len({job.split("_")[0] for job in submitted}) == 1
    assert result(sweep / "3")["restarts"], "it was requeued alone, and went on"
    assert not result(sweep / "0").get("restarts")


def test_the_same_line_again_runs_exactly_what_has_not_finished(swept, slurm):
    line, sweep, _, _ = swept
    before, kept = jobs(slurm), (sweep / "0" / "result.json").stat().st_mtime_ns
    planned = runs.verb("plan", *line).stdout
    assert planned.count("done") == 2
    assert "to go on" in planned
    done = call(*line, **runs.QUIET)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 points queued" in done.stdout
    assert set(ended(sweep).values()) == {"finished"}
    assert (sweep / "0" / "result.json").stat().st_mtime_ns == kept
    again = until(lambda: (jobs(slurm) - before) or None, 20, "sacct's rows")
    assert {job.partition("_")[2] for job in again} == {"1", "2"}
    assert len({result(sweep / n)["updates"] for n in "0123"}) == 1
    told = runs.verb("report", sweep, "--format", "json")
    assert len(json.loads(told.stdout)["runs"]) == 4


@pytest.fixture
def few(slurm):
    """Says how many jobs one may have queued by an account that only this test uses."""
    user, shown = getpass.getuser(), ("scontrol", "show", "assoc_mgr", "flags=assoc")

    def most(count):
        slurm.command("sacctmgr", "-i", "modify", "user", user, "where", "account=few", "set",
                      f"MaxSubmitJobs={count}")  # fmt: skip
        until(lambda: f"MaxSubmitJobs={count}(" in slurm.command(*shown), 20, "the limit")

    slurm.command("sacctmgr", "-i", "add", "account", "few")
    slurm.command("sacctmgr", "-i", "add", "user", user, "account=few")
    return most


def test_the_same_line_submits_the_points_that_did_not_fit_before(slurm, tmp_path, few):
    waits, sweep = tmp_path / "waits.sh", tmp_path / "sweep"
    waits.write_text("until [ -e go ]; do sleep 0.1; done\n")

    def typed(folder, verb="run"):
        given = runs.overrides(slurm, folder, "cluster.nodes=1", "cluster.account=few")
        kept = [o for o in given if o.startswith(("+cluster", "cluster", "run", "tracker"))]
        line = (verb, "-m", *kept, "job.style=plain", "job.arguments.x=1,2,3,4")
        return runs.verb(*line, "--", "bash", str(waits), cwd=tmp_path)

    few(2)
    limit = "MaxSubmitJobs=2, of which 0 are taken: there is room for 2 of 4 points now"
    assert limit in typed(sweep, "plan").stdout
    first = typed(sweep)
    assert first.returncode == 2
    assert limit in first.stderr
    assert "2 points of 4 are queued; the same line again submits the others" in first.stderr
    assert {runs.job_of(sweep / n).split("_")[0] for n in "01"} == queued(slurm, sweep)
    assert not (sweep / "2").exists()
    full = typed(sweep)
    assert full.returncode == 2, "there is no room: nothing is submitted, and nothing is lost"
    assert "of which 2 are taken: there is room for 0 of 2 points now" in full.stderr
    few(4)
    assert typed(sweep).returncode == 0
    (tmp_path / "go").touch()
    assert ended(sweep) == dict.fromkeys("0123", "finished")
