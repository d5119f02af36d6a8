"""A search on SLURM: its trials are jobs, which outlive it and are found again."""

import json
import os
import signal

from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import is_held
from tests.helpers import begin, call, result, until
from tests.slurm import runs
from tests.sweep.search.helpers import line_of, loss_of


def line_on(slurm, folder, *more):
    """The line of a search of the plain program, which tries all points."""
    return (
        "-m", "+cluster=slurm_dev", f"cluster.slurm_conf={slurm.slurm_conf}", "tracker=none",
        "cluster.nodes=1", "cluster.ranks_per_node=1", "job.arguments.k=1", "sweep.search=grid",
        f"run.dir={folder}", *more, *line_of(folder)[-2:],
    )  # fmt: skip


def test_jobs_of_a_killed_search_are_found_again_and_a_hopeless_one_is_stopped(slurm, tmp_path):
    folder = tmp_path / "found"
    line = line_on(
        slurm, folder, "job.arguments.lr=0.3,0.31,0.32,0.33,0.34,5", "sweep.prune=median",
        "sweep.parallel=3", "job.arguments.updates=400", "job.arguments.pause=0.05",
        "job.arguments.slow_from=1",
    )  # fmt: skip
    begun = begin(*line, **runs.QUIET)
    until((folder / "2" / "handle.json").exists, 60, "the third submission")
    begun.send_signal(signal.SIGKILL)
    begun.communicate()
    jobs = {number: runs.job_of(folder / number) for number in "012"}
    done = call(*line, timeout=240, **runs.QUIET)
    assert done.returncode == 0, done.stdout + done.stderr
    trials = json.loads((folder / "search.json").read_text())["trials"]
    assert {number: runs.job_of(folder / number) for number in "012"} == jobs, "none was run twice"
    assert [trial["state"] for trial in trials] == ["complete"] * 5 + ["pruned"], done.stdout
    assert [trial["value"] for trial in trials[:5]] == [
        loss_of(lr, 1, 400) for lr in (0.3, 0.31, 0.32, 0.33, 0.34)
    ]
    until(lambda: runs.status(folder / "5")["state"] == "pruned", 30, "the end of the last trial")
    assert result(folder / "5")["updates"] < 400


def test_ctrl_c_leaves_the_jobs_and_cancel_ends_them_and_the_same_line_goes_on(slurm, tmp_path):
    folder = tmp_path / "found"
    line = line_on(slurm, folder, "job.arguments.lr=0.3,0.4", "sweep.parallel=2",
                   "job.arguments.updates=60", "job.arguments.pause=0.15")  # fmt: skip
    begun = begin(*line, **runs.QUIET)
    until((folder / "1").exists, 60, "the beginning of a submission")
    os.killpg(begun.pid, signal.SIGINT)  # as a terminal does, also to what it has asked just now
    told, _ = begun.communicate(timeout=60)
    queued = [n for n in "01" if (folder / n / "handle.json").exists()]
    assert begun.returncode == 3, told
    assert "2 of 2 trials: 2 not over" in told
    assert ("by itself" if len(queued) == 1 else "by themselves") in told
    jobs = {n: runs.job_of(folder / n) for n in queued}
    begun = begin(*line, **runs.QUIET)
    until(lambda: is_held(RunDir(folder)), 60, "the same line at work again")
    until(lambda: all((folder / n / "metrics.jsonl").exists() for n in "01"), 60, "both at work")
    assert {n: runs.job_of(folder / n) for n in queued} == jobs, "none was submitted twice"
    cancelled = runs.verb("cancel", folder)
    assert cancelled.returncode == 0, cancelled.stderr
    assert "was told to end" in cancelled.stdout
    told, _ = begun.communicate(timeout=60)
    assert begun.returncode == 3, told
    done = call(*line, timeout=240, **runs.QUIET)  # they may be stopping yet
    assert done.returncode == 0, done.stdout + done.stderr
    trials = json.loads((folder / "search.json").read_text())["trials"]
    assert [trial["value"] for trial in trials] == [loss_of(lr, 1, 60) for lr in (0.3, 0.4)]
    assert sorted(path.name for path in folder.glob("[0-9]*")) == ["0", "1"]
    first, second = (len(list((folder / n / "attempts").glob("0*"))) for n in "01")
    assert first in (1, 2), "it may have ended before it could be cancelled"
    assert second == 2
    for number in "01":
        job = runs.job_of(folder / number)
        until(lambda job=job: runs.over(slurm, job), 30, f"the end of job {job}")
