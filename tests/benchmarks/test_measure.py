"""What every measurement rests on."""

import doctest
from itertools import pairwise

import pytest

from benchmarks import measure, peers_tables


@pytest.mark.parametrize("module", [measure, peers_tables])
def test_the_examples_hold(module):
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


def test_every_round_begins_with_another_and_warm_up_is_not_counted():
    calls = []
    figures = measure.interleaved(
        {name: lambda name=name: calls.append(name) or len(calls) for name in "abc"}, 3, warm_up=1
    )
    assert "".join(calls) == "abc" + "bac" + "cab" + "acb"
    assert figures["a"] == [5, 8, 10]


def test_over_rounds_everybody_follows_everybody_else():
    followers = set()
    for turn in measure.turns("abcdefg", 6):
        assert sorted(turn) == sorted("abcdefg")
        followers |= set(pairwise(turn)) | {(turn[-1], turn[0])}
    assert len(followers) == 7 * 6


def test_ratios_are_taken_within_a_round_so_that_drift_cancels_out():
    drifting = {"ours": [1.0, 10.0, 100.0], "theirs": [2.0, 20.0, 200.0]}
    rows = measure.rows_of(drifting, "theirs")
    assert [row["ratio"]["q3"] for row in rows] == [0.5, 1.0]
    assert rows[0]["spread"]["median"] == 10.0
    assert rows[0]["spread"]["count"] == 3


def test_a_single_figure_has_a_spread():
    assert measure.Spread.of([2.0]) == measure.Spread(
        median=2.0, q1=2.0, q3=2.0, low=2.0, high=2.0, count=1
    )


def test_a_missing_result_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        measure.kept("nothing", tmp_path)
