"""Batch scripts that are signalled or killed, requeues in between and too late: all at once, since
they do not touch each other.
"""

import json
import re
import shutil

import pytest

from orchestrator.rundir.files import write_json
from slurm import breaking
from tests.helpers import result, until
from tests.slurm import runs

DISTURBED = {
    "killed": "its batch script was killed",
    "batch": "asked to stop by SIGUSR2",
    "full": "asked to stop by SIG(TERM|USR2)|its batch script was sent SIGTERM",
}


HELD = "+cluster.slurm_flags.begin=now+3600"
ONE_NODE = ("cluster.nodes=1", "cluster.ranks_per_node=2")
LONG = ("train.updates=60", "job.pause_s=0.05", "train.checkpoint_every=5", *ONE_NODE)
MORE = {
    **dict.fromkeys((*DISTURBED, "cancelled"), LONG),
    "late": ("train.updates=2", *ONE_NODE),
    "cyclic": (
        "cluster.ranks_per_node=2", "job.fault=kill", "+cluster.slurm_flags.distribution=cyclic",
    ),
}  # fmt: skip


def disturb(slurm, name, run, job):
    if name == "killed":
        breaking.kill_batch_script(slurm, job)
    elif name == "batch":
        slurm.command("scancel", "--batch", "-s", "USR2", job)
    elif name == "full":
        slurm.command("scancel", "--full", "-s", "TERM", job)
    elif name == "cancelled":
        assert runs.verb("cancel", run).returncode == 0
        slurm.command("scontrol", "requeue", job)


@pytest.fixture(scope="module", autouse=True)
def fire(slurm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fire")
    for name in ("late", *DISTURBED, "cancelled", "cyclic", "homeless"):
        runs.submit(slurm, folder / name, HELD, *MORE.get(name, ()))
    shutil.rmtree(folder / "homeless" / "submitit")
    for path in sorted(folder.iterdir()):
        runs.release(slurm, path)
    for name in (*DISTURBED, "cancelled"):
        run = folder / name
        runs.wait_for_update(run, 6)
        disturb(slurm, name, run, runs.job_of(run))
    runs.wait_over(slurm, folder / "late")
    slurm.command("scontrol", "requeue", runs.job_of(folder / "late"))
    return folder


def test_a_finished_run_that_is_allocated_again_asks_for_no_ranks(slurm, fire):
    run = fire / "late"
    before = result(run)
    until(lambda: "ended already" in (run / "logs" / "batch.log").read_text(), 60, "its word")
    until(lambda: runs.over(slurm, runs.job_of(run)), 20, "the job's end")
    assert runs.queue_state(slurm, runs.job_of(run)) == "COMPLETED"
    assert result(run) == before
    assert [path.name for path in (run / "attempts").glob("0*")] == ["000"]


def test_a_requeue_does_not_undo_cancel(slurm, fire):
    run = fire / "cancelled"
    assert runs.wait_over(slurm, run)["state"] == "stopped"
    until(lambda: runs.over(slurm, runs.job_of(run)), 60, "the end of the requeued job")
    assert runs.status(run)["state"] == "stopped"
    assert list(runs.first_records(run)) == [0]


def test_the_node_of_a_killed_rank_is_right_however_ranks_are_distributed(slurm, fire):
    culprit = runs.wait_over(slurm, fire / "cyclic")["culprit"]
    place = json.loads((fire / "cyclic" / "attempts" / "000" / "node-00001.json").read_text())
    assert place["ranks"] == [1, 3]
    assert (culprit["rank"], culprit["node"]) == (1, place["node"])


def test_a_run_that_has_lost_its_files_says_so_and_status_writes_its_end_once(slurm, fire):
    run = fire / "homeless"
    until(lambda: runs.over(slurm, runs.job_of(run)), 60, "the job's end")
    found = runs.status(run)
    assert found["state"] == "failed"
    assert found["reason"].startswith(f"{run}/submitit is gone")
    assert result(run)["culprit"]["cause"] == found["reason"]
    assert not (run / "attempts" / "000").exists()


@pytest.mark.parametrize("name", DISTURBED)
@pytest.mark.timeout(240)
def test_a_batch_script_that_is_signalled_or_killed_costs_a_restart_and_no_bit(
    slurm, fire, name, digest_of_60
):
    run = fire / name
    until((run / "result.json").exists, 180, f"the end of {name}")
    ended = runs.wait_over(slurm, run)
    assert ended["weights_sha256"] == digest_of_60
    (note,) = ended["restarts"]
    assert re.fullmatch(DISTURBED[name], note["why"])
    assert note["lost_updates"] <= 6


def test_a_cancel_that_fails_leaves_no_mark(slurm, tmp_path):
    run = tmp_path / "run"
    runs.submit(slurm, run, "+cluster.slurm_flags.begin=now+3600")
    broken = tmp_path / "bin"
    broken.mkdir()
    (broken / "scancel").write_text("#!/bin/sh\necho 'scancel: error: no' >&2\nexit 1\n")
    (broken / "scancel").chmod(0o755)
    done = runs.verb("cancel", run, PATH=f"{broken}:/usr/bin:/bin")
    assert done.returncode == 2
    assert "scancel: error: no" in done.stderr
    assert not (run / "cancel").exists()
    assert runs.verb("cancel", run).returncode == 0
    assert runs.status(run)["state"] == "cancelled"


def test_without_slurmdbd_runs_are_submitted_and_seen(mended, tmp_path):
    """One job that squeue has forgotten must not make the others unknown."""
    breaking.stop_accounting(mended)
    held, forgotten = tmp_path / "held", tmp_path / "forgotten"
    for run in (held, forgotten):
        runs.submit(mended, run, "cluster.account=dev", "+cluster.slurm_flags.begin=now+3600")
    handle = json.loads((forgotten / "handle.json").read_text())
    assert runs.verb("cancel", forgotten).returncode == 0
    (forgotten / "result.json").unlink()
    handle.pop("sha256", None)
    write_json(forgotten / "handle.json", {**handle, "job_id": "999999"})
    found = json.loads(runs.verb("status", tmp_path, "--json").stdout)
    assert {entry["folder"].rsplit("/", 1)[1]: entry["state"] for entry in found} == {
        "forgotten": "unknown", "held": "pending",
    }  # fmt: skip
    runs.verb("cancel", held)
