"""Whole runs of MindSpore jobs, as a user starts them."""

from __future__ import annotations

import json
import os
import re
import signal

import psutil
import pytest

from tests import helpers
from tests.docs.printed import typed
from tests.docs.scripts import shell_block
from tests.engine.mindspore.under_msrun import TRAIN, under_msrun
from tests.hold import Hold
from tests.programs import script

SLOW = "job._target_=tests.engine.mindspore.jobs.SlowLine"


def test_both_engines_agree_from_the_same_start(tmp_path):
    """The block of docs/how-to/mindspore.md, with a narrower net."""
    block = shell_block("mindspore.md", "orchestrator compare")
    assert "layers=[784,512,512,10]" in block
    (tmp_path / "typed").mkdir()
    for _, _, module, *words in typed(block.replace("512,512", "48"), tmp_path / "typed"):
        done = helpers.call(*words, module=module, cwd=tmp_path, timeout=390)
        assert done.returncode == 0, done.stdout + done.stderr
    torchs, ours = tmp_path / "runs" / "torch", tmp_path / "runs" / "mindspore"
    assert "torch" in json.loads((torchs / "environment.json").read_text())["framework"]
    assert "mindspore" in json.loads((ours / "environment.json").read_text())["framework"]
    assert [r["update"] for r in helpers.records(ours)] == list(range(10))
    assert all(r["micro_steps"] == 4 for r in helpers.records(ours))
    found = helpers.compare(ours, torchs)
    assert 0 < found["max_relative_difference"] <= 1e-5
    start = tmp_path / "runs" / "start"
    done = helpers.verb("compare", ours, start, "--at-most", "1e-5")
    assert done.returncode == 1
    assert "more than --at-most 1e-05" in done.stderr


# ------------------------------------------------------------------ Programs


@pytest.mark.timeout(600)
def test_on_two_nodes_it_ends_with_the_bits_that_it_has_under_msrun(tmp_path):
    script(tmp_path, TRAIN)
    under_msrun(tmp_path, 2, timeout=290)  # one after the other, since each takes gigabytes
    ours = helpers.call(
        "run", "job.style=mindspore", "run.dir=ours", helpers.SMALL,
        "cluster.rendezvous_timeout_s=600", "--",
        "train.py", module="orchestrator", cwd=tmp_path, timeout=290,
    )  # fmt: skip
    assert ours.returncode == 0, ours.stdout + ours.stderr

    endings = set()
    for rank in range(2):
        at = (f"theirs/worker_{rank}.log", f"ours/logs/rank-{rank:05d}.log")
        texts = [(tmp_path / name).read_text() for name in at]
        endings |= {tuple(re.findall("^final (.*)", text, re.MULTILINE)) for text in texts}
        reports = [json.loads(re.findall(r"^\{.*\}$", text, re.MULTILINE)[-1]) for text in texts]
        for one in reports:
            assert one.pop("MS_SCHED_PORT")
            assert one.pop("MS_SCHED_HOST").startswith("127.0.")
        assert reports[0] == reports[1], "the same variables, of the same values"
    assert len(endings) == 1
    assert len(endings.pop()) == 1


# ------------------------------------------------------------------ Ends of runs


LINE = (
    "job=line", "cluster.nodes=2", "cluster.ranks_per_node=1", "tracker=none", "train.epochs=null",
    "train.updates=60", "train.checkpoint_every=10", "train.evaluate_every=0",
)  # fmt: skip


def scheduler_of(run):
    children = psutil.Process(helpers.rank_pid(run, 0)).children()
    return next(c.pid for c in children if "scheduler_process.py" in " ".join(c.cmdline()))


def test_a_killed_scheduler_is_named_and_costs_no_bit(tmp_path):
    """tests/slurm kills a rank."""
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    hold = Hold(tmp_path / "hold").hold_before(59)
    reference = helpers.begin(*LINE, SLOW, f"run.dir={undisturbed}")
    held = (SLOW, "job.pause_s=0.02", hold.override)
    process = helpers.begin(*LINE, *held, f"run.dir={run}", "run.max_restarts=1")
    helpers.until(lambda: len(helpers.records(run)) > 15, what="training")
    doomed = helpers.processes_of(run)
    os.kill(scheduler_of(run), signal.SIGKILL)
    helpers.until((run / "attempts" / "001").exists, 20, "the next attempt")
    assert not [p for p in doomed if helpers.name_of(p).startswith("rank")]
    hold.release()
    for one in (reference, process):
        output, _ = one.communicate(timeout=120)
        assert one.returncode == 0, output
    assert not helpers.processes_of(run)
    plan = json.loads((undisturbed / "plan.json").read_text())
    kept = helpers.records(undisturbed)
    assert all(r["collectives"] == plan["collectives_per_update"] for r in kept)
    assert kept[0]["compile_s"] > 0
    assert "compile_s" not in kept[-1]
    learned = helpers.result(undisturbed)["metrics"]
    assert abs(learned["slope"] - 2) < 0.02
    assert abs(learned["intercept"] - 3) < 0.02
    found = helpers.result(run)
    [note] = found["restarts"]
    assert "MindSpore's scheduler" in note["why"]
    assert note["resumed_from"] > 0
    assert found["weights_sha256"] == helpers.result(undisturbed)["weights_sha256"]
