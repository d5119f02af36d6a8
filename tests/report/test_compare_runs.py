"""Differences between the settings and losses of two runs."""

import math

from orchestrator.report.compare_runs import compare_curves, differing_settings
from tests.run_folders import record


def test_losses_are_compared_update_by_update(made):
    def lines(*losses):
        return [record(n) | {"loss": loss} for n, loss in enumerate(losses)]

    a = made("a", records=lines(4.0, 2.0, 1.0, math.nan, 3.0))
    b = made("b", records=lines(4.0, 2.5, 1.0, math.nan))
    found = compare_curves(a, b)
    assert (found.updates, found.first, found.update) == (4, 1, 1)
    assert found.max_relative_difference == 0.2
    assert compare_curves(a, a).first is None
    assert compare_curves(made("c", records=[]), a).updates == 0
    finite = made("d", records=lines(4.0, math.inf))
    assert compare_curves(a, finite).max_relative_difference == math.inf


def test_settings_are_compared_but_for_the_place(made):
    a, b = made("e", "train.seed=1", "tracker=none"), made("f", "train.seed=2", "run.note=x")
    assert differing_settings(a, b) == {"train.seed": [1, 2]}
