"""Points beside each other on this machine: each can end, fail, be stopped or killed alone."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.helpers import TINY, begin, call, name_of, processes_of, records, result, until, verb

ONE = ("cluster.nodes=1", "cluster.ranks_per_node=1", "accumulation.global_batch=8", "tracker=none")
LONG = "train.updates=20"


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
    """A sweep of five points, three at once: 0 is cancelled, the process of 1 is killed, 2 fails by
    itself; 3 and 4 follow. The folder, its line, and what the command said.
    """
    sweep = tmp_path_factory.mktemp("sweeps") / "sweep"
    line = (
        "-m", TINY, *ONE, LONG, "job.pause_s=0.1", "sweep.parallel=3", f"run.dir={sweep}",
        "job.fault_rank=0", "job.fault=raise", "job.fault_after=500,501,9,502,503",
    )  # fmt: skip
    command = begin(*line)
    trains(*(sweep / n for n in "012"))
    # 2 fails after its ninth update, which a slow machine may see before this.
    assert not (sweep / "3").exists() or (sweep / "2" / "result.json").exists(), "it waits for room"
    assert verb("cancel", sweep / "0").returncode == 0
    until((sweep / "0" / "result.json").exists)
    second = call(*line)
    os.kill(holder(sweep / "1"), signal.SIGKILL)
    trains(sweep / "3", sweep / "4")
    found = {"line": line, "second": second, "sweep": sweep, "meanwhile": state_of(sweep)}
    found["said"], _ = command.communicate(timeout=120)
    return {**found, "code": command.returncode, "left": processes_of(sweep)}


def test_what_happens_to_one_point_happens_to_no_other(disturbed):
    states = disturbed["meanwhile"]
    assert (states["0"], states["1"]) == ("stopped", "lost")
    sweep = disturbed["sweep"]
    assert [result(sweep / n)["state"] for n in "0234"] == [
        "stopped", "failed", "finished", "finished",
    ]  # fmt: skip
    assert disturbed["code"] == 1
    assert disturbed["left"] == []


def test_a_second_shell_is_refused_while_points_run(disturbed):
    assert disturbed["second"].returncode == 2
    assert f"{disturbed['sweep']} is in progress" in disturbed["second"].stderr


def test_the_terminal_says_what_became_of_each_and_its_log_says_the_rest(disturbed):
    said, sweep = disturbed["said"], disturbed["sweep"]
    assert "3 points at once ask for 3 cores" in said or os.cpu_count() > 2
    assert "point 2 (job.fault_after=9): rank 0 on node0 failed first" in said
    assert "killed by signal 9 (SIGKILL)" in said
    assert "2 of 5 points finished" in said
    assert "were timed side by side with others" in said
    assert "update 20/20" in (sweep / "3" / "logs" / "terminal.log").read_text()
    assert "update 20/20" not in said


def test_the_same_line_goes_on_with_what_has_not_finished_and_killed_it_leaves_no_process(
    disturbed,
):
    line, sweep = disturbed["line"], disturbed["sweep"]
    kept = {n: (sweep / n / "result.json").stat().st_mtime_ns for n in "34"}
    again = begin(*line)
    until(lambda: all(len(list((sweep / n / "attempts").iterdir())) > 1 for n in "012"))
    until(lambda: len([p for p in processes_of(sweep) if name_of(p) == "rank 0"]) == 3)
    again.kill()
    again.communicate(timeout=60)
    until(lambda: not processes_of(sweep), 20, "the end of all processes")
    assert state_of(sweep)["1"] == "lost"
    assert kept == {n: (sweep / n / "result.json").stat().st_mtime_ns for n in "34"}


def test_interrupted_twice_all_points_end_at_once(tmp_path):
    sweep = tmp_path / "sweep"
    command = begin("-m", TINY, *ONE, "train.updates=400", "job.pause_s=0.1", "sweep.parallel=2",
                    "train.seed=1,2,3", f"run.dir={sweep}")  # fmt: skip
    trains(sweep / "0", sweep / "1")
    assert len({command.pid, *(holder(sweep / n) for n in "01")}) == 3
    command.send_signal(signal.SIGINT)
    command.send_signal(signal.SIGTERM)
    said, _ = command.communicate(timeout=60)
    assert command.returncode == 130, said
    assert processes_of(sweep) == []
    assert not (sweep / "2").exists(), "it was not started any more"
