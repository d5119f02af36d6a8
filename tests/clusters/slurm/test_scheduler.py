"""Calls of SLURM's commands, and the parsing of their answers, with fake commands on PATH."""

import errno
import json
import math
import os
import re
import shutil
import time
from concurrent.futures import Future

import pytest

from orchestrator.clusters.api import State
from orchestrator.clusters.slurm import handle as followed
from orchestrator.clusters.slurm.diagnosis import CAUSES
from orchestrator.clusters.slurm.finalize import finalize_ended_job
from orchestrator.clusters.slurm.handle import SlurmHandle, cancel_all
from orchestrator.clusters.slurm.scheduler import ScheduledJob
from orchestrator.clusters.slurm.status import NO_ANSWER
from orchestrator.clusters.slurm.submission import NO_NUMBER, adopt, queue
from orchestrator.errors import ClusterError, RunFolderError
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import departure_note
from orchestrator.runs.cancel import cancel_sweep
from orchestrator.runs.status import statuses
from tests.clusters.slurm.queue_lines import queue_line
from tests.programs import script
from tests.refusals import mentions, refused
from tests.run_folders import make_run

pytestmark = pytest.mark.whole_runs


@pytest.fixture
def say(tmp_path, monkeypatch):
    """Make a command that says something; and the list of all calls so far, a line each."""
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    calls.touch()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_CONF", raising=False)

    def say(command, answer):
        text = (
            f'#!/bin/sh\necho "{command} $*" >>{calls}\nenv | grep ^SQUEUE_ >>{calls}\n'
            f"cat <<'END'\n{answer}\nEND\n"
        )
        script(programs, text, command, run=True)
        return lambda: calls.read_text().splitlines()

    return say


def run_of_job(folder, job_id):
    run = make_run(folder)
    write_json(run.handle, {"kind": "slurm", "job_id": job_id, "attempt": 0, "slurm_conf": None})
    return run


@pytest.fixture
def submitted(tmp_path):
    """A run that was submitted as job 7, some time ago."""
    run = run_of_job(tmp_path / "run", "7")
    for path in (run.path, run.attempts):
        os.utime(path, (1.0, 1.0))
    return run


def test_the_status_of_many_runs_is_one_unfiltered_call(submitted, say, tmp_path, monkeypatch):
    monkeypatch.setenv("SQUEUE_PARTITION", "debug")
    lines = [queue_line(), queue_line(JobArrayID="8", State="PENDING")]
    calls = say("squeue", "\n".join(lines))
    found, sentences = statuses([submitted, run_of_job(tmp_path / "other", "8")])
    assert ([one.state for one in found], sentences) == (["starting", "pending"], [])
    assert len(calls()) == 1


