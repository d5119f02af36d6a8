"""`current_run`: light to import, harmless without a run, equal on all ranks within one."""

import errno
import json
import math
import multiprocessing
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from orchestrator.agent.programs import SHOULD_STOP_S, RankProgram
from orchestrator.client import framework_state
from orchestrator.client.run import METRICS, CurrentRun
from orchestrator.client.stop import Stop
from orchestrator.errors import JobError
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import read_metrics
from orchestrator.rundir.program_link import (
    ATTEMPT,
    NOT_YET,
    RANK,
    RUN,
    SIGNAL,
    STOP_AFTER,
    STOP_HANDLER,
    STOP_REQUESTED,
    WARNINGS,
    WORLD,
    write_number,
)
from orchestrator.rundir.warnings import read_warnings
from tests.agent.specs import node_spec
from tests.helpers import run_python, until

pytestmark = pytest.mark.whole_runs

IMPORT = """
import sys, time
before = time.process_time()
import orchestrator
print((time.process_time() - before) * 1e3)
assert not {"torch", "mindspore", "hydra", "omegaconf"} & set(sys.modules)
from orchestrator import current_run
assert not current_run and not current_run.should_stop(0)
current_run.report(0, loss=1.0, samples=3, accuracy=0.5)
current_run.save_done(0)
assert "torch" not in sys.modules and not hasattr(orchestrator, "no_such_name")
for name in orchestrator.__all__:
    getattr(orchestrator, name)
"""


def test_importing_us_is_quick_and_without_a_run_the_same_lines_do_nothing(tmp_path):
    spent = []
    for _ in range(3):
        spent.append(float(run_python(IMPORT, cwd=tmp_path).stdout))
        if min(spent) <= 30:
            break
    assert min(spent) <= 30, spent
    assert not list(tmp_path.iterdir())


def test_current_run_in_a_job_class(tmp_path):
    run = CurrentRun({})
    run.enter_job("Line", tmp_path, 2, 1, 4)
    assert run
    assert (run.folder, run.attempt, run.rank, run.ranks) == (tmp_path, 2, 1, 4)
    with pytest.raises(JobError, match=r"current_run\.epoch is not known here"):
        _ = run.epoch
    run.set_update(7, 3)
    assert (run.update, run.epoch) == (7, 3)
    for call in (lambda: run.report(0, loss=1.0), lambda: run.windows(5), lambda: run.save_done(1)):
        with pytest.raises(JobError, match=r"the trainer of a job class \(Line\)"):
            call()


def attempt_without_stop(folder):
    folder.mkdir(parents=True)
    for name in (STOP_REQUESTED, STOP_AFTER):
        write_number(str(folder / name), NOT_YET)
    return folder


@pytest.fixture
def attempt(tmp_path):
    return attempt_without_stop(tmp_path / "attempts" / "000")


def watched_program(attempt):
    facts = {
        "stop_signal": "TERM",
        "rendezvous": None,
        "serves": False,
        "most_s": 60.0,
        "log_bytes": 0,
        "restarts": False,
    }
    log = RunDir(attempt.parents[1]).rank_log(0)
    log.parent.mkdir(exist_ok=True)
    log.touch()
    return RankProgram(node_spec(attempt.parents[1]), 0, os.getpid(), facts)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_stop_waits_for_ranks_that_never_ask_and_says_who_they_are(attempt, silent):
    ranks = {rank: Stop(attempt, rank, 3) for rank in range(3) if rank != silent}
    assert not any(stop.due(0) for stop in ranks.values())
    program = watched_program(attempt)
    program.check_all_handle(0.0)
    write_number(str(attempt / STOP_REQUESTED), 0)
    assert not any(stop.due(update) for update in (1, 2) for stop in ranks.values())
    program.check_all_handle(1.0)
    warnings = attempt / "warnings-00000.jsonl"
    assert not warnings.exists()
    program.check_all_handle(1.0 + SHOULD_STOP_S)
    program.check_all_handle(100.0)  # once
    (line,) = warnings.read_text().splitlines()
    assert f"rank {silent} never called should_stop" in line


