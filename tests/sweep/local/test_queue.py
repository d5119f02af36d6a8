"""Points at the same time on this machine: each can end, fail, be stopped or killed alone."""

import contextlib
import json
import os
import signal
import sys
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console

from orchestrator.agent.processes import fork
from orchestrator.report.terminal import say
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import locked
from orchestrator.runs.follow import OutputOptions
from orchestrator.sweep.local import _run_point
from tests.helpers import (
    LIGHT,
    LIMIT_S,
    TINY,
    await_exit,
    begin,
    begin_anew,
    call,
    name_of,
    processes_of,
    records,
    result,
    until,
    verb,
)
from tests.hold import Hold, request_stop
from tests.run_folders import make_run

pytestmark = [pytest.mark.whole_runs, pytest.mark.long]

ONE = ("cluster.nodes=1", "cluster.ranks_per_node=1", "accumulation.global_batch=8", "tracker=none")
LONG = "train.updates=200"


def state_of(sweep):
    listed = json.loads(verb("status", sweep, "--json").stdout)
    return {Path(run["folder"]).name: run["state"] for run in listed}


def holder(run):
    """The process that holds a point, which its lock names."""
    return int((run / ".lock").read_text().split()[0])


def trains(*runs):
    until(lambda: all(records(run) for run in runs), what=f"updates of {runs}")


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    """A sweep of four points, three at once: 0 is cancelled, the process of 1 is killed, 2 fails by
    itself, and 3 follows. The folder, its line, and what it said.
    """
    folder = tmp_path_factory.mktemp("sweeps")
    sweep, hold = folder / "sweep", Hold(folder / "hold").hold_before(199)
    line = (
        "-m",
        LIGHT,
        *ONE,
        LONG,
        "job.pause_s=0.1",
        hold.override,
        "sweep.parallel=3",
        f"run.dir={sweep}",
        "job.fault_rank=0",
        "job.fault=raise",
        "job.fault_after=5000,5001,9,5002",
    )
    command = begin(*line)
    trains(*(sweep / n for n in "012"))
    found = {"line": line, "sweep": sweep, "hold": hold}
    os.kill(holder(sweep / "1"), signal.SIGKILL)
    verb("cancel", sweep / "0", code=0)
    found["second"] = call(*line)
    until((sweep / "0" / "result.json").exists)
    trains(sweep / "3")
    found["meanwhile"] = state_of(sweep)
    hold.release()
    found["said"], _ = command.communicate(timeout=LIMIT_S)
    return {**found, "code": command.returncode, "left": processes_of(sweep)}


def test_what_happens_to_one_point_happens_to_no_other(disturbed):
    states = disturbed["meanwhile"]
    assert (states["0"], states["1"]) == ("stopped", "lost")
    sweep = disturbed["sweep"]
    assert [result(sweep / n)["state"] for n in "023"] == ["stopped", "failed", "finished"]
    assert disturbed["code"] == 1
    assert disturbed["left"] == []


def test_a_second_shell_is_refused_while_points_run(disturbed):
    assert disturbed["second"].returncode == 2
    assert f"{disturbed['sweep']} is in progress" in disturbed["second"].stderr


def test_terminal_and_log_of_each_point(disturbed):
    said, sweep = disturbed["said"], disturbed["sweep"]
    assert "point 2 (job.fault_after=9): rank 0 on node0 failed first" in said
    assert "killed by signal 9 (SIGKILL)" in said
    assert "1 of 4 points finished" in said
    assert "Points were timed side by side" in said
    assert "update 200/200" in (sweep / "3" / "logs" / "terminal.log").read_text()
    assert "update 200/200" not in said


def test_a_warning_before_a_point_has_a_log_is_in_its_log(tmp_path, monkeypatch):
    """As that of a resume, of data that was rewritten."""
    run = make_run(tmp_path / "0")
    task = SimpleNamespace(run=run, point=SimpleNamespace(number=0))
    warning = "warning: files were written"

    @contextlib.contextmanager
    def prepared_task(_, output):
        say(output.console, warning, "yellow", prose=True)
        yield run

    def run_to_end(_):  # whose processes would inherit and repeat what is not in the file yet
        return 0 if run.terminal_log.read_text() == f"{warning}\n" else 1

    def be():
        sys.stdout = os.fdopen(1, "w", closefd=False)  # and not what pytest collects
        return run_point()

    monkeypatch.setattr("orchestrator.sweep.local.prepared_task", prepared_task)
    monkeypatch.setattr("orchestrator.sweep.local.run_to_end", run_to_end)
    ours, its = Pipe(duplex=False)
    output = OutputOptions(console=Console(), quiet=True)
    run_point = partial(_run_point, task, output, (), its, set(), terminal=False)
    pid = fork(be)
    assert ours.recv() == (0, None)
    assert os.waitpid(pid, 0) == (pid, 0)
    assert run.terminal_log.read_text() == f"{warning}\n"