def test_without_squeue_a_run_is_unknown_and_what_is_missing_is_said(submitted, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    (found,), sentences = statuses([submitted])
    assert (found.state, found.reason) == ("unknown", NO_ANSWER)
    assert mentions(sentences[0], "squeue +cluster=slurm"), sentences[0]


def test_jobs_of_the_queue_are_known_without_the_accountings_answer(submitted, say, tmp_path):
    say("squeue", queue_line(JobArrayID="8"))
    say("sacct", "")
    (tmp_path / "bin" / "sacct").write_text("#!/bin/sh\necho 'sacct: error: no' >&2\nexit 1\n")
    found, sentences = statuses([submitted, run_of_job(tmp_path / "other", "8")])
    assert [one.state for one in found] == ["unknown", "starting"]
    assert found[0].reason == NO_ANSWER
    assert "sacct: error: no" in sentences[0]


@pytest.mark.parametrize(("plan", "marked"), [({}, True), ({"program": {"ranks": 1}}, False)])
def test_a_suspended_job_is_sent_no_signal_by_cancel(submitted, say, plan, marked):
    write_json(submitted.plan, plan)
    say("scancel", "")
    say("scontrol", "")
    batch = submitted.submitit / "000.sh"
    calls = say("squeue", queue_line(State="SUSPENDED", Command=str(batch)))
    sentence = cancel_all([submitted], now=False)[submitted.path].clause
    assert mentions(sentence, "`scontrol resume 7` --now"), sentence
    assert submitted.cancel.exists() == marked
    assert not any(call.startswith("scancel") for call in calls())
    cancel_all([submitted], now=True)
    assert "scancel 7" in calls()


@pytest.mark.parametrize("now", [False, True])
def test_another_runs_job_is_not_cancelled(submitted, say, now):
    calls = say("scontrol", "JobId=7 StdOut=/another/log")
    say("squeue", queue_line(Command="/another/script.sh"))
    with refused(ClusterError, f"job 7 {submitted.handle} /another/script.sh"):
        SlurmHandle(submitted).cancel(submitted, now=now)
    assert not submitted.cancel.exists()
    assert not any(call.startswith("scancel") for call in calls())


def test_cancel_says_of_an_ended_run_that_its_job_is_about_to_end(submitted, say):
    write_json(submitted.result, {"state": "finished"})
    say("scancel", "")
    calls = say("squeue", queue_line(Command=str(submitted.submitit / "000.sh")))
    sentence = cancel_all([submitted], now=False)[submitted.path].clause
    assert mentions(sentence, "(finished) --now"), sentence
    assert not submitted.cancel.exists()
    cancel_all([submitted], now=True)
    assert [call for call in calls() if call.startswith("scancel")] == ["scancel 7"]


@pytest.mark.parametrize("now", [False, True])
def test_a_point_that_cannot_be_read_is_cancelled_with_its_sweep_or_named(say, tmp_path, now):
    """Point 1 has a damaged plan, point 2 says nothing of its job, and point 3 is over."""
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    runs = [run_of_job(sweep / str(n), f"7_{n}") for n in range(4)]
    runs[1].plan.write_text("{")
    batch = sweep / "arrays" / "000.sh"
    lines = [queue_line(JobArrayID=f"7_{n}", Command=str(batch)) for n in range(3)]
    say("sacct", "7_3|FAILED|1:0|n1")
    say("scancel", "")
    calls = say("squeue", "\n".join(lines))
    for damaged, ids in ((runs[3].plan, "7_0 7_1 7_2"), (runs[2].handle, "7_0 7_1")):
        damaged.write_text("{")
        seen = len(calls())
        if damaged == runs[3].plan:
            said = "\n".join(cancel_sweep(sweep, now=now))
        else:
            with refused(ClusterError, f"2 {runs[2].handle}") as caught:
                cancel_sweep(sweep, now=now)
            said = str(caught.value)
        signalled = {
            job
            for call in calls()[seen:]
            if call.startswith("scancel")
            for job in call.split()
            if job.startswith("7_")
        }
        assert signalled == set(ids.split())
        # To end at once, it need not be known what a stop does by the plan.
        assert (str(runs[1].plan) in said) == (not now)
        assert str(runs[3].path) not in said


def test_a_forgotten_element_of_an_array_is_called_cancelled_before_it_began(submitted, say):
    say("squeue", queue_line(JobArrayID="8"))
    say("sacct", "7_3|COMPLETED|0:0|n1")
    write_json(submitted.handle, {**submitted.read_handle(), "job_id": "7_4"})
    (waited,), _ = statuses([submitted])
    submitted.attempt(0).mkdir()
    (begun,), _ = statuses([submitted])
    assert (waited.state, begun.state) == ("lost", "lost")
    assert mentions(begun.reason, "job 7_4"), begun.reason
    assert mentions(waited.reason.removeprefix(begun.reason), "elements arrays cancelled")


class Clock:
    """Time that passes by sleeping only."""

    now = 1000.0

    def time(self):
        return self.now

    monotonic = time

    def sleep(self, seconds):
        self.now += seconds


def test_a_follower_asks_at_most_four_times_a_minute_and_never_waits(submitted, say, monkeypatch):
    calls = say("squeue", queue_line(State="PENDING", Reason="Resources"))
    clock = Clock()
    monkeypatch.setattr(followed, "time", clock)
    handle = followed.SlurmHandle(submitted)
    handle.poll(0.0)
    handle._answer.result(60)
    for _ in range(4 * 120):
        handle.poll(0.25)
        if handle._answer is not None:
            handle._answer.result(60)
    assert handle.waiting_for == "Resources"
    assert 120 / followed.QUERY_INTERVAL_S <= len(calls()) <= 120 / followed.QUERY_INTERVAL_S + 1


def test_a_silent_squeue_holds_up_no_follower(submitted, say, tmp_path):
    say("squeue", "")
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\nexec sleep 20\n")
    handle = followed.SlurmHandle(submitted)
    began = time.monotonic()
    for _ in range(20):
        assert handle.poll(0.0) is State.PENDING
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("reason", "names"),
    [
        ("launch failed requeued held", "`sinfo -R` `scontrol release 7`"),
        ("JobHeldUser", "`scontrol release 7`"),
        ("JobHeldAdmin", "administrator `scontrol release 7`"),
        ("job_requeued_in_held_state", "`scontrol release 7`"),
        ("job_requeued_in_special_exit_state", "`scontrol release 7`"),
        ("DependencyNeverSatisfied", "dependency `cancel`"),
        ("QOSMaxWallDurationPerJobLimit", "(cluster.time_min) QOS's limit `cancel`"),
    ],
)
def test_a_job_that_waits_in_vain_says_what_to_do(submitted, say, reason, names):
    say("squeue", queue_line(State="PENDING", NodeList="", Reason=reason))
    (found,), _ = statuses([submitted])
    assert found.state == "pending"
    cause, _, advice = found.reason.partition(": ")
    assert (cause, mentions(advice, names)) == (reason, True)