def test_a_program_that_asks_while_the_disk_is_full_waits_for_space(attempt, monkeypatch):
    monkeypatch.setattr("orchestrator.rundir.files.DISK_POLL_S", 0.0)
    refusals, write = [OSError(errno.ENOSPC, "No space left on device")] * 3, os.pwrite

    def full(*arguments):
        if refusals:
            raise refusals.pop()
        return write(*arguments)

    monkeypatch.setattr("os.pwrite", full)
    with pytest.warns(match="waiting for space on the disk"):
        assert not Stop(attempt, 0, 1).due(0)
    assert not refusals
    assert (attempt / "stop-handler-00000").exists()


def test_nothing_is_said_of_programs_that_none_or_all_of_whose_ranks_ask(attempt):
    write_number(str(attempt / STOP_REQUESTED), 0)
    for ranks in ((), (0, 1, 2)):
        for rank in ranks:
            Stop(attempt, rank, 3).due(0)
        program = watched_program(attempt)
        program.check_all_handle(1.0)
        program.check_all_handle(1.0 + SHOULD_STOP_S)
        assert not (attempt / "warnings-00000.jsonl").exists()


SIZE, ROUNDS = 4, 100


def be_rank(rank, folders, meet, ended):
    """Trains and stops once for each folder; the barrier is the reduction of an update."""
    for number, folder in enumerate(folders):
        epoch = (3, 1000)[number % 2]  # many loops begin their count anew
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        stop, update = Stop(folder, rank, SIZE), 0
        meet.wait(60)
        while not stop.due(update % epoch):
            update += 1
            meet.wait(60)
        ended.put((rank, update))
        meet.wait(60)  # a signal that comes late finds the handler still


def test_a_hundred_stops_of_random_ranks_at_random_moments_end_after_one_update(tmp_path):
    draw, fork = random.Random(13), multiprocessing.get_context("fork")
    folders = [attempt_without_stop(tmp_path / f"{number:03d}") for number in range(ROUNDS)]
    meet, ended = fork.Barrier(SIZE), fork.SimpleQueue()
    ranks = [
        fork.Process(target=be_rank, args=(rank, folders, meet, ended), daemon=True)
        for rank in range(SIZE)
    ]
    for process in ranks:
        process.start()
    for folder in folders:
        until(lambda f=folder: all((f / STOP_HANDLER.format(r)).exists() for r in range(SIZE)))
        time.sleep(draw.uniform(0, 0.03))
        for process in draw.sample(ranks, draw.randint(1, 2)):
            os.kill(process.pid, signal.SIGTERM)
        last = dict(until(lambda: not ended.empty()) and ended.get() for _ in range(SIZE))
        assert len(last) == SIZE
        assert len(set(last.values())) == 1, last
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0


# ------------------------------------------------------------------ Misuse is refused or said


@pytest.fixture
def ranks(attempt, monkeypatch):
    """Two ranks of one run, as their programs see it."""
    monkeypatch.setattr("orchestrator.rundir.warnings._destination", None)
    warnings = str(attempt / "warnings-0.jsonl")
    monkeypatch.setenv(WARNINGS, warnings)
    variables = {RUN: str(attempt.parents[1]), ATTEMPT: "0", WORLD: "2"}
    return [CurrentRun({**variables, RANK: str(rank)}) for rank in range(2)]


def written(run):
    return [json.loads(line) for line in (run.folder / METRICS).read_text().splitlines()]


def warned(run):
    return [found.text for found in read_warnings(run.folder / "attempts" / "000")]


