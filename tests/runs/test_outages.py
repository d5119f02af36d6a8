"""A run folder that cannot be read for some time ends neither a run nor a wait for it."""

import contextlib
import errno
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.api import Sweep, open_run
from orchestrator.clusters.api import Culprit, Handle, Request, State
from orchestrator.config.composer import compose
from orchestrator.errors import RunFolderError
from orchestrator.interrupt import STOP_REQUEST, interrupts
from orchestrator.rundir.files import write_json
from orchestrator.rundir.lock import locked
from orchestrator.rundir.restarts import RestartDecision
from orchestrator.runs import follow
from orchestrator.runs.follow import OutputOptions, PreparedRun, _attempt
from orchestrator.sweep import local
from tests.run_folders import Screen, maker, result

pytestmark = pytest.mark.whole_runs


@pytest.fixture
def outage(monkeypatch):
    """How many of the next reads below each folder fail."""
    left, really = {}, os.open

    def fail(path, *flags, **more):
        for folder, count in left.items():
            if count and Path(os.fsdecode(path)).is_relative_to(folder):
                left[folder] -= 1
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return really(path, *flags, **more)

    monkeypatch.setattr(os, "open", fail)
    monkeypatch.setattr("orchestrator.rundir.files.GLANCE_S", 0.0)
    monkeypatch.setattr("orchestrator.rundir.files.READ_POLL_S", 0.01)
    return left


def test_a_wait_for_a_run_outlasts_an_outage_of_its_file_system(tmp_path, outage, monkeypatch):
    run = maker(tmp_path)("a")
    outage[run.path] = 5
    assert open_run(run.path).wait() == "finished"
    assert outage[run.path] == 0
    monkeypatch.setattr("orchestrator.rundir.files.READ_PATIENCE_S", 0.0)
    outage[run.path] = 5
    with pytest.raises(RunFolderError, match="cannot be read"):
        open_run(run.path).wait()


def test_a_wait_for_a_sweep_outlasts_an_outage_of_its_file_system(tmp_path, outage):
    make = maker(tmp_path / "sweep")
    points = [make(name).path for name in "01"]
    sweep = Sweep(tmp_path / "sweep")
    outage[points[1]] = 5
    assert sweep.wait() == "finished"
    assert outage[points[1]] == 0


def test_a_wait_outlasts_a_mount_that_is_gone_for_some_time(tmp_path, monkeypatch):
    run, away, pauses = maker(tmp_path)("a", ended=False), tmp_path / "away", []
    with contextlib.ExitStack() as launcher:
        launcher.enter_context(locked(run))

        def sleep(pause_s):
            pauses.append(pause_s)
            if len(pauses) == 1:
                run.path.rename(away)
            elif len(pauses) == 4:
                away.rename(run.path)
                write_json(run.result, result())
                launcher.close()

        monkeypatch.setattr("time.sleep", sleep)
        assert open_run(run.path).wait() == "finished"
    assert len(pauses) == 4


def test_a_folder_that_cannot_be_shown_ends_no_ranks(tmp_path, outage, monkeypatch):
    class Ranks(Handle):
        killed = False

        def poll(self, timeout_s):
            return State.FINISHED

        def stop(self):
            raise AssertionError

        def kill(self):
            self.killed = True

    run, ranks, screen = maker(tmp_path)("a"), Ranks(), Screen(width=1000)
    cluster = SimpleNamespace(
        config=compose([]), submit=lambda _: ranks, request=lambda *_: None, attended=True
    )
    request = Request(run=run.path, attempt=0, nodes=1, ranks_per_node=1)
    ready = PreparedRun(
        run=run, cluster=cluster, request=request, output=OutputOptions(console=screen)
    )
    monkeypatch.setattr("orchestrator.rundir.files.READ_PATIENCE_S", 0.0)
    outage[run.path] = 4  # the first one is that of the messages about the run
    assert _attempt(ready, 0) == (State.FINISHED, False, None)
    assert not ranks.killed
    assert screen.text.count("the run is shown again once it can be read") == 3


