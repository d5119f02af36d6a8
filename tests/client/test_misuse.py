"""`current_run` misused: refused where it is called, or said to whoever looks at the run."""

import json
import math
import os
import signal
import threading

import pytest
import torch

from orchestrator.client.run import FEW, METRICS, Run
from orchestrator.errors import JobError
from orchestrator.rundir.metrics import read_metrics
from orchestrator.rundir.program_link import (
    ATTEMPT,
    NOT_YET,
    RANK,
    RUN,
    SIGNAL,
    STOP_AFTER,
    STOP_REQUESTED,
    WARNINGS,
    WORLD,
    write_number,
)  # fmt: skip
from orchestrator.rundir.warnings import read_warnings
from tests.helpers import until


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Two ranks of one run, as their programs see it."""
    monkeypatch.setattr("orchestrator.rundir.warnings._destination", None)
    attempt = tmp_path / "attempts" / "000"
    attempt.mkdir(parents=True)
    for name in (STOP_REQUESTED, STOP_AFTER):
        write_number(str(attempt / name), NOT_YET)
    variables = {
        RUN: str(tmp_path),
        ATTEMPT: "0",
        WORLD: "2",
        WARNINGS: str(attempt / "warnings-0.jsonl"),
    }
    before = signal.getsignal(signal.SIGTERM)
    yield [Run({**variables, RANK: str(rank)}) for rank in range(2)]
    signal.signal(signal.SIGTERM, before)


def written(run):
    run.flush()
    return [json.loads(line) for line in (run.folder / METRICS).read_text().splitlines()]


def warned(run):
    return [found.text for found in read_warnings(run.folder / "attempts" / "000")]


GRAPH = torch.ones(2, requires_grad=True).sum()


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (1, 1.0), (True, 1.0), (0.5, 0.5), (None, None), (-math.inf, -math.inf), (GRAPH, 2.0),
        (torch.tensor([[3]]), 3.0), (torch.tensor(1e300, dtype=torch.float64).numpy(), 1e300),
        (torch.tensor(7).numpy()[()], 7.0),
    ],
)  # fmt: skip
def test_what_is_a_number_is_recorded_as_it_was_when_it_was_told(ranks, value, kept):
    held = value.clone() if isinstance(value, torch.Tensor) else value
    ranks[0].report(0, loss=held, samples=torch.tensor(8), other=held)
    if isinstance(held, torch.Tensor):
        held.detach().zero_()
    [line] = written(ranks[0])
    assert (line["loss"], line["metrics"], line["samples"]) == (kept, {"other": kept}, 8)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"loss": torch.ones(3)}, r"loss is tensor\(\[1., 1., 1.\]\) \(Tensor\); try its mean"),
        ({"loss": "0.5"}, "loss is '0.5' \\(str\\)"),
        ({"loss": 10**400}, r"loss is 10+… \(401 characters\) \(int\)"),
        ({"loss": [1.0]}, "loss is"),
        ({"loss": torch.ones((), device="meta")}, "loss is"),
        ({"loss": 1.0, "seen": {"a": 1}}, "seen is {'a': 1}"),
        ({"loss": 1.0, "x" * 101: 1.0}, "names of at most 100 characters"),
        ({"loss": 1.0, **{f"f{number}": 1.0 for number in range(101)}}, "at most 100 figures"),
        ({"loss": 1.0, "samples": 0.5}, "samples must be a whole number, 0 or more, but is 0.5"),
        ({"loss": 1.0, "update": 1.5}, "update must be a whole number"),
        ({"loss": 1.0, "update": -1}, "update must be a whole number, 0 or more, but is -1"),
    ],
)
def test_what_is_no_figure_is_refused_where_it_is_told_on_every_rank(ranks, words, said):
    for run in ranks:
        with pytest.raises(JobError, match=said):
            run.report(**{"update": 0, **words})
    Run({}).report(**{"update": 0, **words})  # without a run nobody minds


def test_names_of_any_kind_are_read_back_within_what_a_glance_reads(ranks):
    names = {f"\x1b[31m{chr(0x4E00 + number) * 90}\n": 1e-300 for number in range(100)}
    ranks[0].report(0, loss=math.nan, **names)
    ranks[0].flush()
    assert read_metrics(ranks[0].folder / METRICS).updates[0]["metrics"].keys() == names.keys()
    assert (ranks[0].folder / METRICS).stat().st_size < 64 * 1024


def test_a_note_that_something_was_saved_takes_no_update_out_of_the_record(ranks):
    ranks[0].report(0, loss=0.5)
    ranks[0].save_done(0)
    assert len(written(ranks[0])) == 2
    assert [r["loss"] for r in read_metrics(ranks[0].folder / METRICS).updates] == [0.5]


def test_updates_that_begin_anew_are_recorded_and_warned_of_once(ranks):
    for update in (0, 1, 0, 1, 0):
        ranks[0].report(update, loss=0.5)
    assert len(written(ranks[0])) == 5
    [sentence] = warned(ranks[0])
    assert sentence.startswith("run.report(0) came after run.report(1)")


def test_reports_of_other_ranks_alone_are_warned_of(ranks):
    for update in range(FEW):
        ranks[1].report(update, loss=0.5)
    [sentence] = warned(ranks[1])
    assert sentence.startswith("rank 1: rank 1 calls run.report(), but rank 0 did not")


def test_a_fork_neither_reports_nor_takes_a_stop_for_the_training(ranks):
    run = ranks[0]
    run.report(0, loss=0.5)
    run.should_stop(0)
    pid = os.fork()
    if pid == 0:
        try:
            run.report(1, loss=0.5)
        except JobError:
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM, "it ends as ever"
    assert not run.should_stop(1)


def test_in_a_thread_it_is_refused_unless_the_signal_is_taken_care_of(ranks):
    said = []

    def ask():
        try:
            said.append(ranks[0].should_stop(0))
        except JobError as error:
            said.append(str(error))

    for handler in (signal.SIG_DFL, lambda *_: None):
        signal.signal(signal.SIGTERM, handler)
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert "call it in the main thread first" in said[0]
    assert said[1] is False


def test_the_signal_that_a_run_stops_its_program_by_is_a_wish_as_well(ranks):
    before = signal.getsignal(signal.SIGINT)
    folder = ranks[0].folder
    run = Run({RUN: str(folder), ATTEMPT: "0", RANK: "0", WORLD: "1", SIGNAL: "INT"})
    assert not run.should_stop(0)
    os.kill(os.getpid(), signal.SIGINT)
    until(lambda: run.should_stop(1), 30)
    signal.signal(signal.SIGINT, before)


def test_many_threads_report_into_one_record(ranks):
    run, count = ranks[0], 8
    meet = threading.Barrier(count)

    def report(number):
        meet.wait()
        run.report(number, loss=0.5)

    threads = [threading.Thread(target=report, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line["update"] for line in written(run)) == [*range(count)]
