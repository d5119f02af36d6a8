"""Workers of an agent: what they leave behind, what they inherit, how their ends are reported."""

import errno
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from orchestrator.agent import stacks
from orchestrator.agent import workers as module
from orchestrator.agent.judge import WorkerJudge
from orchestrator.agent.links import Link
from orchestrator.agent.liveness import RankPosition, WorkerLiveness
from orchestrator.agent.programs import RankProgram
from orchestrator.agent.workers import Worker, Workers
from orchestrator.rundir.folder import RunDir
from tests.agent.specs import node_spec
from tests.helpers import LIMIT_S, environment, until
from tests.refusals import mentions

pytestmark = pytest.mark.whole_runs

NODE = """
import json, os, random, resource, selectors, signal, sys, time
from pathlib import Path
from orchestrator.agent.workers import BecomeWorker, Workers
from orchestrator.agent.processes import exit_with
from orchestrator.agent.local_nodes import reseed_generators
from tests.agent.specs import node_spec

def leaves_a_child(rank):
    left, stays = sys.argv[2:4]
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open(left, "w").write(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    os.wait()
    while not os.path.exists(left): time.sleep(0.01)
    time.sleep(600 * int(stays))
    return 0

def tells(rank):
    import numpy, torch
    reseed_generators()
    opened = [os.readlink(entry) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()]
    report = json.dumps({
        "rank": [rank, os.environ["SLURM_PROCID"], os.environ["SLURM_LOCALID"]],
        "incarnation": os.environ["ORCHESTRATOR_INCARNATION"],
        "leads its session": os.getsid(0) == os.getpid(),
        "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "handled": [int(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGCHLD)],
        "opened": sorted(name.partition(":")[0] for name in opened if "/fd" not in name),
        "drawn": [random.random(), numpy.random.rand(), torch.rand(1).item()],
    })
    # One write: `print` without a buffer makes two, and both ranks write to this pipe.
    sys.stderr.write(report + "\\n")
    return rank

def raises(rank):
    raise KeyError(rank)

if "many" in sys.argv:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]

if "unwritable" in sys.argv:
    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))
    Path.write_text = refuse
    read = Path.read_text  # a container's own score may be high enough already
    Path.read_text = lambda p, *a, **k: "0" if p.name == "oom_score_adj" else read(p, *a, **k)

def report(event):
    print(json.dumps(event), flush=True)
    if "again" in sys.argv and event["event"] == "exit" and not event["incarnation"]:
        restarts.append(event["rank"])

what, restarts = sys.argv[1], []
if what == "tells":
    import numpy, torch

def serve():
    selector = selectors.DefaultSelector()
    spec = node_spec(Path("run"), nodes=2, ranks_per_node=4, index=1)
    workers = Workers(spec=spec, selector=selector, report=report)
    try:
        for rank in [4] if what == "leaves_a_child" else [4, 5]:
            workers.start(rank, 0)
        while workers.alive and not os.path.exists(sys.argv[-1] + ".end"):
            for key, _ in selector.select(0.05):
                if "many" not in sys.argv:  # there `reap` reads the final messages
                    key.data()
            workers.reap()
            while restarts:
                workers.start(restarts.pop(), 1)
        workers.end_all()
        return 0
    except BecomeWorker as worker:
        return globals()[what](worker.rank)

exit_with(serve)
"""


def node(*words, **more):
    return subprocess.Popen(
        [sys.executable, "-c", NODE, *map(str, words)],
        stdout=subprocess.PIPE,
        env=environment(),
        text=True,
        **more,
    )


def events_of(process):
    return [json.loads(line) for line in process.stdout]


def test_what_an_ended_worker_left_behind_is_ended_with_the_node(tmp_path):
    with node("leaves_a_child", tmp_path / "left", 0, tmp_path / "node") as process:
        events = events_of(process)
    assert [event["event"] for event in events] == ["started", "exit"]
    assert not psutil.pid_exists(int((tmp_path / "left").read_text()))


