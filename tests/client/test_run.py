"""What a program imports of us: light, harmless without a run, and agreed within one."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from orchestrator.agent.programs import SHOULD_STOP_S, RankProgram
from orchestrator.client.run import Run
from orchestrator.client.stop import Stop
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.program_link import (
    ATTEMPT,
    NOT_YET,
    RANK,
    RUN,
    STOP_AFTER,
    STOP_HANDLER,
    STOP_REQUESTED,
    WORLD,
    write_number,
)
from tests.agent.specs import node_spec
from tests.helpers import environment, until

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
        done = subprocess.run(
            [sys.executable, "-c", IMPORT],
            env=environment(), capture_output=True, text=True, cwd=tmp_path, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        spent.append(float(done.stdout))
        if min(spent) <= 30:
            break
    assert min(spent) <= 30, spent
    assert not list(tmp_path.iterdir())


@pytest.fixture
def attempt(tmp_path):
    folder = tmp_path / "attempts" / "000"
    folder.mkdir(parents=True)
    for name in (STOP_REQUESTED, STOP_AFTER):
        write_number(str(folder / name), NOT_YET)
    return folder


def a_run(attempt, rank=0, size=1):
    variables = {RUN: str(attempt.parents[1]), ATTEMPT: "0", RANK: str(rank), WORLD: str(size)}
    return Run(variables)


def test_what_is_reported_is_in_the_record_whole_and_in_order(attempt):
    run = a_run(attempt)
    for update in range(2000):
        run.report(update, loss=0.5, samples=8, accuracy=0.5)
    run.flush()
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["update"] for r in records] == [*range(2000)]


def watched_program(attempt):
    facts = {
        "stop_signal": "TERM", "rendezvous": None, "serves": False, "most_s": 60.0, "log_bytes": 0,
        "restarts": False,
    }  # fmt: skip
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


def test_nothing_is_said_of_programs_that_none_or_all_of_whose_ranks_ask(attempt):
    write_number(str(attempt / STOP_REQUESTED), 0)
    for ranks in ((), (0, 1, 2)):
        for rank in ranks:
            Stop(attempt, rank, 3).due(0)
        program = watched_program(attempt)
        program.check_all_handle(1.0)
        program.check_all_handle(1.0 + SHOULD_STOP_S)
        assert not (attempt / "warnings-00000.jsonl").exists()


# ------------------------------------------------------------------ Real signals


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
    folders = [tmp_path / f"{number:03d}" for number in range(ROUNDS)]
    for folder in folders:
        folder.mkdir()
        for name in (STOP_REQUESTED, STOP_AFTER):
            write_number(str(folder / name), NOT_YET)
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
