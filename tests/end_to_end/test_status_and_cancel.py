"""status, logs and cancel of local runs, from another shell."""

import json
import re
import signal

from tests.helpers import LIGHT, begin, result, until, verb


def found(run):
    return json.loads(verb("status", run, "--json").stdout)[0]


def start(run, *more):
    process = begin(
        LIGHT, f"run.dir={run}", "tracker=none", "train.updates=2000", "job.pause_s=0.02", *more
    )
    until((run / "metrics.jsonl").exists, 60, "the first update")
    return process


def ended(process):
    process.communicate(timeout=30)
    return process.returncode


def test_a_local_run_is_seen_and_cancelled_from_another_shell(tmp_path):
    run = tmp_path / "run"
    process = start(run)
    seen = found(run)
    assert (seen["state"], seen["cluster"], seen["total"]) == ("running", "local", 2000)

    output = verb("status", run).stdout
    for word in ("running", "/2,000", "loss", "learning rate", "samples/s"):
        assert word in output, output
    log = run / "logs" / "rank-00000.log"
    until(lambda: log.read_text().count("update ") > 1, 30, "a second line in the log")
    assert re.search(r"update \d+/2000  loss \d", verb("logs", run).stdout)

    left, stays = (begin("attach", run, module="orchestrator") for _ in range(2))
    assert re.match(r"starting|update", left.stdout.readline())
    assert "update" in left.stdout.readline()
    left.send_signal(signal.SIGINT)
    assert "the run goes on" in left.communicate(timeout=30)[0]
    assert left.returncode == 130
    assert process.poll() is None

    done = verb("cancel", run, code=0)
    assert "next update boundary" in done.stdout
    assert ended(process) == 3
    assert "to go on from here" in stays.communicate(timeout=30)[0]
    assert stays.returncode == 3
    assert found(run)["state"] == "stopped"
    assert found(run)["updates"] == result(run)["updates"] > 0
    again = verb("cancel", run, code=2)
    assert "nothing to cancel" in again.stderr
    assert "rank 0" not in verb("logs", run).stderr


def test_status_without_a_run_says_so(tmp_path):
    assert "no runs" in verb("status", cwd=tmp_path).stdout
    missing = verb("status", tmp_path / "nothing", code=2)
    assert "there is no run folder" in missing.stderr
