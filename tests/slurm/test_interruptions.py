"""Preemption, requeue, a time limit, an srun that is killed and a batch script that is signalled or
killed: each costs a restart and no bit. Runs that do not affect each other run at the same time.
"""

import collections
import json
import os
import re
import signal

import pytest

from orchestrator.clusters.slurm.diagnosis import AGENTS_KILLED, SRUN_KILLED
from orchestrator.rundir.srun_log import REQUEUED_BY_OTHERS
from slurm import breaking
from tests.helpers import name_of, processes_of, records, result, until
from tests.programs import QUICK, WAITS, script
from tests.refusals import mentions
from tests.slurm import runs
from tests.slurm.runs import log

pytestmark = [pytest.mark.slurm, pytest.mark.long]

ONE_NODE = ("cluster.nodes=1", "cluster.ranks_per_node=2")
DISTURBED = {
    "killed": ".*batch script.*killed",
    "signalled": ".*SIGUSR2",
    "without srun": SRUN_KILLED,
    "without agents": AGENTS_KILLED,
    "without a rank": r"rank 1 on n\d\b.*SIGKILL.*",
}
IN_PLACE = ("without srun", "without agents", "without a rank")
"""These begin again in the same allocation, without a requeue."""


@pytest.fixture(scope="module", autouse=True)
def limited(slurm, tmp_path_factory):
    """Runs that take longer than their time limit of a minute, by the seconds of their notice; the
    other tests run meanwhile.
    """
    folder = tmp_path_factory.mktemp("limited")
    holds = {}
    for ahead_s in (1, 60):
        run = folder / f"{ahead_s}"
        holds[run] = runs.submit_long(
            slurm,
            run,
            "train.checkpoint_every=1000",
            "cluster.partition=short",
            f"cluster.time_min={'1' if ahead_s == 1 else 'null'}",
            f"cluster.signal_ahead_s={ahead_s}",
            "job.pause_s=0.1",
            *ONE_NODE,
        )
    return holds


@pytest.fixture(scope="module", autouse=True)
def disturbed(slurm, tmp_path_factory):
    """Runs whose batch script or srun was killed or signalled, one cancelled, one finished.

    The last two were then requeued by hand.
    """
    folder = tmp_path_factory.mktemp("disturbed")
    names = (*DISTURBED, "cancelled")
    more = ("run.max_restarts=1", *ONE_NODE)
    holds = [runs.submit_long(slurm, folder / name, *more) for name in names]
    finished = runs.submit(slurm, folder / "finished", "train.updates=2", *ONE_NODE)
    for name in names:
        runs.wait_for_update(folder / name, 6)
    breaking.kill_batch_script(slurm, runs.job_of(folder / "killed"))
    breaking.kill_srun(slurm, runs.job_of(folder / "without srun"))
    for name, process in (("without agents", "n"), ("without a rank", "rank 1")):
        for found in processes_of(folder / name):
            if name_of(found).startswith(process) and name_of(found.parent()) != "slurmstepd":
                found.kill()
    signalled = runs.job_of(folder / "signalled")
    slurm.command("scancel", "--batch", "-s", "USR2", signalled)
    runs.verb("cancel", folder / "cancelled", code=0)
    slurm.command("scontrol", "requeue", runs.job_of(folder / "cancelled"))
    runs.wait_over(slurm, folder / "finished")
    slurm.command("scontrol", "requeue", finished)
    for name in DISTURBED:
        runs.wait_for_update(folder / name, 7, attempt=1)
    runs.wait_over(slurm, folder / "cancelled")
    for hold in holds:
        hold.release()
    return folder


def test_a_finished_run_that_is_allocated_again_starts_no_ranks(slurm, disturbed):
    run = disturbed / "finished"
    before = result(run)
    until(lambda: "ended already" in (run / "logs" / "batch.log").read_text(), what="its message")
    until(lambda: runs.over(slurm, runs.job_of(run)), what="the job's end")
    assert runs.queue_state(slurm, runs.job_of(run)) == "COMPLETED"
    assert result(run) == before
    assert [path.name for path in (run / "attempts").glob("0*")] == ["000"]