GRAPH = torch.ones(2, requires_grad=True).sum()


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.5, 0.5),
        (None, None),
        (-math.inf, -math.inf),
        (GRAPH, 2.0),
        (torch.tensor([[3]]), 3.0),
        (torch.tensor(1e300, dtype=torch.float64).numpy(), 1e300),
        (torch.tensor(7).numpy()[()], 7.0),
    ],
)
def test_numbers_are_recorded_as_they_were_reported(ranks, value, kept):
    held = value.clone() if isinstance(value, torch.Tensor) else value
    ranks[0].report(0, loss=held, samples=torch.tensor(8), other=held)
    if isinstance(held, torch.Tensor):
        held.detach().zero_()
    [line] = written(ranks[0])
    assert (line["loss"], line["metrics"], line["samples"]) == (kept, {"other": kept}, 8)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"loss": torch.ones(3)}, r"loss is tensor\(\[1., 1., 1.\]\) \(Tensor\)"),
        ({"loss": "0.5"}, "loss is '0.5' \\(str\\)"),
        ({"loss": 10**400}, r"loss is 10+… \(401 characters\) \(int\)"),
        ({"loss": torch.ones((), device="meta")}, "loss is"),
        ({"loss": 1.0, "seen": {"a": 1}}, "seen is {'a': 1}"),
        ({"loss": 1.0, "samples": 0.5}, "samples must be a whole number, 0 or more, but is 0.5"),
        ({"loss": 1.0, "update": -1}, "update must be a whole number, 0 or more, but is -1"),
    ],
)
def test_wrong_figure_is_refused_on_every_rank(ranks, words, said):
    for run in ranks:
        with pytest.raises(JobError, match=said):
            run.report(**{"update": 0, **words})
    CurrentRun({}).report(**{"update": 0, **words})  # without a run all is accepted


def test_names_of_any_kind_are_read_back_within_what_a_glance_reads(ranks):
    names = {f"\x1b[31m{chr(0x4E00 + number) * 90}\n": 1e-300 for number in range(100)}
    ranks[0].report(0, loss=math.nan, **names)
    assert read_metrics(ranks[0].folder / METRICS).updates[0]["metrics"].keys() == names.keys()
    assert (ranks[0].folder / METRICS).stat().st_size < 64 * 1024


def test_a_note_that_something_was_saved_takes_no_update_out_of_the_record(ranks):
    ranks[0].report(0, loss=0.5)
    ranks[0].save_done(0)
    assert len(written(ranks[0])) == 2
    assert [r["loss"] for r in read_metrics(ranks[0].folder / METRICS).updates] == [0.5]


def test_a_frameworks_checkpoint_is_resumed_from_once_it_is_marked(ranks, monkeypatch):
    run = ranks[0]
    monkeypatch.setattr(framework_state, "current_run", run)
    first, last = (run.checkpoint_dir / f"lightning-{number}" for number in (3, 10))
    for folder in (first, last):
        folder.mkdir(parents=True)
    assert framework_state.newest("lightning-") is None
    framework_state.mark(first, 2, first_rank=True)
    framework_state.mark(last, 9, first_rank=False)
    assert framework_state.newest("lightning-") == (3, first)
    framework_state.mark(last, 9, first_rank=True)
    assert framework_state.newest("lightning-") == (10, last)
    assert [line["saved"] for line in written(run)] == [2, 9, 9]


def test_a_full_disk_is_warned_of_once_and_its_lines_follow(ranks, monkeypatch):
    def no_room(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("orchestrator.rundir.files.LineFile.flush", no_room)
        for update in range(3):
            ranks[0].report(update, loss=0.5)
    [sentence] = warned(ranks[0])
    assert sentence.startswith("metrics.jsonl could not be written: No space left on device")
    ranks[0].report(3, loss=0.5)
    assert [line["update"] for line in written(ranks[0])] == [0, 1, 2, 3]


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
    with ThreadPoolExecutor(1) as threads:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(JobError, match="call it in the main thread first"):
            threads.submit(ranks[0].should_stop, 0).result()
        signal.signal(signal.SIGTERM, lambda *_: None)
        assert threads.submit(ranks[0].should_stop, 0).result() is False


def test_the_signal_that_a_run_stops_its_program_by_is_a_wish_as_well(ranks):
    folder = ranks[0].folder
    run = CurrentRun({RUN: str(folder), ATTEMPT: "0", RANK: "0", WORLD: "1", SIGNAL: "INT"})
    assert not run.should_stop(0)
    os.kill(os.getpid(), signal.SIGINT)
    until(lambda: run.should_stop(1), 30)


def test_what_one_or_many_threads_report_is_in_the_record_whole_and_in_order(ranks):
    run, count = ranks[0], 2000
    for update in range(count):
        run.report(update, loss=0.5, samples=8, accuracy=0.5)
    assert [line["update"] for line in written(run)] == [*range(count)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: run.report(number, loss=0.5), range(count)))
    assert sorted(line["update"] for line in written(run)[count:]) == [*range(count)]