def test_a_job_whose_reservation_was_deleted_is_not_ended_by_looking(submitted, say):
    say("sacct", "7|PENDING|0:0|None assigned")
    for reason in ("ReservationDeleted", "Reservation soon was deleted"):
        say("squeue", queue_line(State="RESV_DEL_HOLD", NodeList="", Reason=reason))
        (found,), _ = statuses([submitted])
        assert (found.state, "`scontrol release 7`" in found.reason) == ("pending", True)
    assert not submitted.result.exists()


def test_a_job_that_the_controller_has_lost_does_not_run_by_its_accounting(submitted, say):
    """As after `slurmctld -c`; sacct lists it among the runaway jobs for ever."""
    say("squeue", "")
    say("sacct", "7|REQUEUED|0:0|n0\n7|RUNNING|0:0|n0")
    (found,), _ = statuses([submitted])
    assert (found.state, mentions(found.reason, "job 7")) == ("lost", True)
    say("sacct", "7|REQUEUED|0:0|n0\n7|NODE_FAIL|0:0|n0")
    (found,), _ = statuses([submitted])
    assert (found.state, found.reason) == ("failed", CAUSES["NODE_FAIL"])


@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize(
    ("outcome", "departed", "cancelled", "state"),
    [
        ("finished", False, False, "finished"),
        ("finished", False, True, "stopped"),
        ("finished", True, False, "lost"),
        ("failed", False, False, "lost"),
    ],
)
def test_a_program_that_ended_has_ended_although_the_controller_lost_its_job(
    submitted, say, reused, outcome, departed, cancelled, state
):
    """Its batch script, which writes the result, was killed with the job, as by `slurmctld -c`."""
    configured = {**submitted.read_config(), "job": {"command": ["train.py"]}}
    submitted.write_config(json.dumps(configured))
    submitted.begin_attempt()
    write_json(submitted.outcome(0), {"state": outcome, "culprit": None, "lost": None})
    if departed:
        write_json(submitted.departure(0), departure_note("preempted", 12))
    if cancelled:
        write_json(submitted.cancel, {"how": "stop", "time": 1.0})
    say("squeue", queue_line(Command="/home/me/other/train.sh") if reused else "")
    say("sacct", "")
    say("scontrol", "")
    handle = SlurmHandle(submitted)
    handle.job, handle._ended_at = ScheduledJob(id="7", state="GONE"), 1.0
    handle._queried_at = math.inf  # it has its answer
    assert (handle.poll(0.0) is State.FINISHED) == (state == "finished")
    (found,), _ = statuses([submitted])
    assert found.state == state
    assert (submitted.read_result() or {"state": "lost"})["state"] == state


