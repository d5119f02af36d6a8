"""Where the seconds of a window go."""

import time

import pytest

from orchestrator.engine.common.clock import Clock


@pytest.fixture
def tick(monkeypatch):
    """Moves the time on."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def move(seconds):
        now[0] += seconds

    return move


def test_each_moment_counts_once_for_what_began_last(tick):
    clock = Clock()
    tick(1)
    with clock.compute():
        tick(2)
        with clock.wait():
            tick(4)
        tick(8)
        with clock.compute():
            tick(16)
    tick(32)
    with clock.optimize():
        tick(64)
    assert clock.seconds() == {"compute_s": 26.0, "wait_s": 4.0, "optimizer_s": 64.0}


def test_what_fails_is_over_and_a_window_begins_from_nothing(tick):
    clock = Clock()

    def fails():
        with clock.compute():
            tick(1)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    tick(2)
    assert clock.seconds()["compute_s"] == 1.0
    clock.begin()
    assert set(clock.seconds().values()) == {0.0}
