"""Sweeps on SLURM: arrays, and points that share a job."""

import contextlib
import getpass
import json
import os
import signal

import pytest

from orchestrator.errors import describe_status
from orchestrator.sweep.tasks import Action
from tests.helpers import begin, call, node_process, result, until
from tests.hold import Hold
from tests.slurm import runs
from tests.slurm.runs import printed, queued

pytestmark = [pytest.mark.slurm, pytest.mark.long]

STEPS = ("accumulation.steps=1,2,4,8", "cluster.nodes=1", "cluster.ranks_per_node=1")


def states(sweep):
    listed = json.loads(runs.verb("status", sweep, "--json").stdout)
    return {entry["folder"].rpartition("/")[2]: entry["state"] for entry in listed}


def jobs_below(slurm, folder):
    """Return the jobs, as ARRAY_INDEX, that sacct knows of scripts below a folder."""
    rows = slurm.command("sacct", "-nPX", "-o", "JobID,SubmitLine").splitlines()
    return {row.partition("|")[0] for row in rows if str(folder) in row}


def wait_for_end(sweep):
    def all_over():
        found = states(sweep)
        over = all(s in ("finished", "failed", "cancelled", "stopped") for s in found.values())
        return found if over else None

    return until(all_over, what=f"the end of all points in {sweep}")


@pytest.fixture(scope="module")
def swept(slurm, tmp_path_factory):
    """A sweep of four points whose terminal was closed. One rank was killed, one point cancelled,
    and the element that has the array's own number was requeued by hand.
    """
    folder = tmp_path_factory.mktemp("sweeps")
    sweep, hold = folder / "sweep", Hold(folder / "hold").hold_before(299)
    line = (
        "-m",
        *runs.overrides(slurm, sweep, "train.updates=300", "job.pause_s=0.1", *STEPS),
        hold.override,
    )
    typed = begin(*line, **runs.QUIET)
    until((sweep / "3" / "handle.json").exists, what="the submission")
    with contextlib.suppress(ProcessLookupError):  # it ends by itself once all are submitted
        os.killpg(typed.pid, signal.SIGKILL)  # the terminal is closed
    typed.communicate()
    for number in "123":
        runs.wait_for_update(sweep / number, 2)
    [array] = {runs.job_of(sweep / number).split("_")[0] for number in "0123"}
    show = slurm.command("scontrol", "show", "job", f"{array}_3")
    assert f"JobId={array} " in show, "the last element has the array's own number"
    slurm.command("scontrol", "requeue", f"{array}_3")
    node_process(sweep / "1", "rank 0").kill()
    runs.verb("cancel", sweep / "2", code=0)
    until(lambda: runs.over(slurm, f"{array}_2"), what="the end of the cancelled point")
    runs.wait_for_update(sweep / "3", 2, attempt=1)
    hold.release()
    return line, sweep, wait_for_end(sweep), jobs_below(slurm, sweep)


def test_a_sweep_is_one_array_and_what_happens_to_one_element_concerns_it_alone(swept, slurm):
    _, sweep, found, submitted = swept
    assert found == {"0": "finished", "1": "failed", "2": "stopped", "3": "finished"}
    assert len({job.split("_")[0] for job in submitted}) == 1
    assert result(sweep / "3")["restarts"], "it was requeued alone"
    assert not result(sweep / "0").get("restarts")
    assert result(sweep / "1")["culprit"]["cause"].startswith(describe_status(-9))
    assert runs.accounted(slurm, runs.job_of(sweep / "1")) == "FAILED"


def test_the_same_line_again_runs_exactly_what_has_not_finished(swept, slurm):
    line, sweep, _, _ = swept
    before, kept = jobs_below(slurm, sweep), (sweep / "0" / "result.json").stat().st_mtime_ns
    planned = runs.verb("plan", *line).stdout
    assert planned.count(Action.NOTHING.value) == 2, planned
    assert Action.RESUME.value in planned
    done = call(*line, **runs.QUIET, code=0)
    assert printed(done.stdout, "2 points queued"), done.stdout
    assert set(wait_for_end(sweep).values()) == {"finished"}
    assert (sweep / "0" / "result.json").stat().st_mtime_ns == kept

    def elements():
        return {job.partition("_")[2] for job in jobs_below(slurm, sweep) - before}

    until(lambda: len(elements()) > 1, what="sacct's rows, which come one by one")
    assert elements() == {"1", "2"}
    assert len({result(sweep / n)["updates"] for n in "0123"}) == 1


@pytest.fixture
def few(slurm):
    """Return a function that sets MaxSubmitJobs of an account that only this test uses."""
    user, shown = getpass.getuser(), ("scontrol", "show", "assoc_mgr", "flags=assoc")

    def set_limit(count):
        slurm.command(
            "sacctmgr",
            "-i",
            "modify",
            "user",
            user,
            "where",
            "account=few",
            "set",
            f"MaxSubmitJobs={count}",
        )
        until(lambda: f"MaxSubmitJobs={count}(" in slurm.command(*shown), what="the limit")

    slurm.command("sacctmgr", "-i", "add", "account", "few")
    slurm.command("sacctmgr", "-i", "add", "user", user, "account=few")
    return set_limit


def test_the_same_line_submits_the_points_that_did_not_fit_before(slurm, tmp_path, few):
    waits, sweep = tmp_path / "waits.sh", tmp_path / "sweep"
    waits.write_text("until [ -e go ]; do sleep 0.1; done\n")

    def typed(folder, verb="run"):
        given = runs.overrides(slurm, folder, "cluster.nodes=1", "cluster.account=few")
        kept = [o for o in given if o.startswith(("+cluster", "cluster", "run", "tracker"))]
        line = (verb, "-m", *kept, "job.style=plain", "job.arguments.x=1,2,3,4")
        return runs.verb(*line, "--", "bash", str(waits), cwd=tmp_path)

    few(2)
    limit = "limit jobs 2 of 4 points"
    assert printed(typed(sweep, "plan").stdout, limit)
    first = typed(sweep)
    assert first.returncode == 2
    assert printed(first.stderr, limit), first.stderr
    assert printed(first.stderr, "2 points 4 queued"), first.stderr
    assert {runs.job_of(sweep / n).split("_")[0] for n in "01"} == queued(slurm, sweep)
    assert not (sweep / "2").exists()
    full = typed(sweep)
    assert full.returncode == 2, "there is no room: nothing is submitted, and nothing is lost"
    assert printed(full.stderr, "limit jobs 0 of 2 points"), full.stderr
    few(4)
    assert typed(sweep).returncode == 0
    (tmp_path / "go").touch()
    assert wait_for_end(sweep) == dict.fromkeys("0123", "finished")