def test_a_lost_job_has_not_ended_as_the_attempt_before_it_did(submitted, say):
    """As an element of an array that is cancelled while it waits, after `resume`."""
    submitted.begin_attempt()
    write_json(submitted.outcome(0), {"state": "stopped", "culprit": None, "lost": None})
    write_json(submitted.handle, {**submitted.read_handle(), "attempt": 1})
    say("squeue", "")
    say("sacct", "")
    (found,), _ = statuses([submitted])
    assert (found.state, submitted.read_result()) == ("lost", None)


def test_a_job_that_has_got_the_id_of_a_runs_job_is_not_taken_for_it(submitted, say):
    """It fails, after the run had left in order: neither may the run end, nor it be requeued."""
    submitted.begin_attempt()
    write_json(submitted.departure(0), departure_note("preempted", 12))
    stranger = {"Command": "/home/me/other/train.sh"}
    say("scontrol", "")
    say("sacct", "7|FAILED|1:0|n1")
    calls = say("squeue", queue_line(**stranger))
    (found,), _ = statuses([submitted])
    assert found.state == "lost"
    assert mentions(found.reason, f"job 7 {submitted.handle} /home/me/other/train.sh")
    assert followed.SlurmHandle(submitted).in_progress() == ""
    say("squeue", queue_line(State="FAILED", exit_code="256", **stranger))
    (found,), _ = statuses([submitted])
    assert found.state == "lost"
    assert finalize_ended_job(submitted, ScheduledJob(id="7", state="FAILED")) is None
    assert not submitted.result.exists()
    assert not any(call.startswith(("scontrol requeue", "sacct")) for call in calls())
    handle = followed.SlurmHandle(submitted)
    handle._find(answer := Future())
    assert answer.result(0) is None


def test_of_a_run_folder_and_its_copy_the_job_is_the_firsts(submitted, say, tmp_path):
    batch = submitted.submitit / "000.sh"
    batch.parent.mkdir()
    batch.write_text("")
    say("scontrol", "JobId=7 StdOut=/home/me/log")
    copy = RunDir(tmp_path / "elsewhere" / "run")
    shutil.copytree(submitted.path, copy.path)
    say("squeue", queue_line(Command=str(batch)))
    found, _ = statuses([submitted, copy])
    assert [one.state for one in found] == ["starting", "lost"]


def test_a_script_that_only_other_machines_see_by_its_path_may_be_the_runs(submitted, say):
    say("squeue", queue_line(Command="/mounted/elsewhere/run/submitit/000.sh"))
    (found,), _ = statuses([submitted])
    assert found.state == "starting"
    assert "running" in followed.SlurmHandle(submitted).in_progress()


def test_a_copy_of_the_script_that_a_sites_sbatch_made_may_be_the_runs(submitted, say):
    say("squeue", queue_line(Command="/var/spool/wrapped/x81.sh"))
    say("scontrol", f"JobId=7 JobName=a\n   StdOut={submitted.batch_log}\n   Power=")
    (found,), _ = statuses([submitted])
    assert found.state == "starting"


@pytest.mark.parametrize(
    "answer", ["7", "7;own", "--- Welcome to the 2 clusters ---\nCharging to 77\n7\n"]
)
def test_a_sites_sbatch_may_print_more_than_the_jobs_number(tmp_path, say, answer):
    say("sbatch", answer)
    say("scontrol", "ClusterName             = own")
    run = make_run(tmp_path / "run")
    assert queue(run, tmp_path / "000.sh", 0, None) == "7"
    assert run.read_handle()["job_id"] == "7"


@pytest.mark.parametrize("requeue", ["0", "1"])
def test_a_requeue_that_the_site_has_cleared_is_warned_of_at_submission(tmp_path, say, requeue):
    say("sbatch", "7")
    lines = [queue_line(JobArrayID=f"7_{index}", Requeue=requeue) for index in range(2)]
    say("squeue", "\n".join(lines))
    told = []
    queue(make_run(tmp_path / "run"), tmp_path / "0.sh", 0, None, requeue=True, tell=told.append)
    assert len(told) == (requeue == "0")
    assert all(mentions(sentence, "Requeue job 7") for sentence in told), told


