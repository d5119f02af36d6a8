"""Many watchers, few calls: a law over simulated minutes, and a real squeue's stand-in on PATH."""

import itertools
import random

import pytest

from orchestrator.scheduler.client import Answer, SlurmClient
from orchestrator.scheduler.shared_queue import (
    APART_S,
    CALLS,
    STEADY_S,
    WINDOW_S,
    Pace,
    SharedQueue,
)

JOBS = 20


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Scheduler(SlurmClient):
    """Answers after a moment of simulated time, and remembers when it was asked."""

    def __init__(self, clock):
        self.clock, self.calls = clock, []

    def environment(self, command):
        return {}

    def start(self, *command):
        self.calls.append(self.clock.now)
        return Reply(self.clock, f"{self.clock.now}")


class Reply:
    def __init__(self, clock, text):
        self.clock, self.ready, self.text = clock, clock.now + 0.3, text

    def answer(self):
        return Answer(0, self.text, "") if self.clock.now >= self.ready else None

    def forget(self):
        return None


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("changes", [0, JOBS, 20 * JOBS])
def test_all_watchers_of_a_user_ask_four_times_a_minute_at_most_and_each_gets_its_news(
    tmp_path, seed, changes
):
    rng, clock = random.Random(seed), Clock()
    scheduler = Scheduler(clock)
    watchers = [
        (Pace(0.0, clock, lambda: rng.uniform(-0.25, 0.25)),
         SharedQueue(scheduler, "squeue", folder=tmp_path, clock=clock))
        for _ in range(JOBS)
    ]  # fmt: skip
    minutes, heard, late = 12, [0.0] * JOBS, 0.0
    news = sorted(
        (1000 + rng.uniform(0, 60 * minutes), rng.randrange(JOBS)) for _ in range(changes)
    )
    waiting: dict[int, float] = {}
    while clock.now < 1000 + 60 * (minutes + 1):
        while news and news[0][0] <= clock.now:
            _, index = news.pop(0)
            watchers[index][0].changed()
            waiting[index] = clock.now
        for index, (pace, queue) in enumerate(watchers):
            found = queue.look(max(heard[index], pace.since)) if pace.due else None
            if found is not None:
                heard[index] = found[0]
                pace.looked()
                late = max(late, clock.now - waiting.pop(index, clock.now))
        clock.now += 0.25
    calls = scheduler.calls
    assert all(b - a >= APART_S for a, b in itertools.pairwise(calls))
    for first, fifth in zip(calls, calls[CALLS:], strict=False):
        assert fifth - first >= WINDOW_S
    assert len(calls) >= minutes / 2
    assert not waiting
    assert late <= WINDOW_S + STEADY_S


def test_an_answer_from_before_a_restart_of_the_machine_is_none(tmp_path):
    clock = Clock()
    scheduler = Scheduler(clock)
    before = SharedQueue(scheduler, "squeue", folder=tmp_path, clock=clock)
    assert before.look(0.0) is None
    clock.now += 1
    assert before.look(0.0) is not None
    clock.now = 5.0  # the clock of a machine counts from its start
    after = SharedQueue(scheduler, "squeue", folder=tmp_path, clock=clock)
    assert after.look(0.0) is None
    clock.now += 1
    assert after.look(0.0) == (5.0, Answer(0, "5.0", ""))


def test_a_queue_of_any_length_is_read_whole(tmp_path, monkeypatch):
    program = tmp_path / "squeue"
    program.write_text("#!/bin/sh\nhead -c 300000 /dev/zero | tr '\\0' x\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    asked = SlurmClient().start("squeue")
    asked._process.wait(60)  # it would never end if its output had no place
    assert len(asked.answer().out) == 300000
