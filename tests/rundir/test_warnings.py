"""Warnings of ranks: bounded, told once, and read back from whatever the folder holds."""

import json

import pytest

from orchestrator.rundir import warnings as run_warnings
from orchestrator.rundir.program_link import RANK, WARNINGS
from orchestrator.rundir.warnings import MOST_KINDS, NewWarnings, read_warnings, warn, warn_into
from tests.helpers import run_python


@pytest.fixture
def as_rank(tmp_path, monkeypatch):
    """Makes this process a rank, as a worker does."""
    monkeypatch.setattr(run_warnings, "_destination", None)
    return lambda rank, node=0: warn_into(tmp_path / f"warnings-{node:05d}.jsonl", rank)


def test_a_warning_of_many_ranks_is_one_entry_with_its_ranks(as_rank, tmp_path):
    for rank in (3, 5):
        as_rank(rank, node=rank // 4)
        for number in range(100):
            warn(f"slow: {number} s", kind="slow")
    [warned] = read_warnings(tmp_path)
    assert warned.text == "ranks 3, 5: slow: 0 s"


def test_a_warning_has_its_ranks_name_and_is_in_its_log_once(as_rank, tmp_path, capsys):
    as_rank(0)
    warn("it was frozen", about="rank")
    warn("slow")
    assert [one.text for one in read_warnings(tmp_path)] == ["rank 0: it was frozen", "slow"]
    assert capsys.readouterr().out == "warning: it was frozen\nwarning: slow\n"


def test_a_flood_leaves_few_short_lines(as_rank, tmp_path, capsys):
    as_rank(0)
    for number in range(5000):
        warn(f"{number} " + "x" * 5000)
    lines = (tmp_path / "warnings-00000.jsonl").read_bytes().split(b"\n")[:-1]
    assert len(lines) < MOST_KINDS + 20
    assert max(map(len, lines)) < 3000
    assert capsys.readouterr().out.count("\n") == len(lines)
    assert "no more are shown" in read_warnings(tmp_path)[-1].sentence


def test_each_warning_is_news_once_and_the_folder_is_looked_at_now_and_then(as_rank, tmp_path):
    moment = [0.0]
    news = NewWarnings(tmp_path, already=["known"], clock=lambda: moment[0])
    as_rank(0)
    warn("known")
    warn("new")
    assert news.read() == ["new"]
    warn("newer")
    assert news.read() == []
    assert news.read(now=True) == ["newer"]
    moment[0] = 60.0
    assert news.read() == []


def test_a_warning_of_an_earlier_version_names_its_rank(tmp_path):
    line = {"sentence": "it was frozen", "kind": "frozen", "rank": 0, "time": 1.0}
    (tmp_path / "warnings-00000.jsonl").write_text(f"{json.dumps(line)}\n")
    assert [warning.text for warning in read_warnings(tmp_path)] == ["rank 0: it was frozen"]


def test_torn_lines_and_links_are_passed_over(tmp_path):
    path = tmp_path / "warnings-00000.jsonl"
    good = json.dumps({"sentence": "s", "kind": "s", "rank": 0, "time": 1.0})
    path.write_text(f'{{"sentence": "torn\n{good}\n{good[:-9]}')
    (tmp_path / "warnings-00001.jsonl").symlink_to(path)
    assert [warned.sentence for warned in read_warnings(tmp_path)] == ["s"]


def test_unwritable_folder_delays_a_warning(tmp_path, as_rank):
    as_rank(0)
    run_warnings.warn_into(tmp_path / "later" / "warnings-00000.jsonl", 0)
    warn("first")
    (tmp_path / "later").mkdir()
    warn("second")
    assert [warned.sentence for warned in read_warnings(tmp_path / "later")] == ["first", "second"]


ACCUMULATES = """
import torch
from orchestrator import Accumulator
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
Accumulator(model, torch.optim.SGD(model.parameters(), 0.1)).begin_window()
"""


def test_a_loop_of_a_run_that_only_accumulates_warns_in_the_run(tmp_path):
    path = tmp_path / "warnings-00000.jsonl"
    done = run_python(ACCUMULATES, **{WARNINGS: str(path), RANK: "3"})
    [warned] = read_warnings(tmp_path)
    assert warned.ranks == (3,)
    assert "batch norm" in warned.sentence
    assert done.stdout == f"warning: {warned.sentence}\n"
    assert "batch norm" not in done.stderr


@pytest.mark.parametrize("closes", [False, True])
def test_a_programs_output_that_takes_no_warning_ends_nothing(tmp_path, closes):
    path = tmp_path / "warnings-00000.jsonl"
    program = "import sys; from orchestrator.rundir.warnings import warn; "
    program += "sys.stdout.close(); " * closes + "warn('größe')"
    run_python(program, **{WARNINGS: str(path), RANK: "0", "PYTHONIOENCODING": "ascii"})
    assert [warned.sentence for warned in read_warnings(tmp_path)] == ["größe"]


def test_without_a_run_a_warning_is_pythons():
    program = "from orchestrator.rundir.warnings import warn; warn('in a program of my own')"
    assert "UserWarning: in a program of my own" in run_python(program).stderr
