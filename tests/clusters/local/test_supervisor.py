"""A pretended node takes what its ranks leave behind as its own, and ends it; a rank, a fork of its
node, has nothing left of it.
"""

import json
import signal
import subprocess
import sys

import psutil

from tests.helpers import environment, until

NODE = """
import json, os, random, signal, sys, time
from orchestrator.clusters.local.supervisor import serve
from orchestrator.lifecycle.forks import ending
from orchestrator.rank.preload import draw_other_numbers

def leaves_a_child(rank):
    left, stays = sys.argv[2:]
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
    draw_other_numbers()
    opened = [os.readlink(entry) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()]
    print(json.dumps({
        "rank": [rank, os.environ["SLURM_PROCID"], os.environ["SLURM_LOCALID"]],
        "replaces": os.environ["ORCHESTRATOR_REPLACES"],
        "leads its session": os.getsid(0) == os.getpid(),
        "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "handled": [int(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGCHLD)],
        "opened": sorted(name.partition(":")[0] for name in opened if "/fd" not in name),
        "drawn": [random.random(), numpy.random.rand(), torch.rand(1).item()],
    }), file=sys.stderr)
    return rank

def raises(rank):
    raise KeyError(rank)

what = sys.argv[1]
if what == "tells":
    import numpy, torch
with ending() as end:
    ranks, stays = [4] if what == "leaves_a_child" else [4, 5], "stays" in sys.argv
    rank = serve(ranks[0], dict.fromkeys(ranks, 0), silence_s=20.0, hang_s=300.0, stays=stays)
    end.code = 0 if rank is None else globals()[what](rank)
"""


def node(*words, **more):
    return subprocess.Popen(
        [sys.executable, "-c", NODE, *map(str, words)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), text=True, **more,
    )  # fmt: skip


def events_of(process):
    """To its end: its input stays open until then, or else it would end its ranks at once."""
    return [json.loads(line) for line in process.stdout]


def test_what_an_ended_rank_left_behind_is_ended_with_the_node(tmp_path):
    with node("leaves_a_child", tmp_path / "left", 0) as process:
        events = events_of(process)
    assert [event["event"] for event in events] == ["begun", "started", "exit", "ended"]
    assert not psutil.pid_exists(int((tmp_path / "left").read_text()))


def test_what_a_rank_leaves_behind_belongs_to_the_node_while_the_rank_lives(tmp_path):
    left = tmp_path / "left"
    process = node("leaves_a_child", left, 1)
    until(lambda: left.exists() and left.read_text(), 60, "the child that was left")
    child = psutil.Process(int(left.read_text()))
    until(lambda: child.ppid() == process.pid, 20, "its adoption by the node")
    process.communicate(timeout=60)  # which closes its input, as when the launcher dies
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def started_again(process):
    """Its events to the end, where rank 5 gets another process after both have ended."""
    events = []
    for line in process.stdout:
        events.append(json.loads(line))
        ends = sum(event["event"] == "exit" for event in events)
        if events[-1]["event"] == "exit" and ends > 1:
            process.stdin.write("start 5 1\n" if ends == 2 else "close\n")
            process.stdin.flush()
    return events


def test_a_rank_has_nothing_of_its_node_and_draws_numbers_of_its_own_started_again_or_not():
    with node("tells", "stays", stderr=subprocess.PIPE) as process:
        events = started_again(process)
        told = sorted(map(json.loads, process.stderr), key=lambda one: one["rank"])
    assert sorted(e["status"] for e in events if e["event"] == "exit") == [4, 5, 5]
    assert [one["rank"] for one in told] == [[4, "4", "0"], [5, "5", "1"], [5, "5", "1"]]
    assert sorted(one["replaces"] for one in told) == ["0", "0", "1"]
    for one in told:
        assert one["leads its session"]
        assert one["blocked"] == [signal.SIGTERM]
        assert one["handled"] == [signal.SIG_DFL, signal.SIG_DFL]
        assert one["opened"] == ["/dev/null", "pipe", "pipe", "socket"]
    assert len({number for one in told for number in one["drawn"]}) == 9


def test_a_rank_that_raises_before_it_has_a_log_ends_with_its_traceback_in_the_nodes():
    with node("raises", stderr=subprocess.PIPE) as process:
        events = events_of(process)
        log = process.stderr.read()
    ended = {event["rank"]: event["status"] for event in events if event["event"] == "exit"}
    assert ended == {4: 1, 5: 1}
    assert "KeyError: 4" in log
    assert "KeyError: 5" in log