def test_what_a_worker_leaves_behind_belongs_to_the_node_while_the_worker_lives(tmp_path):
    left = tmp_path / "left"
    process = node("leaves_a_child", left, 1, tmp_path / "node")
    until(lambda: left.exists() and left.read_text(), 60, "the child that was left")
    child = psutil.Process(int(left.read_text()))
    until(lambda: child.ppid() == process.pid, 20, "its adoption by the node")
    (tmp_path / "node.end").touch()
    process.communicate(timeout=LIMIT_S)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_worker_has_nothing_of_its_agent_and_draws_numbers_of_its_own_started_again_or_not():
    with node("tells", "again", "", stderr=subprocess.PIPE) as process:
        events = events_of(process)
        reported = sorted(map(json.loads, process.stderr), key=lambda one: one["rank"])
    assert sorted(e["status"] for e in events if e["event"] == "exit") == [4, 4, 5, 5]
    assert [one["rank"] for one in reported] == [[4, "4", "0"]] * 2 + [[5, "5", "1"]] * 2
    assert sorted(one["incarnation"] for one in reported) == ["0", "0", "1", "1"]
    for one in reported:
        assert one["leads its session"]
        assert one["blocked"] == []
        assert one["handled"] == [signal.SIG_IGN, signal.SIG_DFL]
        assert one["opened"] == ["/dev/null", "pipe", "pipe", "socket"]
    assert len({number for one in reported for number in one["drawn"]}) == 12


@pytest.mark.parametrize("where", ["", "many", "unwritable"])
def test_a_worker_that_raises_before_it_has_a_log_ends_with_its_traceback_in_the_nodes(where):
    """Also with many descriptors in the agent, and in a container that forbids a new oom score."""
    with node("raises", where, "", stderr=subprocess.PIPE) as process:
        events = events_of(process)
        log = process.stderr.read()
    ended = {event["rank"]: event["status"] for event in events if event["event"] == "exit"}
    assert ended == {4: 1, 5: 1}
    assert "KeyError: 4" in log
    assert "KeyError: 5" in log
    warned = mentions(log, "rank 4 oom_score_adj (Permission denied)")
    assert warned == (where == "unwritable")


AGENT = """
import resource, sys
from pathlib import Path
from orchestrator.agent.agent import Agent
from orchestrator.agent.processes import exit_with
from orchestrator.agent.workers import BecomeWorker
from tests.agent.specs import node_spec

def serve():
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
    agent = Agent(node_spec(Path(sys.argv[1]), nodes=1, survive=False))
    try:
        agent.serve()
    except BecomeWorker as worker:
        print("worker", *resource.getrlimit(resource.RLIMIT_NOFILE), file=sys.stderr)
        return 5
    print("agent", *resource.getrlimit(resource.RLIMIT_NOFILE), file=sys.stderr)
    return 0

exit_with(serve)
"""


