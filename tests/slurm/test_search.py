"""A search on SLURM."""

import json
import signal

import pytest

from tests.helpers import begin, call, result, until
from tests.slurm import runs

search = pytest.importorskip("tests.search.helpers")  # of an add-on
pytestmark = [pytest.mark.slurm, pytest.mark.long]


def test_jobs_of_a_killed_search_are_found_again_and_a_hopeless_one_is_stopped(slurm, tmp_path):
    folder = tmp_path / "found"
    line = (
        "-m",
        "+cluster=slurm_dev",
        f"cluster.slurm_conf={slurm.slurm_conf}",
        "tracker=none",
        "cluster.nodes=1",
        "cluster.ranks_per_node=1",
        "job.arguments.k=1",
        "sweep.search=grid",
        f"run.dir={folder}",
        "job.arguments.lr=0.3,0.31,0.32,0.33,0.34,5",
        "sweep.prune=median",
        "sweep.parallel=3",
        "job.arguments.updates=400",
        "job.arguments.pause=0.05",
        "job.arguments.slow_from=1",
        *search.line_of(folder)[-2:],
    )
    begun = begin(*line, **runs.QUIET)
    until((folder / "2" / "handle.json").exists, what="the third submission")
    begun.send_signal(signal.SIGKILL)
    begun.communicate()
    jobs = [runs.job_of(folder / number) for number in "012"]
    done = call(*line, **runs.QUIET, code=0)
    trials = json.loads((folder / "search.json").read_text())["trials"]
    assert [runs.job_of(folder / number) for number in "012"] == jobs, "none was run twice"
    assert [trial["state"] for trial in trials] == ["complete"] * 5 + ["pruned"], done.stdout
    values = [trial["value"] for trial in trials[:5]]
    assert values == [search.loss_of(lr, 1, 400) for lr in (0.3, 0.31, 0.32, 0.33, 0.34)]
    until(lambda: runs.status(folder / "5")["state"] == "pruned", what="the end of the last trial")
    assert result(folder / "5")["updates"] < 400
