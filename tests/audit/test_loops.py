"""Loops with a fault and right ones, judged on one and three ranks (elsewhere on two)."""

import pytest

from orchestrator.audit.faults import FAULTS
from orchestrator.audit.judge import RIGHT, ROWS, WRONG, judge, read_trace
from orchestrator.cli.audit import Audit
from tests import warm
from tests.audit import loop
from tests.audit.observed import NAMES

NEED_RANKS = {
    "mean-of-means-over-ranks", "not-reduced", "reduced-each-micro-step", "same-data",
    "clipped-before-reduction", "fewer-micro-steps",
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 3])
def test_each_fault_is_named_and_no_other_and_right_loops_are_right_in_every_row(tmp_path, size):
    warm.ranks("tests.audit.observed", size, tmp_path)
    for name in NAMES:
        traces = [read_trace(tmp_path / name, rank) for rank in range(size)]
        made = Audit(size, judgement=judge(traces))
        if name == "none" or name in loop.RIGHT:
            states = {row: made.judgement.state(row) for row in ROWS}
            assert set(states.values()) == {RIGHT}, (name, states)
            assert max(u["relative_error"] for u in made.judgement.updates) < 1e-6
        elif size == 1 and name in NEED_RANKS:
            assert made.state == RIGHT or name == "fewer-micro-steps", (name, made.judgement)
            assert set(made.judgement.faults) <= FAULTS.keys()
        else:
            assert (made.state, made.judgement.faults) == (WRONG, [name])