def test_an_agent_may_have_as_many_links_as_the_hard_limit_allows_and_workers_keep_the_soft(begun):
    done = subprocess.run(
        [sys.executable, "-c", AGENT, str(begun.path)],
        stderr=subprocess.PIPE,
        env=environment(),
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert done.stderr.splitlines()[-2:] == ["worker 200 300", "agent 300 300"]


# ------------------------------------------------------------------ Without room or processes


FACTS = {
    "stop_signal": "TERM",
    "rendezvous": None,
    "serves": False,
    "most_s": 1.0,
    "restarts": True,
    "log_bytes": 0,
}


@pytest.mark.parametrize(("status", "state"), [(0, "finished"), (3, "failed"), (-9, "failed")])
def test_the_end_of_a_program_is_known_although_nothing_can_be_written(tmp_path, status, state):
    run = RunDir(tmp_path)
    program = RankProgram(node_spec(tmp_path), 0, os.getpid(), FACTS)
    run.attempts.write_text("no folder")  # so each write fails
    shutil.rmtree(run.logs, ignore_errors=True)
    found, failure = program.end(status)
    assert found == state
    assert (failure is not None) == (state == "failed")


@pytest.mark.parametrize("lacks", ["fork_session", "socket.socketpair"])
@pytest.mark.parametrize(("incarnation", "state"), [(0, "failed"), (1, "")])
def test_a_fork_that_fails_says_why(tmp_path, monkeypatch, incarnation, state, lacks):
    def fork():
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(f"{module.__name__}.{lacks}", fork)
    events = []
    with selectors.DefaultSelector() as selector:
        workers = Workers(spec=node_spec(tmp_path), selector=selector, report=events.append)
        workers.start(0, incarnation)
        workers.start(0, incarnation)
    assert [event["final_state"] for event in events] == [state] * 2
    assert workers.exit_of(workers.all[0])["failure"] == events[1]["failure"]
    if not incarnation:
        cause = events[0]["failure"]["cause"]
        assert mentions(cause, f"process {os.strerror(errno.EAGAIN)}; `ulimit -u`"), cause


@pytest.mark.parametrize("log", [True, False])
def test_what_a_silent_rank_waited_for_in_its_latest_report_is_no_longer_said(
    begun, monkeypatch, log
):
    """Its hang is reported although somebody has removed its log, with its folder."""
    if not log:
        shutil.rmtree(begun.logs)

    def fork():
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(f"{module.__name__}.fork_session", fork)
    events = []
    with selectors.DefaultSelector() as selector:
        workers = Workers(spec=node_spec(begun.path), selector=selector, report=events.append)
        workers.start(0, 0)
        worker = workers.all[0]
        worker.signs.pid = os.getpid()
        worker.signs.seen = RankPosition(where="the boundary of update 1", waits="2 s", waited_s=2)
        worker.signs.received = workers._clock() - 11
        workers._report_hang(worker, "without using a processor")
    [hang] = [event for event in events if event["event"] == "hangs"]
    assert hang["silent"]
    assert mentions(hang["cause"], "11 s without using a processor"), hang["cause"]
    for event in (hang, workers.exit_of(worker)):
        assert event["seen"] == {"where": "the boundary of update 1"}


@pytest.fixture
def watched(begun):
    """Workers with rank 0, whose process and its child only sleep; the child, a clock, events."""
    script = (
        "import subprocess as s; p = s.Popen(['sleep', '600']); print(p.pid, flush=1); p.wait()"
    )
    own_end, worker_end = socket.socketpair()
    now, events = [1000.0], []
    with (
        subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True
        ) as process,
        selectors.DefaultSelector() as selector,
        worker_end,
        own_end,
    ):
        child = psutil.Process(int(process.stdout.readline()))
        spec = node_spec(begun.path)
        workers = Workers(spec=spec, selector=selector, report=events.append, clock=lambda: now[0])
        workers.all[0] = Worker(
            0, 0, WorkerLiveness(process.pid), Link(own_end), WorkerJudge(spec.limits)
        )
        yield workers, child, now, events
        child.kill()
        process.kill()


def look(watched, stood_s, *, stopped):
    """Judge the rank, whose child is stopped meanwhile or not; the events that this reports."""
    workers, child, now, events = watched
    before = len(events)
    signs = workers.all[0].signs
    signs.received, signs.seen = now[0], RankPosition(where="micro-step 2 of 8", stood_s=stood_s)
    if stopped:
        child.suspend()
        until(lambda: child.status() == psutil.STATUS_STOPPED)
    workers.judge(20.0)
    child.resume()
    until(lambda: child.status() != psutil.STATUS_STOPPED)
    now[0] += 1.0
    return [event["event"] for event in events[before:]]