def test_the_same_line_goes_on_with_what_has_not_finished_and_killed_it_leaves_no_process(
    disturbed,
):
    line, sweep = disturbed["line"], disturbed["sweep"]
    kept = (sweep / "3" / "result.json").stat().st_mtime_ns
    disturbed["hold"].hold_before(199)
    again = begin(*line)
    until(lambda: len([p for p in processes_of(sweep) if name_of(p) == "rank 0"]) == 3)
    again.kill()
    again.communicate(timeout=LIMIT_S)
    until(lambda: not processes_of(sweep), what="the end of all processes")
    assert state_of(sweep)["1"] == "lost"
    assert kept == (sweep / "3" / "result.json").stat().st_mtime_ns


def test_interrupted_twice_all_points_end_at_once(tmp_path):
    """Points are held, so that none reaches the boundary at which the first interrupt stops it."""
    sweep, hold = tmp_path / "sweep", Hold(tmp_path / "hold").hold_before(3)
    command = begin(
        "-m",
        LIGHT,
        *ONE,
        "train.updates=10",
        hold.override,
        "sweep.parallel=2",
        "train.seed=1,2,3",
        f"run.dir={sweep}",
    )
    until(lambda: len([*hold.folder.glob("held-3-*")]) == 2, 90, "the rank of each point, held")
    assert len({command.pid, *(holder(sweep / n) for n in "01")}) == 3
    command.send_signal(signal.SIGINT)
    command.send_signal(signal.SIGTERM)
    said = await_exit(command, 130)
    assert "0 of 3 points finished; 1 not begun yet: type the same line again" in said
    assert "point 0 (train.seed=1): " in said, "without what all points share"
    assert processes_of(sweep) == []
    assert not (sweep / "2").exists(), "it was not started any more"
    hold.release()
    resumed = verb("resume", sweep, code=3)
    assert "2 of 3 points finished; 1 not begun yet: type the same line again" in resumed.stdout


def test_points_that_ended_here_count_where_another_is_in_progress_elsewhere(tmp_path):
    sweep, hold = tmp_path / "sweep", Hold(tmp_path / "hold")
    faults = ("job.fault_rank=0", "job.fault=raise", "sweep.parallel=2")
    line = ("-m", LIGHT, *ONE, "train.updates=6", hold.override, *faults, f"run.dir={sweep}")
    call(*line, "job.fault_after=5000", code=0)
    (sweep / "0" / "result.json").unlink()
    hold.hold_before(3)
    with locked(RunDir(sweep / "0")):
        command = begin(*line, "job.fault_after=5000,1,5001")
        hold.wait_until_held(3)
        request_stop(sweep / "2", lambda: verb("cancel", sweep / "2", code=0), ranks=(0,))
        hold.release()
        said = await_exit(command, 1)
    assert [result(sweep / n)["state"] for n in "12"] == ["failed", "stopped"]
    assert "0 of 2 points finished" in said
    assert "1 point queued or running" in said


def test_the_framework_is_imported_once_for_all_points_with_the_same_bits(tmp_path):
    """In a new launcher, where points' nodes are forks of what it has imported."""
    sweep, hold = tmp_path / "sweep", Hold(tmp_path / "hold").hold_before(3)
    line = (TINY, *ONE, "train.updates=6", hold.override)
    command = begin_anew("-m", *line, "sweep.parallel=2", "train.seed=1,2", f"run.dir={sweep}")
    until(lambda: len([*hold.folder.glob("held-3-*")]) == 2, 90, "the rank of each point, held")
    ranks = [p for p in psutil.process_iter(["name", "ppid"]) if below(p, command.pid)]
    named = sorted(p.info["name"] for p in ranks if p.info["name"].startswith("rank"))
    assert named == ["rank 0", "rank 0"]
    assert not [p for p in ranks if "orchestrator.agent.local_nodes" in p.cmdline()]
    hold.release()
    said = await_exit(command, 0)
    assert "INFO" not in said, "what belongs to logs"
    call(*line, "train.seed=2", f"run.dir={tmp_path / 'alone'}", code=0)
    [point] = [n for n in "01" if '"train.seed=2"' in (sweep / n / "submission.json").read_text()]
    digests = {result(run)["weights_sha256"] for run in (sweep / point, tmp_path / "alone")}
    assert len(digests) == 1
    hold.hold_before(3)
    command = begin_anew("-m", *line, "sweep.force=true", "train.seed=1,2", f"run.dir={sweep}")
    hold.wait_until_held(3)
    ranks = [p for p in psutil.process_iter(["ppid"]) if below(p, command.pid)]
    command.kill()
    command.communicate(timeout=LIMIT_S)
    _, alive = psutil.wait_procs(ranks, timeout=LIMIT_S)
    assert alive == []


def below(process, ancestor):
    with contextlib.suppress(psutil.NoSuchProcess):
        return ancestor in {parent.pid for parent in process.parents()}
    return False
