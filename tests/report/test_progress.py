"""The live line at every width, and the plain lines of logs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.report.progress import Moment, Progress, live_line
from orchestrator.rundir.best import BestFigure, BestSoFar
from tests.run_folders import Screen, record

PLAN = {"updates": 100, "micro_steps": 4, "ranks": 4, "nodes": 2}
HALF_DONE = Moment(
    updates=50,
    total=100,
    loss=0.25,
    samples_per_second=1250.0,
    seconds_left=10.0,
    micro_steps=4,
    micro_steps_done=3,
)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def printed(screen):
    return screen.text.splitlines()


def test_without_a_terminal_a_line_comes_at_most_every_two_seconds(screen):
    clock = Clock()
    with Progress({**PLAN, "updates": 41}, screen, clock=clock) as progress:
        for update in range(41):
            progress.update([record(update)])
            clock.now += 0.125
    shown = [line.split("  loss")[0] for line in printed(screen)]
    assert shown[0] == "starting 4 ranks on 2 nodes"
    assert shown[1:] == ["update  1/41", "update 17/41", "update 33/41", "update 41/41"]


def test_the_last_update_is_shown_also_when_the_run_ends_early(screen):
    progress = Progress(PLAN, screen, clock=Clock())
    progress.update([record(0)])
    progress.update([record(1), record(2)])
    progress.close()
    progress.close()
    assert [line.split()[:2] for line in printed(screen)[1:]] == [
        ["update", "1/100"],
        ["update", "3/100"],
    ]


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1"}, {"TERM": "dumb"}])
def test_without_a_terminal_no_cursor_is_moved(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    screen = Screen()
    with Progress(PLAN, screen, clock=Clock()) as progress:
        progress.update([record(0)], (3, 4))
    assert "\x1b" not in screen.text.replace("\x1b[0m", "")
    assert "\r" not in screen.text


def test_quiet_says_nothing(screen):
    with Progress(PLAN, screen, quiet=True, verbose=True) as progress:
        progress.update([record(0)], (3, 4))
    assert screen.text == ""


def test_verbose_says_a_line_of_each_update(screen):
    with Progress(PLAN, screen, verbose=True) as progress:
        progress.update([record(0), record(1)])
        progress.update([record(2)])
    assert [line.split("  loss")[0] for line in printed(screen)[1:]] == [
        "update   1/100",
        "update   2/100",
        "update   3/100",
    ]


def test_held_out_figures_have_their_update(screen):
    with Progress(PLAN, screen) as progress:
        progress.update([record(0), {"evaluation": {"accuracy": 0.91}, "update": 0}])
    assert "held-out after update 1: accuracy 0.9100" in printed(screen)


def test_the_time_left_follows_the_recent_pace_and_not_the_pause_of_a_resume(screen):
    clock = Clock()
    progress = Progress({**PLAN, "updates": 12}, screen, clock=clock)
    progress.update([record(n) for n in range(5)])
    clock.now += 3
    progress.update([record(n, attempt=1, time=90000.0 + 2 * n) for n in range(3, 6)])
    assert printed(screen)[-1] == "update  6/12  loss 0.1667  128 samples/s  12 s left"


def test_on_a_terminal_one_line_is_drawn_again_and_again():
    screen = Screen(width=80, force_terminal=True)
    with Progress(PLAN, screen, live=True) as progress:
        for update in range(3):
            progress.update([], (2, 4))
            progress.update([record(update)], (1, 3))
    assert "●●\x1b[0m\x1b[2m○○" in screen.text
    assert "●\x1b[0m\x1b[2m○○\x1b" in screen.text
    # A line feed would scroll; the only one is that which ends the line.
    assert screen.text.count("\n") == 1
    assert screen.text.rstrip().endswith("\x1b[?25h")
    assert " left" not in screen.text.splitlines()[-2].rsplit("\r", 1)[-1]


def test_a_line_has_the_metrics_of_the_last_update(screen):
    with Progress(PLAN, screen) as progress:
        progress.update([record(0, metrics={"accuracy": 0.5, "found": 2})])
    assert printed(screen)[-1].startswith(
        "update   1/100  loss 1.0000  accuracy 0.5000, found 2  1,280 samples/s"
    )


def test_an_evaluation_is_said_with_the_best_so_far(screen):
    earlier = BestSoFar("held_out.accuracy")
    earlier.add(1, {"accuracy": 0.7})
    heights = ((3, 0.6, 0), (5, 0.9, 0), (7, 0.8, 0), (5, 0.65, 1), (7, 0.75, 1))
    with Progress(PLAN, screen, best=earlier) as progress:
        for update, accuracy, attempt in heights:
            progress.update(
                [{"evaluation": {"accuracy": accuracy}, "update": update, "attempt": attempt}]
            )
    assert [line for line in printed(screen) if "held-out" in line] == [
        "held-out after update 4: accuracy 0.6000; best accuracy 0.7000 after update 1",
        "held-out after update 6: accuracy 0.9000, the best so far",
        "held-out after update 8: accuracy 0.8000; best accuracy 0.9000 after update 6",
        "held-out after update 6: accuracy 0.6500; best accuracy 0.7000 after update 1",
        "held-out after update 8: accuracy 0.7500, the best so far",
    ]


def test_what_is_least_important_is_left_out_first_of_a_narrow_line():
    moment = replace(
        HALF_DONE,
        updates=5,
        total=10,
        metrics={"error": 0.125},
        best=BestFigure("-held_out.loss", updates=3, value=0.5),
        evaluation={"loss": 0.75},
    )
    parts = [
        "loss 0.2500",
        "error 0.1250",
        "held-out loss 0.7500",
        "best loss 0.5000",
        "1,250 samples/s",
        "10 s left",
        "●●●○",
    ]
    least_first = [parts[1], parts[2], parts[3], parts[6], parts[4], parts[5]]
    numbers = set()
    for width in range(140, 25, -1):
        line = live_line(moment, Screen(width=width)).plain
        shown = [part for part in parts if part in line]
        numbers.add(left_out := len(parts) - len(shown))
        assert shown == [part for part in parts if part not in least_first[:left_out]]
        assert line.endswith("  ".join(shown)), "in their order"
    assert numbers == set(range(7))


def test_the_line_at_80_and_120_columns():
    moment = replace(HALF_DONE, evaluation={"accuracy": 0.9})
    narrow, wide = (live_line(moment, Screen(width=w)).plain for w in (80, 120))
    assert narrow == (
        "update  50/100  ━━━━━━━━────────  loss 0.2500  1,250 samples/s  10 s left  ●●●○"
    )
    assert "held-out accuracy 0.9000" in wide
    assert len(wide) == 119


@pytest.mark.parametrize(
    ("steps", "shown"), [(1, ""), (4, "●●○○"), (16, "●" * 8 + "○" * 8), (64, "32/64")]
)
def test_dots_are_counted_by_eye_or_given_in_figures(steps, shown):
    moment = Moment(updates=1, total=9, micro_steps=steps, micro_steps_done=steps // 2)
    line = live_line(moment, Screen(width=120)).plain
    assert line.endswith("─  " + shown if shown else "─")


@given(
    width=st.integers(10, 200),
    updates=st.integers(0, 10**7),
    more=st.none() | st.integers(0, 10**7),
    loss=st.none() | st.floats(),
    pace=st.none() | st.floats(0, 1e5),
    steps=st.integers(1, 2000),
    done=st.none() | st.integers(0, 3000),
)
def test_the_line_is_one_line_that_begins_with_the_update_at_any_width(
    width, updates, more, loss, pace, steps, done
):
    total = None if more is None else updates + more
    line = live_line(
        Moment(
            updates=updates,
            total=total,
            loss=loss,
            samples_per_second=pace,
            seconds_left=pace,
            micro_steps=steps,
            micro_steps_done=done,
            metrics={"error\n": 0.5},
            evaluation={"accuracy\n": 0.5},
        ),
        Screen(width=width),
    )
    assert line.cell_len < width
    assert "\n" not in line.plain
    assert line.plain.startswith("update"[: width - 1])