def test_a_requeue_does_not_undo_cancel(slurm, disturbed):
    run = disturbed / "cancelled"
    assert runs.wait_over(slurm, run)["state"] == "stopped"
    assert runs.status(run)["state"] == "stopped"
    assert list(runs.first_records(run)) == [0]


@pytest.mark.parametrize("name", DISTURBED)
def test_a_batch_script_or_srun_that_dies_costs_a_restart(slurm, disturbed, name, digest):
    ended = runs.wait_over(slurm, disturbed / name)
    assert ended["weights_sha256"] == digest
    (note,) = ended["restarts"]
    assert re.fullmatch(DISTURBED[name], note["why"])
    assert note["lost_updates"] <= 6
    shown = slurm.command("scontrol", "show", "job", runs.job_of(disturbed / name))
    assert f"Restarts={int(name not in IN_PLACE)}" in shown


def test_ranks_whose_slurmstepd_died_train_on_and_end_with_their_job(slurm, tmp_path, digest):
    """Only those of a job on one node: with several, srun ends the step."""
    names = ("finished", "requeued", "cancelled")
    holds = [runs.submit_long(slurm, tmp_path / name, *ONE_NODE) for name in names]
    for name in names:
        runs.wait_for_update(tmp_path / name, 6)
        job = runs.job_of(tmp_path / name)
        breaking.kill_step_daemon(slurm, job, runs.nodes_of(slurm, job)[0])
    slurm.command("scontrol", "requeue", job_of_requeued := runs.job_of(tmp_path / "requeued"))
    slurm.command("scancel", runs.job_of(tmp_path / "cancelled"))
    until(
        lambda: not processes_of(tmp_path / "cancelled"), 60, "the end of a cancelled job's ranks"
    )
    runs.wait_for_update(tmp_path / "requeued", 7, attempt=1)
    for hold in holds:
        hold.release()
    finished, requeued = (runs.wait_over(slurm, tmp_path / name) for name in names[:2])
    assert finished["weights_sha256"] == requeued["weights_sha256"] == digest
    assert finished["restarts"] == []
    (note,) = requeued["restarts"]
    assert (note["why"], note["lost_updates"]) == (REQUEUED_BY_OTHERS, 0)
    assert "Restarts=1" in slurm.command("scontrol", "show", "job", job_of_requeued)
    warned = (tmp_path / "finished" / "attempts" / "000" / "warnings-00000.jsonl").read_text()
    assert mentions(warned, "slurmstepd node SLURM ranks"), warned
    assert runs.status(tmp_path / "cancelled")["state"] == "cancelled"


def test_preemption_a_requeue_and_a_node_set_down_cost_a_restart_each(mended, tmp_path, digest):
    run = tmp_path / "run"
    hold = runs.submit_long(mended, run, "cluster.partition=low", "run.survive=false")
    job = runs.job_of(run)
    runs.wait_for_update(run, 5)
    other = runs.occupy(mended, "true", "-p", "high", "-N", "4", "--exclusive")
    until(lambda: runs.over(mended, other), what="the preempting job's end")
    runs.wait_for_update(run, 6, attempt=1)
    mended.command("scontrol", "requeue", job)
    runs.wait_for_update(run, 7, attempt=2)
    lost = runs.nodes_of(mended, job)[1]
    breaking.set_node_down(mended, lost)
    runs.wait_for_update(run, 8, attempt=3)
    assert lost not in runs.nodes_of(mended, job)
    hold.release()
    ended = runs.wait_over(mended, run)
    assert ended["state"] == "finished"
    assert ended["weights_sha256"] == digest
    preempted, requeued, _ = ended["restarts"]
    assert preempted["why"] == "preempted"
    assert preempted["lost_updates"] <= 1
    assert requeued["why"] == REQUEUED_BY_OTHERS
    found = runs.status(run)
    assert (found["restarts"], found["why"]) == (3, ended["restarts"][-1]["why"])


