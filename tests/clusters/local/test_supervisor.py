"""A pretended node takes what its ranks leave behind as its own, and ends it."""

import json
import subprocess
import sys

import psutil

from tests.helpers import environment, until

LEAVES_A_CHILD = (
    "import os, sys, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork() == 0:\n"
    "        open(sys.argv[1], 'w').write(str(os.getpid()))\n"
    "        time.sleep(600)\n"
    "    os._exit(0)\n"
    "os.wait()\n"
    "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
    "sys.stdin.read() or time.sleep(600 * int(sys.argv[2]))\n"
)


def node(tmp_path, stays):
    left = tmp_path / "left"
    spec = {
        "ranks": [0],
        "silence_s": 20.0,
        "command": [sys.executable, "-c", LEAVES_A_CHILD, str(left), str(int(stays))],
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.clusters.local.supervisor", json.dumps(spec)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), text=True,
    )  # fmt: skip
    return process, left


def test_what_an_ended_rank_left_behind_is_ended_with_the_node(tmp_path):
    process, left = node(tmp_path, stays=False)
    with process:  # its input stays open until it has ended: else it would end its rank at once
        out = process.stdout.read()
    events = [json.loads(line)["event"] for line in out.splitlines()]
    assert events == ["started", "exit", "ended"]
    assert not psutil.pid_exists(int(left.read_text()))


def test_what_a_rank_leaves_behind_belongs_to_the_node_while_the_rank_lives(tmp_path):
    process, left = node(tmp_path, stays=True)
    until(lambda: left.exists() and left.read_text(), 60, "the child that was left")
    child = psutil.Process(int(left.read_text()))
    until(lambda: child.ppid() == process.pid, 20, "its adoption by the node")
    process.communicate(timeout=60)  # which closes its input, as when the launcher dies
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