def test_a_child_that_is_stopped_for_a_moment_in_a_long_micro_step_is_no_hang(watched):
    for stood_s in range(25, 50):
        assert "hangs" not in look(watched, stood_s, stopped=stood_s not in (30, 45))


def test_a_child_that_is_stopped_hangs_its_rank_after_the_limit_at_one_position(watched):
    seen = [look(watched, stood_s, stopped=True) for stood_s in (*range(25, 40), 0, *range(25, 45))]
    assert not any("hangs" in events for events in seen)
    assert "hangs" in look(watched, 45, stopped=True)
    [hang] = [event for event in watched[-1] if event["event"] == "hangs"]
    assert mentions(hang["cause"], "its child process is stopped (SIGSTOP)"), hang["cause"]


def test_a_hang_that_no_coordinator_has_heard_of_is_taken_back_when_the_rank_moves(watched):
    """Else the next coordinator ends a rank that trains, for a report from a broken link."""
    [worker] = watched[0].all.values()
    for stood_s in range(25, 46):
        look(watched, stood_s, stopped=True)
    assert "hangs" in worker.latest_events
    assert "hangs" not in look(watched, 46, stopped=True), "it is reported once"
    look(watched, 0, stopped=False)
    assert "hangs" not in worker.latest_events
    again = [look(watched, stood_s, stopped=True) for stood_s in range(25, 46)]
    assert "hangs" in again[-1]


def test_an_idle_program_that_is_asked_to_stop_counts_as_moving_while_it_ends(watched, monkeypatch):
    """It may save for long, and would be ended for the time before the stop."""
    monkeypatch.setattr("orchestrator.agent.programs.CHECK_S", 0.0)
    workers, _, now, events = watched
    worker = workers.all[0]
    facts = {**FACTS, "stop_signal": "CONT", "rendezvous": ("127.0.0.1", 1)}
    worker.program = RankProgram(workers._spec, 0, worker.pid, facts, clock=lambda: now[0])

    def standings():
        workers.check_programs()
        now[0] += 1.0
        return [event["standing"] for event in events if event["event"] == "standing"]

    until(standings)
    assert standings() == ["idle"]
    workers.stop("SIGTERM")
    assert standings() == standings() == ["idle", "moves"]
    assert worker.seen == RankPosition()


@pytest.mark.parametrize(
    ("groups", "group", "events", "kills"),
    [
        (b"0::/job\n", "job", "oom 3\noom_kill 2\n", 2),
        (b"0::/j\xf6b\n1:name=systemd:/\n", os.fsdecode(b"j\xf6b"), "oom_kill 2\n", 2),
        (b"0::/job\n", "job", "oom 3\n", 0),
        (b"1:memory:/job\n", "job", "oom_kill 2\n", 0),
        (b"0::/" + 300 * b"x", "job", "oom_kill 2\n", 0),
        (b"", "job", "oom_kill 2\n", 0),
    ],
)
def test_any_control_group_is_read_or_passed_over(tmp_path, groups, group, events, kills):
    (tmp_path / "cgroup").write_bytes(groups)
    (tmp_path / group).mkdir()
    (tmp_path / group / "memory.events").write_text(events)
    assert module.kills_for_memory(tmp_path / "cgroup", tmp_path) == kills


@pytest.mark.parametrize("log", ["log", "removed"])
def test_stacks_of_many_processes_take_no_longer_than_those_of_a_few(tmp_path, monkeypatch, log):
    (tmp_path / "log").touch()
    now, asked = 0.0, []
    monkeypatch.setattr(stacks, "catches", lambda *_: True)
    monkeypatch.setattr(stacks.os, "kill", lambda pid, _: asked.append(pid))
    monkeypatch.setattr(stacks.time, "monotonic", lambda: now)
    request = stacks.ProcessStacks(range(100), tmp_path / log)
    while not request.poll():
        now += 1
    assert now <= stacks.ANSWER_S + stacks.ONE_ANSWER_S
    assert 1 < len(asked) < 100