def test_a_stop_that_cannot_wait_for_the_boundary_loses_its_window_only(slurm, tmp_path):
    """A requeue by hand leaves KillWait, 3 s here, and an update takes eight."""
    run = tmp_path / "run"
    more = ("train.updates=2", "accumulation.steps=16", "train.checkpoint_every=100")
    job = runs.submit(slurm, run, *more, "job.pause_s=0.5", "cluster.signal_ahead_s=3")
    expected = runs.reference(tmp_path / "local", *more)
    runs.wait_for_update(run, 0)
    slurm.command("scontrol", "requeue", job)
    until(lambda: runs.queue_state(slurm, job) == "PENDING", 20, "leaving inside the window")
    ended = runs.wait_over(slurm, run)
    assert ended["weights_sha256"] == expected
    note = runs.first_records(run)[1]["restart"]
    assert (note["resumed_from"], note["lost_updates"]) == (1, 0)
    assert note["lost_micro_steps"] > 0
    warned = (run / "logs" / "rank-00000.log").read_text()
    assert runs.printed(warned, "update 3 s cluster.signal_ahead_s accumulation.steps"), warned


PREEMPTED = f"""{QUICK}
import helper
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
frameworks_see = {{k: v for k, v in os.environ.items() if k.startswith(("SLURM_NT", "SLURM_PROC"))}}
print(json.dumps([attempt, helper.VERSION, frameworks_see, os.environ["SLURM_JOB_NAME"]]))
sys.stdout.flush()
def stop(number, frame):
    print("got", number, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
if attempt == "0":
{WAITS.replace(chr(10), chr(10) + "    ")}
"""


def test_a_requeued_program_gets_its_signal_and_the_submitted_code_runs_again(slurm, tmp_path):
    script(tmp_path, PREEMPTED)
    helper = script(tmp_path, "VERSION = 'submitted'\n", "helper.py")
    runs.verb(
        "run",
        "+cluster=slurm_dev",
        f"cluster.slurm_conf={slurm.slurm_conf}",
        *runs.SHAPE,
        f"run.dir={tmp_path / 'run'}",
        "+cluster.slurm_flags.begin=now+1hour",
        "--",
        "train.py",
        cwd=tmp_path,
        code=0,
    )
    helper.write_text("VERSION = 'edited'\n")
    script(tmp_path, "raise SystemExit('edited')\n")
    runs.release(slurm, tmp_path / "run")
    until(lambda: len(list(tmp_path.glob("here-*"))) == 2, what="the program")
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "here-0").stat().st_mode & 0o777 == 0o666 & ~mask, "as the person has it"
    assert runs.status(tmp_path / "run")["state"] == "running"
    slurm.command("scontrol", "requeue", runs.job_of(tmp_path / "run"))
    ended = runs.wait_over(slurm, tmp_path / "run")
    assert (ended["state"], len(ended["restarts"])) == ("finished", 1)
    for rank in range(2):
        said = [json.loads(x) for x in log(tmp_path, rank).splitlines() if x.startswith("[")]
        assert said == [[a, "submitted", {}, "interactive"] for a in ("0", "1")]
        assert f"got {signal.SIGTERM.value}" in log(tmp_path, rank)
        assert "left running" not in log(tmp_path, rank), "the node's watcher is ours"


def test_a_run_goes_on_beyond_its_time_limit(slurm, limited, digest):
    for run, hold in limited.items():
        runs.wait_for_update(run, 1, attempt=1)
        hold.release()
    for run in limited:
        ended = runs.wait_over(slurm, run)
        assert ended["weights_sha256"] == digest
        notes = {(note["why"], note["lost_updates"]) for note in ended["restarts"]}
        assert notes == {("near its time limit", 0)}


def test_a_notice_as_long_as_the_time_limit_is_deferred(limited):
    run = list(limited)[1]
    log = (run / "logs" / "rank-00000.log").read_text()
    *before, _ = log.split("they train on until the limit is near")
    trained = [re.findall(r"^update (\d+)/", text, re.MULTILINE) for text in before]
    noticed_after = [int(numbers[-1]) for numbers in trained if numbers]
    updates = collections.defaultdict(list)  # by attempt; one that could not save in time has none
    for record in records(run):
        updates[record["attempt"]].append(record["update"])
    assert any(
        done in attempt and attempt[-1] - done > 5
        for done in noticed_after
        for attempt in updates.values()
    )