def test_a_stop_during_an_outage_reaches_the_ranks_at_once(tmp_path, monkeypatch):
    events = []

    class Unreadable(Handle):
        def poll(self, timeout_s):
            events.append("poll")
            interrupts.count = {1: 1, 4: 2}.get(events.count("poll"), interrupts.count)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        def stop(self):
            events.append("stop")

        def kill(self):
            events.append("kill")

    run, screen = maker(tmp_path)("a"), Screen(width=1000)
    cluster = SimpleNamespace(
        config=compose([]), submit=lambda _: Unreadable(), request=lambda *_: None, attended=True
    )
    request = Request(run=run.path, attempt=0, nodes=1, ranks_per_node=1)
    ready = PreparedRun(
        run=run, cluster=cluster, request=request, output=OutputOptions(console=screen)
    )
    monkeypatch.setattr("orchestrator.rundir.files.READ_POLL_S", 0.01)
    monkeypatch.setattr(interrupts, "count", 0)
    assert _attempt(ready, 0) == (State.STOPPED, True, None)
    assert events == ["poll", "stop", "poll", "poll", "poll", "poll", "kill"]


def test_an_interrupt_during_an_outage_stops_the_points_of_a_sweep(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    screen = Screen(width=1000)
    queue = local.LocalQueue(OutputOptions(console=screen), local.LocalCapacity())
    point = subprocess.Popen(["sleep", "60"])
    task = SimpleNamespace(run=maker(tmp_path)("a", ended=False))
    queue._running.append(local._Running(task=task, pid=point.pid, pipe=None, allocation=None))
    monkeypatch.setattr(interrupts, "count", 1)
    monkeypatch.setattr(Path, "exists", fail)
    queue._forward_interrupts()
    assert point.wait(30) == -STOP_REQUEST
    assert "each point that runs is asked to stop" in screen.text


def test_an_outage_at_the_end_of_a_point_ends_no_other_one(tmp_path, outage, monkeypatch):
    make, config, screen = maker(tmp_path), compose(["sweep.parallel=2"]), Screen(width=1000)
    point = SimpleNamespace(config=config, overrides=(), label=lambda _: "")
    tasks = [SimpleNamespace(run=make(name), point=point) for name in "ab"]

    class Ended:
        """A queue whose points have ended."""

        running = ()

        def __init__(self, *_, **__):
            self.results = [local.PointResult(task=task, exit_code=0) for task in tasks]

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def has_room(self, task):
            return True

        start = has_room

        def wait_one(self):
            return self.results.pop(0) if self.results else None

    monkeypatch.setattr(local, "LocalQueue", Ended)
    monkeypatch.setattr(local.LocalCapacity, "holds_two", lambda *_: True)
    outage[tasks[0].run.path] = 1
    ended = local.run_here(tasks, OutputOptions(console=screen))
    assert list(ended) == [task.run.path for task in tasks]
    assert "point a: ended (" in screen.text
    assert "point b: finished" in screen.text


def test_data_that_is_away_keeps_no_run_from_its_restart(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    run, screen = maker(tmp_path)("a"), Screen(width=1000)
    ready = PreparedRun(
        run=run,
        cluster=SimpleNamespace(config=compose([])),
        request=Request(run=run.path, attempt=0, nodes=1, ranks_per_node=1),
        output=OutputOptions(console=screen),
    )
    culprit = Culprit(rank=0, node="node0", cause="it was killed")
    attempts = [(State.FAILED, False, culprit), (State.FINISHED, False, None)]
    decision = RestartDecision(restarts=True, message="it is started again")
    monkeypatch.setattr(follow, "_attempt", lambda *_: attempts.pop(0))
    monkeypatch.setattr(follow, "grant_restart", lambda *_, **__: decision)
    monkeypatch.setattr(follow, "differences", fail)
    monkeypatch.setattr("orchestrator.rundir.files.READ_PATIENCE_S", 0.0)
    assert follow._run_attempts(ready) == 0
    assert not attempts
