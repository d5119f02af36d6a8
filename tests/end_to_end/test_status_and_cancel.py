"""status, logs and cancel of local runs, from another shell, whatever the logs hold."""

import json
import os
import pty
import re
import signal
import subprocess

import pytest

from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import Culprit, State, write_result
from orchestrator.rundir.warnings import warn_of
from tests.helpers import (
    LIGHT,
    LIMIT_S,
    SMALL,
    begin,
    begin_anew,
    command,
    environment,
    result,
    until,
    verb,
)
from tests.hold import begin_held, request_stop
from tests.run_folders import make_run

pytestmark = pytest.mark.whole_runs


def found(run):
    return json.loads(verb("status", run, "--json").stdout)[0]


def test_a_local_run_is_seen_and_cancelled_from_another_shell(run):
    line = (LIGHT, f"run.dir={run}", "tracker=none", "train.updates=2000", "job.pause_s=0.02")
    process = begin(*line)
    until((run / "metrics.jsonl").exists, 60, "the first update")
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
    assert "the run goes on" in left.communicate(timeout=LIMIT_S)[0]
    assert left.returncode == 130
    assert process.poll() is None

    done = verb("cancel", run, code=0)
    assert "next update boundary" in done.stdout
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 3
    assert "to go on from here" in stays.communicate(timeout=LIMIT_S)[0]
    assert stays.returncode == 3
    assert found(run)["state"] == "stopped"
    assert found(run)["updates"] == result(run)["updates"] > 0
    again = verb("cancel", run, code=2)
    assert "nothing to cancel" in again.stderr
    assert "rank 0" not in verb("logs", run).stderr


def test_several_runs_are_cancelled_although_one_of_them_has_ended(tmp_path):
    over = make_run(tmp_path / "over")
    write_result(over, State.FINISHED)
    runs = [tmp_path / name for name in "ab"]
    long = (LIGHT, "tracker=none", "train.updates=1000000", "job.pause_s=0.02")
    processes = [begin(*long, f"run.dir={path}") for path in runs]
    until(lambda: all((path / "metrics.jsonl").exists() for path in runs), what="the first updates")
    absent = [tmp_path / "absent", tmp_path / "missing"]
    missing = verb("cancel", runs[0], *absent, over.path, code=2)
    assert all(str(path) in missing.stderr for path in absent)
    assert f"{over.path} has ended already" in "".join(missing.stdout.splitlines())
    done = verb("cancel", *runs, code=0)  # the first may still stop, or have ended
    assert "next update boundary" in done.stdout
    for process in processes:
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == 3
    assert verb("cancel", *runs, code=0).stdout.count("has ended already") == 2


def test_a_run_that_is_cancelled_again_while_it_stops_still_saves_its_checkpoint(run):
    process, hold = begin_held(run, 2, LIGHT, SMALL, "train.updates=20")
    request_stop(run, lambda: verb("cancel", run, code=0))
    assert "next update boundary" in verb("cancel", run, code=0).stdout
    # The launcher shows a warning just before it looks at its signals. If it took the second one
    # for an order to end at once, it would obey then, whatever the ranks do.
    warn_of(RunDir(run).warnings(0, 0), 0, "a later warning")
    assert any("a later warning" in line for line in process.stdout)
    hold.release()
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 3
    assert found(run)["updates"] == 3, "the update in which it was held is part of the checkpoint"


@pytest.mark.parametrize("before", [[], ["nohup"]])
def test_a_terminal_that_closes_stops_a_run_unless_that_was_to_be_ignored(run, before):
    terminal, its_end = pty.openpty()
    line = (
        LIGHT,
        SMALL,
        f"run.dir={run}",
        "tracker=none",
        "job.pause_s=0.05",
        f"train.updates={60 if before else 4000}",
    )
    process = subprocess.Popen(
        ["setsid", "--ctty", *before, *command(*line)],
        env=environment(),
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        cwd=run.parent,
    )
    os.close(its_end)
    until((run / "metrics.jsonl").exists, 60, "the first update")
    process.send_signal(signal.SIGHUP)  # as the shell does, and then the kernel
    os.close(terminal)
    assert process.wait(60) == (0 if before else 3)
    assert result(run)["state"] == ("finished" if before else "stopped")
    assert before or list((run / "checkpoints").iterdir())


@pytest.mark.parametrize("sweep", [(), ("-m", "train.seed=1,2", "sweep.parallel=2")])
def test_a_reader_that_ends_as_tee_does_at_ctrl_c_lets_a_run_save(run, sweep):
    point = run / "0" if sweep else run
    long = ("train.updates=4000", "job.pause_s=0.05")
    line = (LIGHT, SMALL, f"run.dir={run}", "tracker=none", *long)
    process = begin_anew(*sweep, *line)
    until((point / "metrics.jsonl").exists, 60, "the first update")
    process.stdout.close()
    if sweep:  # which says nothing meanwhile
        process.send_signal(signal.SIGINT)
    assert process.wait(60) == 3
    assert result(point)["state"] == "stopped"
    assert list((point / "checkpoints").iterdir())


NASTY = (
    b"plain\n\x1b]0;title\x07\x1b[2J\x1b[31mred\x1b[0m \x9b31m\xc2\x9b0m\xff\n"
    b"\x1b]52;c;ZXZpbA==\x07end"
)


def test_nothing_that_steers_a_terminal_gets_through(tmp_path):
    run = make_run(tmp_path / "run")
    run.rank_log(0).write_bytes(NASTY * 30_000)
    done = subprocess.run(
        command("logs", run.path, module="orchestrator"),
        env=environment(),
        capture_output=True,
        check=True,
    )
    text = done.stdout.decode()
    assert not set(text) & {"\x1b", "\x07", "\x9b"}
    assert text.count("plain\n") == 30_000
    assert "evil" not in text
    assert "ZXZpbA" not in text


@pytest.mark.parametrize("follow", [(), ("-f",)])
def test_last_lines_of_a_log_and_pointer_to_the_failed_rank(tmp_path, follow):
    run = make_run(tmp_path / "run")
    run.rank_log(0).write_bytes(b"early\n" * 10_000 + b"late\nlast\n")
    run.rank_log(1).write_text("of rank 1\n")
    write_result(run, State.FAILED, Culprit(rank=1, node="node0", cause="killed"))
    done = verb("logs", run.path, "-n", "2", *follow)
    way = f"rank 1 failed first; its log: python -m orchestrator logs {run.path} --rank 1\n"
    assert (done.stdout, done.stderr) == ("late\nlast\n", way)
    done = verb("logs", run.path, "--rank", "1", *follow)
    assert (done.stdout, done.stderr) == ("of rank 1\n", "")


def test_a_programs_output_is_shown_on_request_and_its_folder_at_once(tmp_path):
    (tmp_path / "say.py").write_text("import os\nprint('rank', os.environ['RANK'], '\\x1b[2J')\n")
    line = ("cluster.nodes=1", f"run.dir={tmp_path / 'run'}", "--", "say.py")
    plain = verb("run", *line, cwd=tmp_path).stdout
    assert plain.startswith(f"run folder: {tmp_path / 'run'}; -v, or python -m orchestrator logs")
    assert "rank 0 \n" not in plain
    line = (line[0], f"run.dir={tmp_path / 'other'}", *line[2:])
    shown = verb("run", "-v", *line, cwd=tmp_path).stdout
    assert "rank 0 \n" in shown
    assert "rank 1 \n" not in shown
