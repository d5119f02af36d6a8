"""Figures in documents are those of the results, and absent ones are named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import pages, peers_page, peers_tables
from benchmarks.measure import RESULTS, kept


@pytest.mark.parametrize("name", pages.DOCUMENTS)
def test_figures_in_documents_are_those_of_the_results(name):
    text = pages.DOCUMENTS[name].read_text(encoding="utf-8")
    assert f"<!-- figures: {name} -->" in text
    assert pages.filled(text) == text, "run `python -m benchmarks tables`"


@pytest.mark.parametrize("result", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_page_is_that_of_its_result(result):
    page = result.with_suffix(".md").read_text(encoding="utf-8")
    assert pages.page(result.stem, kept(result.stem)) == page, "run `python -m benchmarks tables`"


def _row(name, ratio, *, steps=1, q1=None, seconds=0.01):
    return {
        "net": "mlp",
        "ranks": 2,
        "link": "loopback",
        "steps": steps,
        "name": name,
        "spread": {"median": seconds},
        "collectives": 1,
        "bytes": 4100.0,
        "ratio": {"median": ratio, "q1": ratio if q1 is None else q1, "q3": ratio},
    }


def _peers(times, missing=None):
    return {
        "times": times,
        "reference": "DDP + no_sync",
        "contenders": ["ours", "Accelerate"],
        "missing": missing or {},
        "parameters": {"mlp": 1000},
    }


def test_a_contender_that_is_not_installed_is_a_row_that_says_so():
    text = peers_tables.times(_peers([_row("ours", 0.98)], {"Accelerate": "not installed (pip …)"}))
    assert "| ours | 10 ms **0.98** (0.98 to 0.98) |" in text
    assert "| Accelerate | not installed (pip …) |" in text


def test_a_cell_that_was_not_measured_says_so():
    text = peers_tables.times(_peers([_row("ours", 1.0), _row("Accelerate", 1.0, steps=2)]))
    assert text.count("not measured") == 2


@given(ratios=st.lists(st.floats(0.5, 2.0), min_size=1, max_size=12), data=st.data())
def test_the_verdict_is_that_of_the_data_whatever_the_spread(ratios, data):
    """No cell may be left out of the count, nor out of the worst (peers.json once had more)."""
    rows = [_row("ours", r, steps=k, q1=data.draw(st.floats(0.1, r))) for k, r in enumerate(ratios)]
    said = peers_page.verdict(_peers(rows))
    slower = [ratio for ratio in ratios if ratio > peers_page.WORSE]
    if slower:
        assert f"In {len(slower)} it is slower" in said
        assert f"at worst {max(slower):.2f} times" in said
    else:
        assert "in none more than" in said


def test_ours_is_compared_with_each_of_the_others_cell_by_cell():
    rows = [_row("ours", 0.9), _row("ours", 1.2, steps=2)]
    rows += [_row("Accelerate", 1.8), _row("Accelerate", 1.2, steps=2)]
    assert peers_page.typical(_peers(rows), "ours", "Accelerate") == pytest.approx(0.75)


def test_a_loss_is_reached_when_its_mean_over_updates_is():
    row = {"losses": [5.0, 1.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0]}
    assert peers_tables.reached(row, 2.0) == 6
    assert peers_tables.reached(row, 0.5) is None
