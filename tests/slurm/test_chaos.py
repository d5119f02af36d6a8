"""The harness of `python -m benchmarks chaos`: repeatable, complete, and one run of it."""

from collections import Counter

import pytest

from benchmarks.chaos import draws, play
from benchmarks.chaos_faults import FAULTS
from benchmarks.chaos_run import MOMENTS, Draw


def test_a_seed_repeats_itself_and_every_kind_has_its_turn():
    chosen = list(draws(7, 2 * len(FAULTS)))
    assert chosen == list(draws(7, 2 * len(FAULTS)))
    assert chosen != list(draws(8, 2 * len(FAULTS)))
    counted = Counter(draw.faults[0][0] for draw in chosen)
    assert counted == dict.fromkeys(FAULTS, 2)
    assert {moment for draw in chosen for _, moment in draw.faults} == set(MOMENTS)
    assert any(len(draw.faults) == 2 for draw in chosen)
    late = [kind for draw in chosen for kind, moment in draw.faults if moment == "after"]
    assert all(FAULTS[kind].late for kind in late)


@pytest.mark.timeout(400)
def test_two_faults_in_a_row_change_nothing(mended, tmp_path):
    draw = Draw(faults=(("kill a rank", "window"), ("kill the batch script", "checkpoint")), seed=5)
    (outcome,) = play(mended, tmp_path, [draw], print)
    assert outcome.wrong == []
    assert outcome.redone <= 6
