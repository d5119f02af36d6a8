"""A stop by real signals to real processes: whoever gets one, whenever, all end with one update."""

import multiprocessing
import os
import random
import signal
import time

from orchestrator.client.stop import Stop
from orchestrator.rundir.program_link import (
    NOT_YET,
    STOP_AFTER,
    STOP_HANDLER,
    STOP_REQUESTED,
    write_number,
)
from tests.helpers import until

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