def test_a_job_on_another_cluster_of_a_federation_is_cancelled_and_refused(tmp_path, say):
    calls = say("sbatch", "7;far")
    say("scontrol", "ClusterName             = own")
    say("scancel", "")
    run = make_run(tmp_path / "run")
    with refused(ClusterError, "far (7) far cluster.slurm_conf"):
        queue(run, tmp_path / "000.sh", 0, None)
    assert calls()[-1] == "scancel --clusters=far 7"
    assert not run.may_be_queued


def test_a_job_whose_number_sbatch_does_not_print_is_found_in_the_queue(tmp_path, say, monkeypatch):
    calls = say("sbatch", "queued, thank you")
    batch = tmp_path / "000.sh"
    say("squeue", queue_line(Command=str(batch)))
    monkeypatch.setattr("time.sleep", lambda _: None)
    run = make_run(tmp_path / "run")
    assert queue(run, batch, 0, None) == "7"
    assert sum(line.startswith("sbatch") for line in calls()) == 1


def test_a_job_that_the_controller_makes_after_sbatch_gave_up_is_not_made_twice(
    tmp_path, say, monkeypatch
):
    timeout = "Batch job submission failed: Socket timed out on send/recv operation"
    calls = say("sbatch", "")
    failing = f"#!/bin/sh\necho sbatch >>{tmp_path}/calls\necho '{timeout}' >&2\nexit 1\n"
    script(tmp_path / "bin", failing, "sbatch", run=True)
    say("squeue", queue_line(Command="/another/script.sh"))
    say("sacct", "")
    batch, pauses = tmp_path / "000.sh", []

    def sleep(pause_s):
        pauses.append(pause_s if pause_s >= 1 else 0)  # shorter ones are subprocess's
        if sum(pauses) > 20:
            say("squeue", queue_line(Command=str(batch)))

    monkeypatch.setattr("time.sleep", sleep)
    run = make_run(tmp_path / "run")
    assert queue(run, batch, 0, None) == "7"
    assert sum(line.startswith("sbatch") for line in calls()) == 1
    assert run.read_handle()["job_id"] == "7"


def test_an_sbatch_without_a_number_or_a_job_is_called_once(tmp_path, say, monkeypatch):
    calls = say("sbatch", "not today")
    say("squeue", queue_line(Command="/another/script.sh"))
    say("sacct", "")
    monkeypatch.setattr("time.sleep", lambda _: None)
    run = make_run(tmp_path / "run")
    with refused(ClusterError, f"{NO_NUMBER}: not today {tmp_path}/000.sh"):
        queue(run, tmp_path / "000.sh", 0, None)
    assert sum(line.startswith("sbatch") for line in calls()) == 1
    assert not run.may_be_queued


def test_another_user_completes_no_submission(tmp_path, say, monkeypatch):
    run = make_run(tmp_path / "run")
    write_json(run.submitting, {"script": "x", "elements": [""], "slurm_conf": None})
    monkeypatch.setattr("os.geteuid", lambda: 0)
    os.chown(run.path, 12345, -1)
    with refused(ClusterError, f"{run.path} owner"):
        adopt(run)
    assert run.submitting.exists()


@pytest.mark.parametrize("began", [False, True])
def test_a_submission_that_no_job_is_known_of_is_not_denied_where_its_job_began(
    tmp_path, say, began
):
    """The command was killed; squeue forgets a job minutes after its end, and sacct may be off."""
    run = make_run(tmp_path / "run")
    write_json(run.submission, {"cluster": "slurm", "attended": False})
    batch = str(run.submitit / "000.sh")
    note = {"script": batch, "attempt": 0, "before": "", "time": 0.0, "elements": [""]}
    write_json(run.submitting, {**note, "kind": "slurm", "slurm_conf": None})
    os.utime(run.submitting, (0.0, 0.0))
    if began:
        run.begin_attempt()
    say("squeue", "")
    say("sacct", "")
    [status], [sentence] = statuses([run])
    assert mentions(sentence, f"{run.path} sbatch") is not began
    assert mentions(sentence, f"{run.path} accounting") is began
    assert mentions(status.reason, "job number") is began
    assert status.state == "lost"
    assert not run.submitting.exists()


