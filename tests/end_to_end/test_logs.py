"""Logs are read as text, whatever is in them and however long they are."""

import subprocess

from orchestrator.rundir.outcome import Culprit, State, write_result
from tests.helpers import command, environment, verb
from tests.rundir.test_files import made

NASTY = (
    b"plain\n\x1b]0;title\x07\x1b[2J\x1b[31mred\x1b[0m \x9b31m\xc2\x9b0m\xff\n"
    b"\x1b]52;c;ZXZpbA==\x07end"
)


def test_nothing_that_steers_a_terminal_gets_through(tmp_path):
    run = made(tmp_path / "run")
    run.rank_log(0).write_bytes(NASTY * 30_000)
    done = subprocess.run(
        command("logs", run.path, module="orchestrator"), env=environment(), capture_output=True,
        check=True,
    )  # fmt: skip
    text = done.stdout.decode()
    assert not set(text) & {"\x1b", "\x07", "\x9b"}
    assert text.count("plain\n") == 30_000
    assert "evil" not in text
    assert "ZXZpbA" not in text


def test_the_end_of_a_long_log_can_be_had_alone(tmp_path):
    run = made(tmp_path / "run")
    run.rank_log(0).write_bytes(b"early\n" * 10_000 + b"late\nlast\n")
    write_result(run, State.FINISHED)
    for more in ((), ("-f",)):
        assert verb("logs", run.path, "-n", "2", *more).stdout == "late\nlast\n"


def test_the_log_of_the_rank_that_failed_first_is_named_after_that_of_another(tmp_path):
    run = made(tmp_path / "run")
    for rank in range(2):
        run.rank_log(rank).write_text(f"of rank {rank}\n")
    write_result(run, State.FAILED, Culprit(rank=1, node="node0", cause="killed"))
    way = f"rank 1 failed first; its log: python -m orchestrator logs {run.path} --rank 1\n"
    for more in ((), ("-f",)):
        done = verb("logs", run.path, *more)
        assert (done.stdout, done.stderr) == ("of rank 0\n", way)
    done = verb("logs", run.path, "--rank", "1")
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


def test_a_log_that_is_a_link_is_refused_in_one_sentence(tmp_path):
    run = made(tmp_path / "run")
    run.rank_log(0).symlink_to("/etc/passwd")
    done = verb("logs", run.path, timeout=20)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is a link" in done.stderr
    assert "Traceback" not in done.stderr
