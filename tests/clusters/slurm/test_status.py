"""The status of runs whose jobs the scheduler does not know."""

import pytest

from orchestrator.clusters.slurm import status as module
from orchestrator.clusters.slurm.scheduler import ScheduledJob, SlurmClient
from orchestrator.clusters.slurm.status import _query
from orchestrator.rundir.files import write_json
from orchestrator.rundir.status import from_folder
from tests.run_folders import make_run, result


@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize("state", ["finished", None])
def test_run_that_ends_while_the_scheduler_is_asked_is_not_lost(
    tmp_path, monkeypatch, state, reused
):
    run = make_run(tmp_path / "run")
    write_json(run.handle, {"cluster": "slurm", "job_id": "77", "attempt": 0})
    statuses = {run.path: from_folder(run)}
    assert statuses[run.path].state == "running"
    jobs = {}
    if reused:  # by a job of another script
        jobs["77"] = ScheduledJob(id="77", state="RUNNING", command="/other/run.sbatch")

    def accounted_ends(client, ids):
        del client, ids
        return {}

    if state is not None:  # after the folder was read
        write_json(run.result, result(state=state))
    monkeypatch.setattr(module, "accounted_ends", accounted_ends)
    monkeypatch.setattr(module, "is_of_another", lambda *_: True)
    assert not list(_query(SlurmClient(), jobs, [run], statuses))
    assert statuses[run.path].state == (state or "lost")
    if state is not None:
        assert statuses[run.path].updates == result()["updates"]