def test_a_job_may_still_come_of_a_submission_that_was_killed_a_moment_ago(
    tmp_path, say, monkeypatch
):
    """Its command is killed after a lost answer, while it looks whether the job was made."""
    run, batch = make_run(tmp_path / "run"), tmp_path / "000.sh"
    timeout = "#!/bin/sh\necho 'Socket timed out on send/recv operation' >&2\nexit 1\n"
    say("squeue", queue_line(Command="/another/script.sh"))
    script(tmp_path / "bin", timeout, "sbatch", run=True)
    say("sacct", "")

    def kill(pause_s):
        if pause_s >= 1:  # shorter ones are subprocess's
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("time.sleep", kill)
        with pytest.raises(KeyboardInterrupt):
            queue(run, batch, 0, None)
    with refused(ClusterError, f"{run.path} scheduler") as caught:
        adopt(run)
    assert re.search(r" \d+ s$", str(caught.value))
    assert run.submitting.exists()
    say("squeue", queue_line(Command=str(batch)))
    assert mentions(adopt(run), f"{run.path} job 7")
    assert run.read_handle()["job_id"] == "7"


def test_no_job_is_queued_for_an_attempt_that_a_late_one_has_begun(tmp_path, say):
    run, calls = make_run(tmp_path / "run"), say("sbatch", "8")
    run.begin_attempt()
    with refused(ClusterError, f"{run.path} attempt 0 `status`"):
        queue(run, tmp_path / "000.sh", 0, None)
    assert not calls()
    say("squeue", queue_line(Command=str(tmp_path / "000.sh")))
    assert mentions(adopt(run), f"{run.path} job 7")


def test_no_array_is_queued_for_an_attempt_that_a_late_one_has_begun(tmp_path, say):
    """Its script is a new one, by which the late array, of another script, is not found."""
    sweep, calls = RunDir(tmp_path), say("sbatch", "8")
    make_run(tmp_path / "0")
    make_run(tmp_path / "1").begin_attempt()
    with refused(ClusterError, f"{tmp_path / '1'} attempt 0 `squeue --me`"):
        queue(sweep, tmp_path / "arrays" / "001.sh", 0, None, ["0", "1"])
    assert not calls()
    assert sweep.submitting.exists(), "its elements that wait for their record train"


def test_a_second_job_of_a_run_is_reported_with_its_number(submitted, say):
    second = queue_line(JobArrayID="9", Command=str(submitted.submitit / "000.sh"))
    own = queue_line(Command=str(submitted.submitit / "000.sh"))
    say("squeue", f"{own}\n{second}")
    [status], sentences = statuses([submitted])
    assert status.state == "starting"
    assert [s for s in sentences if mentions(s, f"{submitted.path} job 9 job 7 `scancel 9`")]
    ending = second.replace("RUNNING", "COMPLETING")  # that of an earlier attempt
    say("squeue", f"{own}\n{ending}")
    assert not statuses([submitted])[1]


def test_a_full_disk_says_why_no_job_is_stopped_and_lets_it_be_ended(submitted, say, monkeypatch):
    def refuse(path, value):
        assert path == submitted.cancel
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(followed, "write_json", refuse)
    batch = submitted.submitit / "000.sh"
    calls = say("squeue", queue_line(Command=str(batch)))
    say("scancel", "")
    with refused(ClusterError, f"{submitted.cancel} (No space left on device) --now"):
        cancel_all([submitted], now=False)
    assert not any(line.startswith("scancel") for line in calls())
    assert cancel_all([submitted], now=True)
    assert calls()[-1] == "scancel 7"


def test_damage_is_reported_and_not_taken_for_a_run_that_another_process_holds(submitted, say):
    say("squeue", queue_line(State="FAILED"))
    submitted.attempt(0).mkdir(parents=True, exist_ok=True)
    submitted.departure(0).write_text("{")
    with refused(RunFolderError, str(submitted.departure(0))):
        finalize_ended_job(submitted, ScheduledJob(id="7", state="FAILED"))


def test_only_a_runs_owner_ends_or_requeues_it_by_looking(submitted, say, monkeypatch):
    os.chown(submitted.path, 12345, -1)
    say("squeue", "")
    say("sacct", "")
    assert finalize_ended_job(submitted, ScheduledJob(id="7", state="FAILED")) is None
    assert not submitted.result.exists()
